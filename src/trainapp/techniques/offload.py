"""Activation offload: tensors saved for backward are kept in pinned host memory instead of on the GPU.

Copies run on a separate stream. In the forward, a tensor's memory is freed once it is copied. In backward, using a
storage starts to fetch the previously stored one. torch's `save_on_cpu` waits for every copy, copies a storage once per
view, and also moves parameters.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.config.schema import Config
from trainapp.models.inspect import blocks_of
from trainapp.torch_private import base_of, local, storage_id, version_of

LEAST = 2**20  # bytes; smaller tensors are not worth copying


def apply(model: nn.Module, config: Config) -> "Offload | None":
    """With `memory.offload_activations=all`, returns the object that moves a forward's activations: see
    `Offload.wrap_compute`.

    With "inputs", only the inputs of the model's checkpointed blocks are moved, whose forwards are wrapped. Raises
    UserError for a model without blocks.
    """
    mode = config.memory.offload_activations
    if mode == "inputs":
        blocks = blocks_of(model, "memory.offload_activations=inputs")
        moving = Offload(model)
        for block in blocks[:: config.activation_checkpointing.every]:
            block.forward = moving.wrap_compute(block.forward)
    return Offload(model) if mode == "all" else None


class Offload:
    """Moves tensors that a forward saves for backward to the host, and fetches them back in backward.

    device_type: device type whose tensors are moved; on the CPU nothing moves. Parameters and buffers are not moved,
    nor tensors in storages below LEAST bytes, nor tensors that are not strided.
    """

    def __init__(self, model: nn.Module, device_type: str = "cuda"):
        self._model, self.device_type = model, device_type
        self._stream: Any = None  # for copies
        self._persistent: set[int] = set()  # by storage_id
        # By storage and version, while the forward runs: a tensor written since it was saved is stored again.
        self._known: dict[tuple[int, int], tuple[weakref.ref[Any], _Stored]] = {}
        self._last: Callable[[], _Stored | None] = lambda: None

    def wrap_compute(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the forward of a model, or of a part of one, whose activations move."""

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

        return moving

    def _pack(self, tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        if tensor.device.type != self.device_type or tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        # FSDP's gathered parameters are not the model's: it frees and gathers them itself.
        is_parameter = isinstance(tensor, nn.Parameter) or isinstance(base_of(tensor), nn.Parameter)
        if is_parameter or storage.nbytes() < LEAST or storage_id(storage) in self._persistent:
            return tensor
        key = storage_id(storage), version_of(tensor)
        known, stored = self._known.get(key, (lambda: None, None))
        if known() is not storage or stored is None:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            stored = _Stored(self, flat, self._last)
            self._last = weakref.ref(stored)
            self._known[key] = weakref.ref(storage), stored
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        return functools.partial(stored.view, tensor.dtype, tensor.device, *place)

    def copy(self, to: Tensor, source: Tensor) -> Any:
        """Start a copy, after the device's work so far. Returns an event to wait for, if any."""
        if self.device_type != "cuda":
            to.copy_(source)
            return None
        on_device = source if source.is_cuda else to
        self._stream = self._stream or torch.cuda.Stream(on_device.device)
        self._stream.wait_stream(torch.cuda.current_stream(on_device.device))
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
        on_device.record_stream(self._stream)  # once freed, its memory is used again only after the copy
        return self._stream.record_event()


class _Stored:
    """A storage whose bytes are on the host. Owned by the graph that needs it.

    before: the previously stored one, which backward needs next.
    """

    def __init__(self, offload: Offload, flat: Tensor, before: "Callable[[], _Stored | None]"):
        self._offload, self._device, self._before = offload, flat.device, before
        self._host = torch.empty(flat.nbytes, dtype=torch.uint8, pin_memory=offload.device_type == "cuda")
        offload.copy(self._host, flat)
        self._coming: tuple[Tensor, Any] | None = None  # fetched, but not used yet
        self._used: Callable[[], torch.UntypedStorage | None] = lambda: None  # its storage, while alive

    def fetch(self) -> None:
        """Start to copy the storage to the device, unless it is there or being copied."""
        if self._coming is None and self._used() is None:
            flat = torch.empty(self._host.nbytes, dtype=torch.uint8, device=self._device)
            self._coming = flat, self._offload.copy(flat, self._host)

    def storage(self) -> torch.UntypedStorage:
        """The storage on the device. Starts to fetch the one that backward needs next."""
        self.fetch()
        storage = self._used()
        if self._coming is not None:
            flat, arrival = self._coming
            storage = flat.untyped_storage()
            self._coming, self._used = None, weakref.ref(storage)
            if arrival is not None:
                torch.cuda.current_stream(self._device).wait_event(arrival)
        if (before := self._before()) is not None:
            before.fetch()
        assert storage is not None, "it is on the device, or was being copied"
        return storage

    def view(self, dtype: torch.dtype, device: torch.device, *place: Any) -> Tensor:
        """A saved tensor. device: the tensor's, since a storage's is "meta" without data."""
        return torch.empty(0, dtype=dtype, device=device).set_(self.storage(), *place)


def _unpack(packed: Tensor | Callable[[], Tensor]) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed()
