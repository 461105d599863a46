"""A block of work that leaves no trace in the model, the task and the data: `untouched`.

The restore point of a step covers what a forward is expected to change. This covers what a forward may change when
unasked: plain attributes too, and the first write to a parameter, without a copy of the model.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from trainapp.checkpoint.plain import digest, encoded
from trainapp.checkpoint.stateful import Stateful
from trainapp.errors import UserError
from trainapp.rng import preserved_rng
from trainapp.torch_operators import draws_numbers, written_arguments
from trainapp.torch_private import DispatchMode
from trainapp.train.attributes import Attributes, has_plain_memory


class KeepsWritten(DispatchMode):
    """While active, copies memory that is older than itself before an operation writes to it; `restore` puts it back.

    among: of the memory of these tensors alone. Writes through NumPy are not seen: see `Attributes`. Attribute:
    `has_drawn`, whether an operation took random numbers.
    """

    def __init__(self, among: Iterable[Tensor] | None = None) -> None:
        super().__init__()
        self.has_drawn = False
        self._among = None if among is None else {tensor.untyped_storage().data_ptr() for tensor in among}
        self._new: set[int] = {0}  # addresses of memory that was allocated inside; 0: of tensors without elements
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [tensor for value in (*args, *kwargs.values()) for tensor in _plain_tensors(value)]
        self.has_drawn = self.has_drawn or draws_numbers(func)
        for tensor in self._written(func, args, kwargs):
            self._keep(tensor)
        result = func(*args, **kwargs)
        before = {tensor.untyped_storage().data_ptr() for tensor in given}
        self._new |= {tensor.untyped_storage().data_ptr() for tensor in _plain_tensors(result)} - before
        return result

    def _written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
        if "batch_norm" in str(func):  # its statistics, which the schema does not name
            values = (*args, *kwargs.values())
        else:
            writes = written_arguments(func) if hasattr(func, "_schema") else ()
            values = tuple(arg for arg, is_written in zip(args, writes, strict=False) if is_written)
            values = (*values, *kwargs.values()) if any(writes[len(args) :]) else values
        for value in values:
            yield from _plain_tensors(value)

    def _keep(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        is_watched = place in self._among if self._among is not None else place not in self._new
        if is_watched and place not in self._copies:
            self._copies[place] = storage, storage.clone()

    def restore(self) -> None:
        """Put back what was written. Call outside of the mode."""
        for storage, copy in self._copies.values():
            if storage.nbytes() != copy.nbytes():
                storage.resize_(copy.nbytes())
            storage.copy_(copy)


def _plain_tensors(value: Any) -> Iterator[Tensor]:
    """Tensors with memory of their own, also in lists."""
    if isinstance(value, Tensor):
        if has_plain_memory(value):
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _plain_tensors(item)


@contextlib.contextmanager
def untouched(device: torch.device, **roots: Any) -> Iterator[KeepsWritten]:
    """What the block does to `roots` is undone after it: see `Stateful` for their names; and to the global generators.

    Of the data, only states and attributes that are numbers: what it has loaded meanwhile stays. Costs a walk over what
    the roots hold, copies of the NumPy arrays in model and task, and of the memory that is written. Logs what it could
    not undo, see `Attributes`.
    """
    stateful = Stateful(**roots)
    others = [root for name, root in roots.items() if name != "data"]
    states, attributes, written = stateful.take(), Attributes(*others), KeepsWritten()
    of_data = Attributes(roots.get("data"), numbers_only=True)
    frozen = [(p, p.requires_grad) for m in (roots["model"], *stateful.modules.values()) for p in m.parameters()]
    with preserved_rng(device), stateful.preserved_generators():
        try:
            with written:
                yield written
        finally:
            written.restore()
            attributes.restore()
            of_data.restore()
            for parameter, needs_gradient in frozen:
                parameter.requires_grad_(needs_gradient)
            now = stateful.take()
            # Only where attributes were not all of it: a method of the user's is not called without need.
            changed = {name: state for name, state in states.items() if not _are_equal(state, now[name])}
            stateful.restore(changed, but=("generator",))


def _are_equal(a: Any, b: Any) -> bool:
    try:
        return digest(encoded(a, "")) == digest(encoded(b, ""))
    except UserError:  # it holds more than plain values and tensors
        return False
