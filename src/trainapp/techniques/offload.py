"""Activation offload: what backward needs waits in pinned host memory instead of on the GPU.

Copies run on a stream of their own. In the forward, a tensor is freed once it is copied; the computation waits if more
than STASH copies are under way, so that the device's memory does not depend on how far the host runs ahead. In
backward, storages are fetched before they are needed, in the reverse order. The scheme is that of torchtune's
`OffloadActivations`; torch's `save_on_cpu` waits for every copy, and copies a storage once per view.
"""

import functools
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trainapp.config.schema import Config
from trainapp.models.inspect import blocks_of
from trainapp.parallel.strategy import local
from trainapp.torch_private import base_of, storage_id, version_of

LEAST = 2**20  # bytes; copying smaller tensors takes longer than it saves
STASH = 4  # copies under way in the forward
AHEAD = 2**27  # bytes that are fetched before they are needed

F = TypeVar("F", bound=Callable[..., Any])


def apply(model: nn.Module, config: Config) -> "Offload | None":
    """With `memory.offload_activations=all`, what moves the activations of a forward: see `Offload.around`.

    With "inputs", only what the checkpointed blocks of the model are called with is moved, and their forwards are
    wrapped. Raises UserError for a model without blocks.
    """
    mode = config.memory.offload_activations
    if mode == "inputs":
        blocks = blocks_of(model, "memory.offload_activations=inputs")
        moving = Offload(model)
        for block in blocks[:: config.activation_checkpointing.every]:
            block.forward = moving.around(block.forward)
    return Offload(model) if mode == "all" else None


class Offload:
    """Moves what a forward saves for backward to the host, and fetches it back in backward.

    device_type: that whose tensors are moved. All others stay, so that on the CPU nothing moves. Parameters and buffers
    stay, as do tensors in storages below LEAST bytes, and all that is not strided.
    """

    def __init__(self, model: nn.Module, device_type: str = "cuda"):
        self._model, self._device_type = model, device_type
        self._has_streams = device_type == "cuda"
        self._stream: Any = None  # of the copies
        self._persistent: set[int] = set()  # by storage_id
        # By storage and version, while the forward runs: a tensor that was written since it was saved is another one.
        self._known: dict[tuple[int, int], tuple[weakref.ref[Any], weakref.ref[_Stored]]] = {}
        self._last: weakref.ref[_Stored] | None = None
        self._leaving: deque[tuple[Tensor, Any]] = deque()  # what the host does not have yet

    def around(self, forward: F) -> F:
        """The forward of a model, or of a part of one, whose activations move."""

        @functools.wraps(forward)
        def moving(*inputs: Any, **options: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*inputs, **options)
            tensors = (*self._model.parameters(), *self._model.buffers())
            self._persistent = {storage_id(local(t).untyped_storage()) for t in tensors if t.layout is torch.strided}
            try:
                with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                    return forward(*inputs, **options)
            finally:
                self._known.clear()
                self._free_copied()

        return moving  # type: ignore[return-value]

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
            kept = self._store(storage, tensor.device)
            self._known[key] = weakref.ref(storage), weakref.ref(kept)
        return _Handle(kept, tensor)

    def _store(self, storage: torch.UntypedStorage, device: torch.device) -> "_Stored":
        """Begin to copy a storage to the host."""
        flat = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._has_streams)
        self._leaving.append((flat, self.copy(host, flat)))
        self._free_copied(but=STASH)
        stored = _Stored(self, host, device, self._last)
        self._last = weakref.ref(stored)
        return stored

    def _free_copied(self, but: int = 0) -> None:
        """Free what was copied to the host, but for the last few copies. The device waits for those, not the host."""
        while len(self._leaving) > but:
            flat, arrival = self._leaving.popleft()
            wait_for(arrival, flat.device)  # what takes this memory next is computed after the copy
            del flat

    def copy(self, to: Tensor, source: Tensor) -> Any:
        """Begin a copy, after what was asked of the device so far. Returns what to wait for; None if it is done."""
        if not self._has_streams:
            to.copy_(source)
            return None
        on_device = source if source.is_cuda else to
        self._stream = self._stream or torch.cuda.Stream(on_device.device)
        self._stream.wait_stream(torch.cuda.current_stream(on_device.device))
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def fetch(self, host: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        """Begin to copy to the device. Returns the copy, and what to wait for before it is read."""
        flat = torch.empty(host.nbytes, dtype=torch.uint8, device=device)
        arrival = self.copy(flat, host)
        if arrival is not None:
            flat.record_stream(self._stream)  # it may be freed unread, by an error
        return flat, arrival


def wait_for(arrival: Any, device: torch.device) -> None:
    """Let the device's computation wait for a copy."""
    if arrival is not None:
        torch.cuda.current_stream(device).wait_event(arrival)


class _Stored:
    """A storage whose bytes are on the host. Belongs to the graph that needs it, and is gone with it.

    before: the one that was stored before it, which backward needs after it.
    """

    def __init__(self, offload: Offload, host: Tensor, device: torch.device, before: "weakref.ref[_Stored] | None"):
        self.host, self.before = host, before
        self._offload, self._device = offload, device
        self._coming: tuple[Tensor, Any] | None = None  # fetched, and not used yet
        self._used: Callable[[], torch.UntypedStorage | None] = lambda: None  # its storage, while that is alive

    def fetch(self) -> None:
        """Begin to fetch it, unless it is here or on its way."""
        if self._coming is None and self._used() is None:
            self._coming = self._offload.fetch(self.host, self._device)

    def storage(self) -> torch.UntypedStorage:
        """Its bytes on the device. Begins to fetch what will be needed next."""
        storage = self._used()
        if storage is None:
            self.fetch()
            assert self._coming is not None, "just fetched"
            flat, arrival = self._coming
            storage = flat.untyped_storage()
            self._coming, self._used = None, weakref.ref(storage)
            wait_for(arrival, self._device)
        following, coming = self, 0
        while following.before is not None and coming < AHEAD and (one := following.before()) is not None:
            one.fetch()
            following, coming = one, coming + one.host.nbytes
        return storage


class _Handle:
    """One saved tensor: where it lies in its storage."""

    def __init__(self, stored: _Stored, tensor: Tensor):
        self.stored, self.dtype, self.device = stored, tensor.dtype, tensor.device
        self.shape, self.strides, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()


def _unpack(packed: Tensor | _Handle) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    storage = packed.stored.storage()
    # The tensor's device rather than the storage's, which is "meta" for a tensor without data.
    view = torch.empty(0, dtype=packed.dtype, device=packed.device)
    return view.set_(storage, packed.offset, packed.shape, packed.strides)
