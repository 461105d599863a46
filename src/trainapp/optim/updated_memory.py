"""Notices a backward that reads a parameter after its update: its gradients would be those of no model.

Torch's own check, the versions of saved tensors, misses what a recomputation reads, `.data`, what saved-tensor hooks
hand through, and what a Function keeps in its `ctx`. All of them end in an operation on the parameter's memory, which
a dispatch mode sees. It costs some microseconds per operation of the backward that updates.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainapp.errors import UserError
from trainapp.torch_private import DispatchMode, storage_id
from trainapp.units import listed

# They look at shapes alone.
_READ_NOTHING = frozenset(
    f"{kind}_{suffix}"
    for kind, suffixes in {
        **dict.fromkeys(("empty", "zeros", "ones", "full", "rand", "randn"), ("like",)),
        "new": ("empty", "empty_strided", "zeros", "ones", "full"),
    }.items()
    for suffix in suffixes
)


def slices_refused(model: nn.Module) -> str:
    """The message where parameters are slices of one tensor; empty if none are.

    An update of one then moves the version that torch keeps of the whole, and may lie between the bytes of another.
    """
    by_storage = defaultdict(list)
    for name, parameter in model.named_parameters():
        if parameter.layout is torch.strided and parameter.numel():
            by_storage[storage_id(parameter.untyped_storage())].append(name)
    for names in by_storage.values():
        if len(names) > 1:
            return (
                f"optimizer.in_backward=true: {listed(names)} are slices of one tensor, so that the update of one "
                "counts as a change of the others, which the backward still needs; give each memory of its own "
                "(`.clone()`), or use optimizer.in_backward=false"
            )
    return ""


class UpdatedMemory(DispatchMode):
    """Use around a backward in which parameters are updated. model: whose they are, for the message.

    While active, an operation that reads or writes what `update` was used for raises UserError. Operations that look at
    shapes alone may still have it, and views of it.
    """

    supports_higher_order_operators = True
    _active: "ClassVar[UpdatedMemory | None]" = None

    def __init__(self, model: nn.Module):
        super().__init__()
        self._model = model
        self._is_updating = False
        # By storage: the bytes that were updated. The storages are kept, since numbers are used again.
        self._updated: dict[int, list[tuple[range, Tensor]]] = {}
        self._storages: list[torch.UntypedStorage] = []

    def __enter__(self) -> "UpdatedMemory":
        UpdatedMemory._active = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        UpdatedMemory._active = None
        super().__exit__(*error)

    @classmethod
    def watches(cls, tensor: Tensor) -> bool:
        """Whether this is a parameter that the backward that is running has updated: a read of it is refused."""
        updated = cls._active._updated.values() if cls._active is not None else ()
        return any(parameter is tensor for parts in updated for _, parameter in parts)

    @contextlib.contextmanager
    def update(self, parameter: Tensor) -> Iterator[None]:
        """Use around the update of this parameter, which may do what it likes."""
        self._is_updating = True
        try:
            yield
        finally:
            self._is_updating = False
        if parameter.layout is torch.strided:
            storage = parameter.untyped_storage()
            self._storages.append(storage)
            self._updated.setdefault(storage_id(storage), []).append((bytes_of(parameter), parameter))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._updated and not self._is_updating:
            for value in (*args, *kwargs.values()) if kwargs else args:
                if isinstance(value, Tensor):
                    self._require_not_updated(func, value)
                elif isinstance(value, (list, tuple)):
                    for item in value:
                        if isinstance(item, Tensor):
                            self._require_not_updated(func, item)
        return func(*args, **(kwargs or {}))

    def _require_not_updated(self, func: Any, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            return
        updated = self._updated.get(storage_id(tensor.untyped_storage()))
        if updated is None or getattr(func, "is_view", False):
            return
        operation = getattr(func, "overloadpacket", func).__name__
        if operation in _READ_NOTHING or getattr(func, "namespace", "") == "prim":
            return
        own = bytes_of(tensor)
        for there, parameter in updated:
            if own.start < there.stop and there.start < own.stop:
                name = next(name for name, own in self._model.named_parameters() if own is parameter)
                raise UserError(
                    slices_refused(self._model)
                    or f"optimizer.in_backward=true: the backward needs `{name}` again after its gradient is complete "
                    f"({operation}), such as where an earlier layer, or its recomputation, uses it under detach(): it "
                    "has been updated by then, and the gradients would be wrong; use optimizer.in_backward=false"
                )


def bytes_of(tensor: Tensor) -> range:
    """From the first to the last byte of its storage that a strided tensor may cover."""
    if not tensor.numel():
        return range(0)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset()
    return range(start * tensor.itemsize, (start + last + 1) * tensor.itemsize)
