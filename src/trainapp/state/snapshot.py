"""Capture and restore everything a forward pass may change: for steps, evaluations, trial calls and recomputed blocks.

| what | how it is restored |
|---|---|
| a buffer in the state dict | copied in every `take`: BatchNorm's kernels write its statistics without a trace |
| another buffer (a rotary table, a mask), or a tensor in an attribute | copied when its version has changed |
| a parameter | copied in every `take` once a forward is known to have written it |
| the registered parameters, buffers and submodules; other attributes of the user's modules | by reference |
| training mode, `requires_grad` | recorded |
| objects with their own state: `get_extra_state`, generators, a task, a data set | by their `Owner` |

Copying every parameter would take the memory of a second model. Instead, the parameter's version counter reveals a
write, and so do checksums in the first two steps (writes through `.data` or NumPy leave the version unchanged); from
then on the parameter is copied. A first write cannot be undone: `restore` names it in `lost`.

    snapshot = Snapshot({"model": model}, owners)
    snapshot.take()         # at the start of a step
    ...                     # forward, backward
    snapshot.note_step()    # before the commit: remembers what the forward wrote
    snapshot.restore()      # instead of the commit, any number of times
"""

import contextlib
import dataclasses
import operator
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from trainapp.state.stateful import Owner, Stateful, can_be_held, memory_of
from trainapp.torch_private import (
    MODULE_ATTRIBUTES,
    foreach_copy_,
    is_shard,
    local,
    non_persistent_buffers,
    outside_dispatch_modes,
    registries_of,
    version_of,
)

_LIBRARIES = ("torch.", "trainapp.")  # whose modules keep their state in buffers
_IS_TRAINING = operator.attrgetter("training")
_NEEDS_GRADIENT = operator.attrgetter("requires_grad")
_COPIED = (Tensor, np.ndarray)  # attributes that are copied; others are restored by reference
_PLAIN: tuple[type[Any], ...] = (
    *(type(None), bool, int, float, complex, str, bytes, set),
    *(np.ndarray, np.generic, torch.device),
)
_PARTS = 64  # sums per tensor: opposite changes would cancel out in a single one
Parameters = Literal["written", "trained", "all"]
MOVED_ON = ("data", "generator")  # kinds of owners that are not rewound when a step is skipped


class Structure:
    """The tensors and attributes of modules: collected once; invalid as soon as a module's contents change."""

    def __init__(self, roots: Mapping[str, nn.Module], objects: Mapping[str, Any], shards: Mapping[Any, Tensor]):
        found = [(root, path, module) for root, top in roots.items() for path, module in top.named_modules()]
        self.modules = list({id(module): module for _, _, module in found}.values())
        self.registries = [registry for module in self.modules for registry in registries_of(module)]
        self.contents = list(map(dict.copy, self.registries))
        self._filled = [registry for registry in self.registries if registry]
        self._values = [*chain.from_iterable(map(dict.values, self._filled))]
        own = [module for module in self.modules if not type(module).__module__.startswith(_LIBRARIES)]
        self.attributes: list[dict[str, Any]] = list(map(vars, own))
        self.objects: list[dict[str, Any]] = list(map(vars, objects.values()))
        paths = {id(module): ".".join(filter(None, (root, path))) for root, path, module in found}
        self.places = [paths[id(module)] for module in self.modules for _ in registries_of(module)]
        self.places += [*(paths[id(module)] for module in own), *objects]
        self.parameters: dict[str, Tensor] = {}  # this rank's shards
        self.leaves: list[Tensor] = []  # the parameters themselves
        self.buffers: dict[str, Tensor] = {}
        self.constants: dict[str, Tensor] = {}  # buffers that are not in the state dict
        seen: set[int] = set()
        for root, path, module in found:
            parameters, buffers, _ = registries_of(module)
            for registry in (parameters, buffers):
                for name, held in registry.items():
                    tensor = shards.get((id(registry), name), held)
                    if tensor is None or id(tensor) in seen or not can_be_held(tensor):
                        continue
                    seen.add(id(tensor))
                    named = self.parameters
                    if registry is buffers:
                        named = self.constants if name in non_persistent_buffers(module) else self.buffers
                    else:
                        self.leaves.append(tensor)
                    with torch.no_grad():
                        named[".".join(filter(None, (root, path, name)))] = memory_of(local(tensor))
        self.unsure = {**self.parameters, **self.constants}  # checksummed: the version counter misses some writes

    def is_current(self) -> bool:
        """Whether the modules still hold the same tensors and submodules."""
        if sum(map(len, self.registries)) != len(self._values):
            return False
        return all(map(operator.is_, chain.from_iterable(map(dict.values, self._filled)), self._values))

    def versions(self) -> list[int]:
        """The version counter of each parameter."""
        return list(map(version_of, self.parameters.values()))


class _Constant(NamedTuple):
    """A tensor that is rarely written. copy: its value at `version`; None if not needed."""

    tensor: Tensor
    version: int
    copy: Tensor | None


class _References(NamedTuple):
    """What is restored by reference, in all registries, attributes and modules, and the states of owners."""

    contents: list[dict[str, Any]]
    attributes: list[dict[str, Any]]
    training: list[bool]
    owned: dict[str, Any]


@dataclasses.dataclass
class State:
    """The record of a `take`."""

    structure: Structure
    references: _References
    versions: list[int]
    need_gradients: list[bool]
    copies: list[tuple[Tensor, Tensor]]  # a tensor and its copy
    constants: dict[int, _Constant]  # by id
    arrays: list[tuple[np.ndarray, np.ndarray]]
    sums: dict[str, Tensor]  # checksums

    def copies_by_id(self) -> dict[int, Tensor]:
        """The copy of each tensor."""
        constants = {key: constant.copy for key, constant in self.constants.items() if constant.copy is not None}
        return constants | {id(tensor): copy for tensor, copy in self.copies}

    def drop_unwritten(self) -> None:
        """Free the copies of constants that have not been written since."""
        for key, (tensor, version, _) in self.constants.items():
            if version_of(tensor) == version:
                self.constants[key] = _Constant(tensor, version, None)

    def has_lost(self) -> bool:
        """Whether a tensor without a copy was modified since."""
        return any(copy is None and version_of(tensor) != version for tensor, version, copy in self.constants.values())


class Snapshot:
    """See the head of this file. modules: by the first part of their parameters' names. owners: by name. objects: by
    name, others, such as a task, whose plain values, tensors and arrays in attributes are restored.

    verified: number of first steps in which checksums are compared. Attributes: `written`, the parameters that forwards
    are known to write; `changes`, whatever the first steps' forwards changed; `lost`, parameters that the last
    `restore` found written without having a copy.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        owners: Mapping[str, Owner] | None = None,
        objects: Mapping[str, Any] | None = None,
        verified: int = 2,
    ) -> None:
        self._roots, self._owners, self._objects = modules, dict(owners or {}), objects or {}
        self.written: list[str] = []
        self.changes: set[str] = set()
        self.lost: list[str] = []
        self._steps_to_verify = verified
        # FSDP2 swaps these for gathered parameters in every forward and restores them itself.
        registries = [registry for top in modules.values() for m in top.modules() for registry in registries_of(m)]
        self._shards = {(id(r), name): tensor for r in registries for name, tensor in r.items() if is_shard(tensor)}
        self._structure = Structure(self._roots, self._objects, self._shards)
        self._copied: tuple[Structure, list[str]] | None = None  # key of the cached copies: structure, names
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = []
        self._constants: dict[int, _Constant] = {}
        self._state: State | None = None

    @classmethod
    def of(cls, stateful: Stateful, verified: int = 2) -> "Snapshot":
        """A snapshot of everything that a step may change in these objects. Callbacks are not included: they run
        between steps.
        """
        owners = {n: owner for n, owner in stateful.owners.items() if not owner.is_held and owner.kind != "callbacks"}
        model = {name: root for name, root in stateful.roots.items() if name == "model"}
        tasks = {name: root for name, root in stateful.roots.items() if name.endswith("task")}
        objects = {
            n: task for n, task in tasks.items() if hasattr(task, "__dict__") and not isinstance(task, nn.Module)
        }
        return cls(model | stateful.modules, owners, objects, verified)

    @property
    def _taken(self) -> State:
        assert self._state is not None, "no complete take()"
        return self._state

    def take(self, parameters: Parameters = "written") -> None:
        """Record the current state. parameters: which to copy, besides those known to be written."""
        self.lost, self._state = [], None
        if self._steps_to_verify or not self._structure.is_current():
            self._structure = Structure(self._roots, self._objects, self._shards)
        now, references = self._structure, self._references(self._structure, self._structure.contents)
        held = [value for values in references.attributes for value in values.values() if type(value) in _COPIED]
        self._state = State(
            structure=now,
            references=references,
            versions=now.versions(),
            need_gradients=list(map(_NEEDS_GRADIENT, now.leaves)),
            copies=self._copies_of_changing(parameters),
            constants=self._copies_of_constants([*now.constants.values(), *map(memory_of, filter(_is_kept, held))]),
            arrays=[(value, value.copy()) for value in held if type(value) is np.ndarray],
            sums=self._sums() if self._steps_to_verify else {},
        )

    def _references(self, structure: Structure, contents: list[dict[str, Any]] | None = None) -> _References:
        return _References(
            contents or list(map(dict.copy, structure.registries)),
            list(map(dict.copy, structure.attributes)) + list(map(_plain, structure.objects)),
            list(map(_IS_TRAINING, structure.modules)),
            {name: owner.copy() for name, owner in self._owners.items()},
        )

    def _copies_of_changing(self, parameters: Parameters) -> list[tuple[Tensor, Tensor]]:
        """Copy the buffers in the state dict and the chosen parameters, into the memory of the last copies."""
        now, chosen = self._structure, list(self.written)
        if parameters != "written":
            every = zip(now.parameters, now.leaves, strict=True)
            chosen = [name for name, leaf in every if parameters == "all" or leaf.requires_grad or name in self.written]
        if self._copied != (now, chosen) or not all(a.shape == b.shape for a, b in self._copies):
            self._copied = None  # if the allocation fails, the next `take` repeats it
            self._copies, self._groups = [], []
            named = (now.unsure.get(name) for name in chosen)
            tensors = [*now.buffers.values(), *(tensor for tensor in named if tensor is not None)]
            self._copies = [(tensor, torch.empty_like(tensor, requires_grad=False)) for tensor in tensors]
            # Grouped by device and dtype: BatchNorm's batch counter is an integer, and CUDA copies a mixed list with
            # one launch per tensor (ForeachBinaryOpList.cu at pytorch's commit 00a1abb).
            groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
            for tensor, copy in self._copies:
                group = groups.setdefault((tensor.device, tensor.dtype), ([], []))
                group[0].append(copy)
                group[1].append(tensor)
            self._copied, self._groups = (now, chosen), list(groups.values())
        if self._groups:  # entering `no_grad` takes as long as all the rest
            with torch.no_grad():
                for copies, tensors in self._groups:
                    foreach_copy_(copies, tensors)
        return self._copies

    def _copies_of_constants(self, tensors: list[Tensor]) -> dict[int, _Constant]:
        """Copy constants whose current version has no copy, into new memory."""
        before, self._constants = self._constants, {}
        for tensor in tensors:
            known, version = before.get(id(tensor)), version_of(tensor)
            if known is None or known.tensor is not tensor or known.version != version or self._steps_to_verify:
                known = _Constant(tensor, version, tensor.detach().clone())
            self._constants[id(tensor)] = known
        return self._constants

    def _sums(self) -> dict[str, Tensor]:
        with outside_dispatch_modes():  # counting live tensors would take longer than summing
            return {name: checksum(tensor) for name, tensor in self._structure.unsure.items() if _has_memory(tensor)}

    def note_written(self) -> None:
        """Record which parameters have been written since `take`. Call before anything else changes them."""
        if self._steps_to_verify or self._taken.versions != self._taken.structure.versions():
            self.note(self._written())

    def note_step(self) -> None:
        """`note_written` for a step whose gradients are complete, before its commit; in the first steps, also what
        else changed.
        """
        self.note_written()
        if self._steps_to_verify:
            self.changes.update(self.changed())
            self._steps_to_verify -= 1

    def note(self, names: Iterable[str]) -> None:
        """Add parameters that a forward is known to write: here, on another rank or in an earlier process."""
        self.written += [name for name in names if name not in self.written]

    def _written(self) -> list[str]:
        """Names of the parameters and constants written since `take`."""
        state = self._taken
        before, now = state.versions, state.structure.versions()
        moved = {name for name, a, b in zip(state.structure.parameters, before, now, strict=True) if a != b}
        unsure = state.structure.unsure
        with outside_dispatch_modes():
            silent = {name for name, known in state.sums.items() if not torch.equal(checksum(unsure[name]), known)}
        return [name for name in unsure if name in moved or name in silent]

    def changed(self) -> list[str]:
        """Names of what holds other values than at `take`: not of data, nor of results left in attributes."""
        state = self._taken
        copies: dict[int, Any] = {**state.copies_by_id(), **{id(array): kept for array, kept in state.arrays}}
        then, current = state.references, self._references(state.structure)
        found = [name for name in self._written() if id(state.structure.unsure[name]) not in copies]
        with outside_dispatch_modes():
            for place, old, new in zip(
                (*state.structure.places, ""),
                (*then.contents, *then.attributes, then.owned),
                (*current.contents, *current.attributes, current.owned),
                strict=True,
            ):
                for name in old | new:
                    before, now = old.get(name), new.get(name)
                    is_result = getattr(now, "grad_fn", None) is not None
                    if not is_result and not _is_equal(copies.get(id(before), before), now):
                        found.append(".".join(filter(None, (place, name))))
        return [name for name in dict.fromkeys(found) if not name.partition(".")[0].endswith("data")]

    def restore(self, except_kinds: Collection[str] = ()) -> None:
        """Return to the last `take`. Sets `lost`. except_kinds: kinds of owners to leave unchanged."""
        state, written, copies = self._taken, self._written(), self._taken.copies_by_id()
        self.lost = [name for name in written if id(state.structure.unsure[name]) not in copies]
        self.note(written)
        self._restore_tensors(state)
        self._refer_to(state.structure, state.references, except_kinds)

    def set_aside(self) -> State:
        """Take, and hand over the record, for `return_to` after any number of other takes, which copy into new memory.
        The copies of constants are shared with them.
        """
        self.take()
        self._copied, self._copies, self._groups = None, [], []
        return self._taken

    def return_to(self, state: State) -> list[str]:
        """Return to a record that was set aside. Returns the names of parameters that forwards have written since, of
        which it has no copies: they stay as they are.
        """
        unsure, copies = state.structure.unsure, state.copies_by_id()
        constants = dict(state.constants)
        if not state.sums:  # a copy is that of a version, and may be older than a write that the version does not show
            constants = {key: known for key, known in constants.items() if version_of(known.tensor) != known.version}
        self._restore_tensors(dataclasses.replace(state, constants=constants))
        self._refer_to(state.structure, state.references)
        self._constants = state.constants  # copies of later versions have the values of later writes
        return [name for name in self.written if name in unsure and id(unsure[name]) not in copies]

    def _restore_tensors(self, state: State) -> None:
        for leaf, needs_gradient in zip(state.structure.leaves, state.need_gradients, strict=True):
            leaf.requires_grad_(needs_gradient)
        constants = [(constant.tensor, constant.copy) for constant in state.constants.values()]
        for tensor, copy in (*constants, *state.copies):
            if copy is not None and tensor.shape == copy.shape:
                tensor.data.copy_(copy)  # leaves the version unchanged: only a forward's write counts
            elif copy is not None:  # another tensor was assigned to its `.data`
                tensor.data = copy.clone()
        for array, kept in state.arrays:
            array[...] = kept

    def _restore_registries(self, structure: Structure, contents: list[dict[str, Any]]) -> None:
        for registry, before in zip(structure.registries, contents, strict=True):
            moving = {name: now for name, now in registry.items() if (id(registry), name) in self._shards}
            _refill(registry, before | moving)

    def _restore_owners(self, owned: Mapping[str, Any], except_kinds: Collection[str]) -> None:
        for name, held in owned.items():
            if self._owners[name].kind not in except_kinds:
                self._owners[name].restore(held)

    def released(self) -> State:
        """Hand over the last record, for `replayed`: the next `take` copies into new memory."""
        state, self._state = self._taken, None
        self._copied, self._copies, self._groups, self._constants = None, [], [], {}
        return state

    @contextlib.contextmanager
    def replayed(self, state: State) -> Iterator[None]:
        """Temporarily reinstate `state` (except parameters, submodules and requires_grad) for recomputation. No tensor
        is written, since autograd may have saved it: copies take their place.
        """
        structure, before = state.structure, state.references
        now = self._references(structure)
        stand_ins: dict[int, Any] = {key: copy.clone() for key, copy in state.copies_by_id().items()}
        stand_ins |= {id(array): kept.copy() for array, kept in state.arrays}

        def with_stand_ins(all_values: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
            return [{name: stand_ins.get(id(v), v) for name, v in values.items()} for values in all_values]

        contents = now.contents.copy()
        contents[1::3] = with_stand_ins(before.contents[1::3])  # the buffers': see `registries_of`
        try:
            self._refer_to(structure, before._replace(contents=contents, attributes=with_stand_ins(before.attributes)))
            yield
        finally:
            self._refer_to(structure, now)

    def _refer_to(self, structure: Structure, references: _References, except_kinds: Collection[str] = ()) -> None:
        self._restore_registries(structure, references.contents)
        modules = len(structure.attributes)
        for now, before in zip(structure.attributes, references.attributes[:modules], strict=True):
            _refill(now, before | {name: now[name] for name in MODULE_ATTRIBUTES & now.keys()})
        for now, before in zip(structure.objects, references.attributes[modules:], strict=True):
            plain = _plain(now)
            _refill(now, {name: value for name, value in now.items() if name not in plain} | before)
        for module, is_training in zip(structure.modules, references.training, strict=True):
            module.training = is_training
        self._restore_owners(references.owned, except_kinds)

    def restore_generators(self) -> None:
        """Restore only the model's and task's generators: for a second forward of the same samples."""
        for name, held in self._taken.references.owned.items():
            if self._owners[name].kind == "generator" and not name.partition(".")[0].endswith("data"):
                self._owners[name].restore(held)

    @contextlib.contextmanager
    def preserved_generators(self) -> Iterator[None]:
        """Restore the owners' generators after the block."""
        generators = [owner for owner in self._owners.values() if owner.kind == "generator"]
        states = [owner.copy() for owner in generators]
        try:
            yield
        finally:
            for owner, state in zip(generators, states, strict=True):
                owner.restore(state)

    @contextlib.contextmanager
    def undone(self, parameters: Parameters = "written") -> Iterator[None]:
        """Undo all changes of the block when it ends: for a trial call."""
        self.take(parameters)
        try:
            yield
        finally:
            self.restore()

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Around work that calls `take` after each part: an error undoes the part it interrupted."""
        self.take()
        try:
            yield
        except BaseException:
            if self._state is not None:  # otherwise `take` was interrupted, and the previous part is finished
                self.restore()  # copies into existing memory: allocates next to nothing
            raise


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """int64 [_PARTS + 1]: sums, modulo 2**64, of the tensor's bits in each part; the last sum is weighted by position,
    so that swapped elements are detected. Finds writes that leave the version unchanged.

    Two passes over its memory; copies the tensor only if it is not contiguous in memory, or holds conjugates or
    negatives. Checkpoints hold digests of adapters' bases made of them: other sums need another format.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()  # such as those of fft(x).conj()
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)  # memory order, also for channels_last
    flat = tensor.permute(order).contiguous().reshape(-1).view(torch.uint8)
    whole = len(flat) // 8 * 8
    if flat.storage_offset() % 8 and whole:
        flat = flat.clone()
    words = flat[:whole].view(torch.int64)
    size = len(words) // _PARTS
    parts = words[: size * _PARTS].view(_PARTS, size)
    sums = parts.sum(1)
    places = torch.arange(1, size + 1, device=words.device)
    by_place = (parts.sum(0) * places).sum().reshape(1)
    rest = words[size * _PARTS :]
    sums[: len(rest)] += rest * 3
    if whole < len(flat):
        ends = flat[whole:]
        sums[-len(ends) :] += ends * 5
    return torch.cat([sums, by_place])


def _refill(held: dict[str, Any], before: dict[str, Any]) -> None:
    """Refill a dictionary with the same objects as before, in the same order."""
    if held.keys() != before.keys() or any(before[name] is not value for name, value in held.items()):
        held.clear()
        held.update(before)


def _is_equal(a: Any, b: Any) -> bool:
    """Whether two values are equal. Tensors without memory are, and other objects if they are the same."""
    if a is not b and isinstance(a, Tensor) and isinstance(b, Tensor):
        return not _has_memory(a) or (a.shape == b.shape and torch.equal(a, b.to(a)))
    if a is b or type(a) is not type(b):
        return a is b
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_is_equal(value, b[name]) for name, value in a.items())
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    return isinstance(a, _PLAIN) and np.array_equal(a, b)


def _plain(attributes: dict[str, Any]) -> dict[str, Any]:
    """The plain values, tensors and arrays among an object's attributes; an embedding loss may keep others."""
    return {n: v for n, v in attributes.items() if isinstance(v, _PLAIN) or (_is_kept(v) and not v.requires_grad)}


def _is_kept(value: Any) -> bool:
    """Whether the value is a tensor to keep: not a result whose graph still exists."""
    return type(value) is Tensor and value.grad_fn is None and can_be_held(value)


def _has_memory(tensor: Tensor) -> bool:
    """Whether the tensor has memory that can be copied: not sparse, nested, meta or fake."""
    is_usual = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_usual and not tensor.is_nested and not tensor.is_meta
