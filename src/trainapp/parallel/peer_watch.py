"""A thread on each rank that ends its process once another rank has ended after running out of memory outside a vote.

A rank that waits in a collective cannot act on the launcher's SIGTERM: NCCL waits outside of Python. The launcher would
kill it 30 seconds later, and restart the workers only then.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

INTERVAL = 0.2  # seconds between two looks at the store, of which one takes 30 microseconds on one machine


class Store(Protocol):
    """What is used of a store of torch.distributed."""

    def set(self, key: str, value: str) -> None: ...

    def check(self, keys: Sequence[str]) -> bool: ...


class PeerWatch:
    """Looks for a key of the store that a rank sets before it ends.

    Args:
        store: shared by the ranks.
        end_process: called, in the thread, once another rank has set the key. It does not return.
    """

    def __init__(self, store: Store, end_process: Callable[[], None]):
        # A launcher may keep its store when it restarts workers.
        self._key = f"out of memory, restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._store = store
        self._end_process = end_process
        self._is_closed = threading.Event()
        threading.Thread(target=self._watch, name="peer watch", daemon=True).start()

    def announce(self) -> None:
        """Tell the other ranks that this one is about to end, and wait until they have had the time to see it: the
        store may end with this process.
        """
        self._is_closed.set()
        with contextlib.suppress(RuntimeError):  # the store's host may have left
            self._store.set(self._key, "")
            time.sleep(2 * INTERVAL)

    def close(self) -> None:
        """End the watch, after the last collective."""
        self._is_closed.set()

    def _watch(self) -> None:
        while not self._is_closed.wait(INTERVAL):
            try:
                is_announced = self._store.check([self._key])
            except RuntimeError:  # the store's host has left: the launcher ends the others
                return
            if is_announced and not self._is_closed.is_set():
                self._end_process()
