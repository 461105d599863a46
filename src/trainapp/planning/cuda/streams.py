"""Streams of a device that is not here: they only say on which one an allocation is made.

CUDA's allocator gives a freed block to allocations of the same stream alone (c10/cuda/CUDACachingAllocator.cpp), at
once unless `record_stream` was called on it. FSDP2, which gathers and reduces on streams of its own, never calls it: it
holds references to what another stream still uses, and drops them behind an event (torch 2.13,
fsdp/_fully_shard/_fsdp_param_group.py). Nor does ProcessGroupNCCL since torch 2.8, which holds references likewise
(pytorch#150398). So no event decides when memory is free.
"""

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any


class Event:
    """In place of `torch.cuda.Event`. Whatever it waits for has happened."""

    def __init__(self, *args: Any, **options: Any):
        """Takes what torch's takes."""

    def record(self, stream: "Stream | None" = None) -> None:
        """Nothing."""

    def wait(self, stream: "Stream | None" = None) -> None:
        """Nothing."""

    def synchronize(self) -> None:
        """Nothing."""


class Stream:
    """In place of `torch.cuda.Stream`. number: 0 is the default one's, all others differ."""

    _numbers = itertools.count()

    def __init__(self, *args: Any, **options: Any):
        """Takes what torch's takes."""
        self.number = next(self._numbers)

    def wait_event(self, event: Event) -> None:
        """Nothing."""

    def wait_stream(self, stream: "Stream") -> None:
        """Nothing."""

    def synchronize(self) -> None:
        """Nothing."""

    def record_event(self, event: Event | None = None) -> Event:
        """One that has happened."""
        return event or Event()


_DEFAULT = Stream()


class _OfThread(threading.local):
    stream = _DEFAULT


_of_thread = _OfThread()


def current(device: Any = None) -> Stream:
    """In place of `torch.cuda.current_stream`. Each thread has its own, as on a device: autograd's runs hooks, too."""
    return _of_thread.stream


@contextlib.contextmanager
def using(stream: Stream | None) -> Iterator[None]:
    """In place of `torch.cuda.stream`."""
    before = _of_thread.stream
    _of_thread.stream = before if stream is None else stream
    try:
        yield
    finally:
        _of_thread.stream = before
