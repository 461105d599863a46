"""What the forward of a block changes besides its outputs, so that the block can be run a second time without a trace.

A recomputation must start from the state that the first forward started from (a block may compute with a running
statistic that it then updates) and leave the state that it finds. Nothing is written back into a tensor: copies take
the place of the originals while the block is recomputed, so that other modules that share a tensor, and gradients that
have saved it, never see a write.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainapp.models.inspect import MODULE_ATTRIBUTES
from trainapp.optim.updated_memory import UpdatedMemory, bytes_of
from trainapp.rng import HostGenerators
from trainapp.techniques.content_kinds import kind_of, written_to
from trainapp.techniques.contents import Contents, Known, Path
from trainapp.techniques.early_stop import may_stop_early
from trainapp.techniques.kind import PLAIN
from trainapp.techniques.module_dicts import REGISTRIES, Held, are_identical, modules_in, registries_in
from trainapp.techniques.recomputation_errors import (
    ARGUMENT,
    changed,
    failed,
    is_of_the_block,
    too_many,
    written_elsewhere,
)
from trainapp.techniques.tensor_copies import are_equal, copies_of, sum_of
from trainapp.torch_private import is_tracing, non_persistent_buffers, version_of

_ATTRIBUTES = ""  # in the place of a registry
_ALL = (_ATTRIBUTES, *REGISTRIES)
_OF_VALUES = (_ATTRIBUTES, "_parameters")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
Place = tuple[int, str]  # of a tensor: the dictionary that holds it, by its number in the block, and its name


class BlockState:
    """The state that a block's forward may change.

    Covered: buffers, parameters, tensors and generators that are attributes of its modules, their other attributes,
    children and hooks, training mode and `requires_grad`, Python's and NumPy's global generators, and all `Contents` of
    attributes, of hooks and of the block's arguments. A change of anything else that is reached on the way, such as of
    a tensor in a list, is refused when the first forward makes it. Torch's global generators are the business of
    torch.utils.checkpoint.

    Buffers are copied in every forward, and the copies of those outside the state dict (rotary tables, masks) dropped
    after it if nothing has moved their version. Parameters and other tensors are copied in the first forward only, to
    see which of them the forward writes; from then on only those. The first forward is the first one with the same
    modules, and the same of them in training mode.
    """

    def __init__(self, block: nn.Module, mode: str):
        self.block, self.mode = block, mode
        self.may_stop_early = True
        self._modules: list[nn.Module] = []
        self._learned: dict[tuple[bool, ...], Learned] = {}

    def begin(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> "Before":
        """Use before each forward. Takes what the block is called with."""
        modules = modules_in(self.block)
        if not are_identical(modules, self._modules):  # their numbers have changed
            self._modules, self._learned = modules, {}
            self.may_stop_early = may_stop_early(modules)
        modes = tuple([module.training for module in modules])
        before = Before(modules, self._learned.setdefault(modes, Learned()))
        for name, value in (*enumerate(inputs), *options.items()):
            if isinstance(value, Tensor):
                known = before.learned.is_known or is_tracing()
                before.inputs.append((name, value, written_to(value), None if known else sum_of(value)))
            else:
                before.contents.take(value, ((ARGUMENT, name),), before.learned.known)
        return before

    @contextlib.contextmanager
    def noted(self, before: "Before") -> Iterator[None]:
        """Use around the forward. Fills `before`."""
        self._take(before)
        if before.contents.left_out:
            raise too_many(self.mode, self.block, before.contents.left_out)
        yield
        self._drop_unwritten(before)

    def _take(self, before: "Before") -> None:
        before.generators = HostGenerators()
        known = before.learned.known
        owners: list[dict[str, Any]] = []
        start = 0  # of the values of one of them among those of all
        for number, module in enumerate(before.modules):
            attributes = vars(module)
            dictionaries = (attributes, *registries_in(attributes))
            owners += dictionaries
            first = number * len(dictionaries)
            for place, owner in enumerate(dictionaries, first):
                if not owner:
                    continue
                registry = _ALL[place - first]
                if registry == "_buffers":
                    self._take_values(before, place, owner, start, non_persistent_buffers(module))
                elif registry in _OF_VALUES:
                    self._take_values(before, place, owner, start)
                elif registry in _HOOKS:
                    for hook in owner.values():
                        before.contents.take(hook, ((place, "hook"),), known)
                start += len(owner)
            kind: type = type(module)
            if kind_of(kind) is not None:  # it has slots
                before.contents.take(module, ((first, ""),), known)
        before.held = Held(owners)
        if before.copies:  # so far the tensors themselves
            arrays = before.contents.arrays()
            before.copies = copies_of({at: t for at, t in before.copies.items() if not _is_in(t, arrays)})
            before.tensors = [taken for taken in before.tensors if not _is_in(taken.tensor, arrays)]

    def _take_values(
        self, before: "Before", place: int, owner: dict[str, Any], start: int, constant: set[str] | None = None
    ) -> None:
        """constant: of buffers, the names of those whose copies may be dropped."""
        # A trace compares no values, but counts the copies that the first real forward makes.
        learned = before.learned
        copies = constant is not None or not (learned.is_traced if is_tracing() else learned.is_known)
        for index, (name, value) in enumerate(owner.items(), start):
            if name in MODULE_ATTRIBUTES:
                continue
            if isinstance(value, Tensor):
                before.tensors.append(_Taken((place, name), value, version_of(value), value.requires_grad, index))
                if copies or (place, name) in learned.written:
                    before.copies[place, name] = value
                if constant is None or name in constant:
                    before.droppable.add((place, name))
            elif type(value) not in PLAIN:
                before.contents.take(value, ((place, name),), learned.known)

    def _drop_unwritten(self, before: "Before") -> None:
        """Drop the copies of tensors that this forward has not written."""
        learned = before.learned
        for at, tensor, version, *_ in before.tensors:
            if at not in before.droppable or at not in before.copies or at in learned.written:
                continue
            moved = version_of(tensor) != version
            if moved or not (learned.is_known or is_tracing() or are_equal(tensor, before.copies[at])):
                learned.written.add(at)
            else:
                del before.copies[at]
        before.droppable.clear()
        inputs, before.inputs = before.inputs, []  # they shall not outlive the forward
        if is_tracing():
            learned.is_traced = True
            return
        learned.is_known = True
        lost: list[tuple[Path, Any]] = [
            (((ARGUMENT, name),), tensor)
            for name, tensor, count, total in inputs
            if written_to(tensor) != count or (total is not None and sum_of(tensor) != total)
        ]
        if lost := lost + before.contents.judge(learned.known):
            own = {id(taken.tensor) for taken in before.tensors}  # they are copied
            for path, value in lost:
                if not isinstance(value, Tensor) or id(value) not in own:
                    raise changed(self.mode, self.block, path, value)

    @contextlib.contextmanager
    def rewound(self, before: "Before") -> Iterator[None]:
        """Use around the recomputation: the state of `before`, and after it that of now.

        Raises TrainingStopped if a tensor of that state is gone.
        """
        then = self._state_of(before)
        # All of it, whether it differs from now or not: the recomputation may change what has returned to its old value
        now = before.held.now()
        flags = [(taken.tensor, taken.tensor.requires_grad) for taken in before.tensors]
        try:
            then.put_back()
            _set_flags((taken.tensor, taken.requires_grad) for taken in before.tensors)
            with (
                before.contents.rewound() if before.contents else contextlib.nullcontext(),
                before.generators.rewound(),
            ):
                yield
        except Exception as error:
            if not is_of_the_block(error):
                raise
            raise failed(self.mode, self.block, error) from error
        finally:
            now.put_back()
            _set_flags(flags)

    def _state_of(self, before: "Before") -> Held:
        """What the modules held, with copies in the place of tensors that have been written since."""
        copies = copies_of(before.copies)
        for taken in before.tensors:
            if taken.at not in copies and version_of(taken.tensor) != taken.version:
                self._require_updated(taken.tensor, taken.at[1])
        return before.held.with_values({t.place: copies[t.at] for t in before.tensors if t.at in copies})

    def _require_updated(self, tensor: Tensor, name: str) -> None:
        """Raises TrainingStopped for a tensor that something else than the backward's own updates has written."""
        if not UpdatedMemory.watches(tensor):
            raise written_elsewhere(self.mode, self.block, name)


class Learned:
    """What the forwards so far have shown, of those in which the same modules were in training mode."""

    def __init__(self) -> None:
        self.known = Known()
        self.written: set[Place] = set()
        self.is_known = self.is_traced = False


class Before:
    """The state before one forward."""

    def __init__(self, modules: list[nn.Module], learned: Learned) -> None:
        self.modules, self.learned = modules, learned
        self.tensors: list[_Taken] = []
        self.copies: dict[Place, Tensor] = {}
        self.droppable: set[Place] = set()
        self.contents = Contents()
        self.inputs: list[tuple[Any, Tensor, int, str | None]] = []  # name, version, sum
        self.generators: HostGenerators
        self.held: Held


class _Taken(NamedTuple):
    at: Place
    tensor: Tensor
    version: int
    requires_grad: bool
    place: int  # in `Held.values`


def _set_flags(flags: Iterable[tuple[Tensor, bool]]) -> None:
    """Set `requires_grad`, which of other tensors than leaves cannot be."""
    for tensor, flag in flags:
        if tensor.requires_grad != flag and tensor.is_leaf:
            tensor.requires_grad_(flag)


def _is_in(tensor: Tensor, arrays: list[range]) -> bool:
    """Whether its memory is that of one of the arrays, in which it is put back in place."""
    if not arrays or tensor.device.type != "cpu" or tensor.layout is not torch.strided or is_tracing():
        return False
    start, size = tensor.data_ptr(), len(bytes_of(tensor))
    return any(array.start <= start and start + size <= array.stop for array in arrays)
