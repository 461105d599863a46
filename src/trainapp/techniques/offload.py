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
    """Move activations to the host, as `memory.offload_activations` says.

    With "all", returns the object that moves a forward's activations: see `Offload.wrap_compute`. With "inputs", wraps
    the forwards of the model's checkpointed blocks instead, of which only the inputs are moved. Raises UserError for a
    model without blocks.
    """
    mode = config.memory.offload_activations
    if mode == "all":
        return Offload(model)
    if mode == "inputs":
        blocks = blocks_of(model, "memory.offload_activations=inputs")
        checkpointed_blocks = blocks[:: config.activation_checkpointing.every]
        offload = Offload(model)
        for block in checkpointed_blocks:
            block.forward = offload.wrap_compute(block.forward)
    return None


class Offload:
    """Storage on the host of the tensors that a forward saves for backward, which fetches them back.

    Parameters and buffers are not moved, nor tensors in storages below LEAST bytes, nor tensors that are not strided.

    Args:
        model: the model whose parameters and buffers stay.
        device_type: device type whose tensors are moved; on the CPU nothing moves.
    """

    def __init__(self, model: nn.Module, device_type: str = "cuda"):
        self._model = model
        self.device_type = device_type
        self._copy_stream: Any = None
        self._persistent: set[int] = set()  # by storage_id
        # By storage and version, while the forward runs: a tensor written since it was saved is stored again.
        self._stored: dict[tuple[int, int], tuple[weakref.ref[Any], _Stored]] = {}
        self._last: Callable[[], _Stored | None] = _nothing  # the storage that was stored last, while alive

    def wrap_compute(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the forward of a model, or of a part of one, whose activations move."""

        @functools.wraps(forward)
        def offloaded(*inputs: Any, **options: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*inputs, **options)
            self._persistent = self._storages_of_model()
            try:
                with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                    return forward(*inputs, **options)
            finally:
                self._stored.clear()

        return offloaded

    def _storages_of_model(self) -> set[int]:
        """Return the ids of the storages of the model's parameters and buffers."""
        ids = set()
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            if tensor.layout is torch.strided:
                storage = local(tensor).untyped_storage()
                ids.add(storage_id(storage))
        return ids

    def _pack(self, tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        """Return what the graph keeps of a saved tensor: the tensor, or a function that returns it from its copy."""
        if tensor.device.type != self.device_type or tensor.layout is not torch.strided:
            return tensor

        # Neither the model's own tensors nor FSDP's gathered parameters, which it frees and gathers itself.
        storage = tensor.untyped_storage()
        is_parameter = isinstance(tensor, nn.Parameter) or isinstance(base_of(tensor), nn.Parameter)
        if is_parameter or storage.nbytes() < LEAST or storage_id(storage) in self._persistent:
            return tensor

        # The tensor is a view of its storage, which is stored whole.
        stored = self._store(tensor)
        layout = (tensor.storage_offset(), tensor.size(), tensor.stride())
        return functools.partial(stored.view, tensor.dtype, tensor.device, *layout)

    def _store(self, tensor: Tensor) -> "_Stored":
        """Copy the tensor's storage to the host, unless this version of it is there."""
        storage = tensor.untyped_storage()
        key = (storage_id(storage), version_of(tensor))
        if key in self._stored:
            stored_storage, stored = self._stored[key]
            if stored_storage() is storage:  # otherwise it was freed, and another one has its id
                return stored

        # All bytes of the storage. Backward, which runs in reverse, needs the one stored before it next.
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        stored = _Stored(self, flat, self._last)
        self._last = weakref.ref(stored)
        self._stored[key] = (weakref.ref(storage), stored)
        return stored

    def copy(self, to: Tensor, source: Tensor) -> Any:
        """Start a copy, after the device's work so far. Returns an event to wait for, if any."""
        if self.device_type != "cuda":
            to.copy_(source)
            return None

        on_device = source if source.is_cuda else to
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream(on_device.device)
        self._copy_stream.wait_stream(torch.cuda.current_stream(on_device.device))
        with torch.cuda.stream(self._copy_stream):
            to.copy_(source, non_blocking=True)
        on_device.record_stream(self._copy_stream)  # once freed, its memory is used again only after the copy
        return self._copy_stream.record_event()


class _Stored:
    """A storage whose bytes are on the host. Owned by the graph that needs it.

    Args:
        offload: copies the bytes.
        flat: all bytes of the storage on the device.
        before: returns the previously stored one, which backward needs next, while it is alive.
    """

    def __init__(self, offload: Offload, flat: Tensor, before: "Callable[[], _Stored | None]"):
        self._offload = offload
        self._device = flat.device
        self._before = before
        self._host = torch.empty(flat.nbytes, dtype=torch.uint8, pin_memory=offload.device_type == "cuda")
        offload.copy(self._host, flat)
        self._fetched: tuple[Tensor, Any] | None = None  # on its way to the device, and the copy's event; not used yet
        self._used: Callable[[], torch.UntypedStorage | None] = _nothing  # the storage on the device, while alive

    def fetch(self) -> None:
        """Start to copy the storage to the device, unless it is there or being copied."""
        if self._fetched is None and self._used() is None:
            flat = torch.empty(self._host.nbytes, dtype=torch.uint8, device=self._device)
            arrival = self._offload.copy(flat, self._host)
            self._fetched = (flat, arrival)

    def storage(self) -> torch.UntypedStorage:
        """Return the storage on the device. Starts to fetch the one that backward needs next."""
        # The first use waits for the copy; later ones find the storage, as long as it is alive.
        self.fetch()
        storage = self._used()
        if self._fetched is not None:
            flat, arrival = self._fetched
            storage = flat.untyped_storage()
            self._fetched = None
            self._used = weakref.ref(storage)
            if arrival is not None:
                torch.cuda.current_stream(self._device).wait_event(arrival)

        before = self._before()
        if before is not None:
            before.fetch()
        assert storage is not None, "it is on the device, or was being copied"
        return storage

    def view(self, dtype: torch.dtype, device: torch.device, *layout: Any) -> Tensor:
        """Return a saved tensor.

        Args:
            dtype: the tensor's.
            device: the tensor's, since a storage's is "meta" without data.
            layout: its offset in the storage, size and strides.
        """
        return torch.empty(0, dtype=dtype, device=device).set_(self.storage(), *layout)


def _nothing() -> None:
    """Stand in for a weak reference to an object that is not alive."""


def _unpack(packed: Tensor | Callable[[], Tensor]) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    return packed()
