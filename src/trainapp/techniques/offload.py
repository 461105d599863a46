"""Activation offload: what backward needs waits in pinned host memory instead of on the GPU.

Copies run on a stream of their own. In the forward, a tensor is freed once it is copied; the computation waits if more
than STASH copies are under way, so that the device's memory does not depend on how far the host runs ahead. In
backward, storages are fetched before they are needed, in the reverse order. The scheme is that of torchtune's
`OffloadActivations`. Source of the hooks: torch.autograd.graph.saved_tensors_hooks.
"""

import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.config.schema import Config
from trainapp.models.inspect import blocks_of
from trainapp.parallel.strategy import local
from trainapp.torch_private import base_of, storage_id, version_of

LEAST = 2**20  # bytes; copying smaller tensors takes longer than it saves
STASH = 4  # copies under way in the forward
AHEAD = 2**27  # bytes that are fetched before they are needed


class NoOffload:
    """Stands for an `Offload` where all activations stay."""

    def forward(self) -> contextlib.AbstractContextManager[None]:
        """Nothing."""
        return contextlib.nullcontext()


class Offload:
    """Moves what a forward saves for backward to the host, and fetches it back in backward.

    device_type: that whose tensors are moved. All others stay, so that on the CPU nothing moves.
    Parameters and buffers stay, as do tensors in storages below LEAST bytes, and all that is not strided.
    """

    def __init__(self, model: nn.Module, device_type: str = "cuda"):
        self._model, self._device_type = model, device_type
        self._known: dict[tuple[int, int], tuple[weakref.ref[Any], weakref.ref[_Stored]]] = {}
        self._persistent: set[int] = set()
        self._copies = _Copies(device_type)

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Use around a forward, or a part of one. What is packed inside comes back in backward."""
        if not torch.is_grad_enabled():
            yield
            return
        tensors = (*self._model.parameters(), *self._model.buffers())
        self._persistent = {storage_id(local(t).untyped_storage()) for t in tensors if t.layout is torch.strided}
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            self._known.clear()
            self._copies.finish()

    def _pack(self, tensor: Tensor) -> "Tensor | _Handle":
        if tensor.device.type != self._device_type or tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() < LEAST or storage_id(storage) in self._persistent:
            return tensor
        # FSDP's gathered parameters are none of the model's: it frees and gathers them itself.
        if isinstance(tensor, nn.Parameter) or isinstance(base_of(tensor), nn.Parameter):
            return tensor
        key = storage_id(storage), version_of(tensor)
        known, stored = self._known.get(key, (lambda: None, lambda: None))
        kept = stored()
        if known() is not storage or kept is None:
            kept = self._copies.store(storage, tensor.device)
            self._known[key] = weakref.ref(storage), weakref.ref(kept)
        return _Handle(kept, tensor)


class _Handle:
    """One saved tensor: where it lies in its storage."""

    def __init__(self, stored: "_Stored", tensor: Tensor):
        self.stored, self.dtype, self.device = stored, tensor.dtype, tensor.device
        self.shape, self.strides, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()


def _unpack(packed: Tensor | _Handle) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    storage = packed.stored.fetched()
    # The tensor's device rather than the storage's, which is "meta" for a tensor without data.
    view = torch.empty(0, dtype=packed.dtype, device=packed.device)
    return view.set_(storage, packed.offset, packed.shape, packed.strides)


class _Stored:
    """A storage whose bytes are on the host. Belongs to the graph that needs it, and is gone with it.

    before: the one that was stored before it, which backward needs after it.
    """

    def __init__(self, copies: "_Copies", host: Tensor, before: "weakref.ref[_Stored] | None"):
        self.host, self.before = host, before
        self._copies = copies
        self._coming: tuple[torch.UntypedStorage, Any] | None = None  # fetched, and not used yet
        self._used: Callable[[], torch.UntypedStorage | None] = lambda: None  # it, while it is alive

    def fetch(self) -> None:
        """Begin to fetch it, unless it is here or on its way."""
        if self._coming is None and self._used() is None:
            self._coming = self._copies.fetch(self.host)

    def fetched(self) -> torch.UntypedStorage:
        """Its bytes on the device. Begins to fetch what will be needed next."""
        storage = self._used()
        if storage is None:
            self.fetch()
            assert self._coming is not None, "just fetched"
            storage, arrival = self._coming
            self._coming, self._used = None, weakref.ref(storage)
            self._copies.wait(arrival)
        ahead, coming = self._next(), 0
        while ahead is not None and coming < AHEAD:
            ahead.fetch()
            coming += ahead.host.nbytes
            ahead = ahead._next()
        return storage

    def _next(self) -> "_Stored | None":
        """What backward needs after it, if that is still needed."""
        return None if self.before is None else self.before()

    def __del__(self) -> None:
        if self._coming is not None:  # the copy may still write to memory that is about to be free
            self._copies.wait(self._coming[1])


class _Copies:
    """Copies between a device and the host: by a stream of their own and pinned memory, or at once."""

    def __init__(self, device_type: str):
        self._has_streams = device_type == "cuda"
        self._streams: dict[torch.device, Any] = {}
        self._leaving: deque[tuple[Tensor, Any]] = deque()  # what the host does not have yet
        self._last: weakref.ref[_Stored] | None = None
        self._device = torch.device(device_type)

    def store(self, storage: torch.UntypedStorage, device: torch.device) -> _Stored:
        """Begin to copy a storage to the host."""
        self._device = device
        flat = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._has_streams)
        with self._beside():
            host.copy_(flat, non_blocking=self._has_streams)
            self._leaving.append((flat, self._mark()))
        self.finish(STASH)
        stored = _Stored(self, host, self._last)
        self._last = weakref.ref(stored)
        return stored

    def fetch(self, host: Tensor) -> tuple[torch.UntypedStorage, Any]:
        """Begin to copy to the device. Returns the storage, and what to wait for before it is read or freed."""
        flat = torch.empty(host.nbytes, dtype=torch.uint8, device=self._device)
        with self._beside():  # after what was asked of the device so far, which may still use this memory
            flat.copy_(host, non_blocking=self._has_streams)
            return flat.untyped_storage(), self._mark()

    def finish(self, but: int = 0) -> None:
        """Free what was copied to the host, but for the last few copies. The device waits for those, not the host."""
        while len(self._leaving) > but:
            flat, arrival = self._leaving.popleft()
            self.wait(arrival)  # what takes this memory next is computed after the copy
            del flat

    def wait(self, arrival: Any) -> None:
        """Let the device's computation wait for a copy."""
        if arrival is not None:
            torch.cuda.current_stream(self._device).wait_event(arrival)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        if not self._has_streams:
            yield
            return
        stream = self._streams.setdefault(self._device, None) or torch.cuda.Stream(self._device)
        self._streams[self._device] = stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield

    def _mark(self) -> Any:
        return torch.cuda.current_stream(self._device).record_event() if self._has_streams else None


def apply(model: nn.Module, config: Config) -> Offload | NoOffload:
    """What to use around the forward. With "inputs", only what the checkpointed blocks of the model are called with is
    moved, and their forwards are wrapped.

    Raises UserError for a model without blocks.
    """
    mode, checkpointing = config.memory.offload_activations, config.activation_checkpointing
    if mode == "none":
        return NoOffload()
    offload = Offload(model)
    if mode == "all":
        return offload
    for block in blocks_of(model, "memory.offload_activations=inputs")[:: checkpointing.every]:
        block.forward = functools.partial(_with_inputs_moved, offload.forward, block.forward)
    return NoOffload()


def _with_inputs_moved(
    moving: Callable[[], contextlib.AbstractContextManager[None]],
    forward: Callable[..., Any],
    *inputs: Any,
    **options: Any,
) -> Any:
    """The forward of a checkpointed block, which saves nothing but its inputs."""
    with moving():
        return forward(*inputs, **options)
