"""What a forward may change, to return to: one `Snapshot` for steps, evaluations and trial calls.

| what | how it is restored |
|---|---|
| a buffer in the state dict | copied in every `take`: BatchNorm's kernels write its statistics without a trace |
| another buffer (a rotary table, a mask), or a tensor in an attribute | copied when its version has moved |
| a parameter | copied in every `take` once a forward is known to have written it |
| which parameters, buffers and submodules there are; other attributes of the user's modules | by reference |
| training mode, `requires_grad` | recorded |
| what has a state of its own: `get_extra_state`, generators, a task, a data set | by its `Owner` |

Copying every parameter would take the memory of a second model. So a write is noticed by the parameter's version
counter, and in the first two steps by checksums too (`.data.mul_()` and NumPy move no version); the parameter is copied
from then on. A first write cannot be undone: `restore` names it in `lost`.

    snapshot = Snapshot({"model": model}, owners)
    snapshot.take()         # at the start of a step
    ...                     # forward, backward
    snapshot.note_step()    # before the commit: remembers which parameters the forward wrote
    snapshot.restore()      # instead of the commit, any number of times
"""

import contextlib
import copy
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainapp.checksum import checksum
from trainapp.rng import generator_state, set_generator_state
from trainapp.torch_private import (
    MODULE_ATTRIBUTES,
    foreach_copy_,
    local_part,
    non_persistent_buffers,
    outside_dispatch_modes,
    registries_of,
    version_of,
)

_LIBRARIES = ("torch.", "trainapp.")  # whose modules keep their state in buffers
_IS_TRAINING = operator.attrgetter("training")
_NEEDS_GRADIENT = operator.attrgetter("requires_grad")
Parameters = Literal["written", "trained", "all"]
MOVED_ON = ("data", "generator")  # kinds of owners that stay where they are when a step is left out for good


class Owner(NamedTuple):
    """Something with a state of its own. `get` may return references; `set` may keep what it is given."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    kind: str  # "model", "task", "data" or "callbacks"; "generator"
    is_held: bool = False  # a transaction holds it in another way: a module's tensors, a stream's samples

    def copy(self) -> Any:
        """The state, for `restore`. A generator's is a copy already; in a trace, another would be without numbers."""
        return self.get() if self.kind == "generator" else copied(self.get())

    def restore(self, state: Any) -> None:
        """Return to what `copy` has returned; any number of times."""
        self.set(state if self.kind == "generator" else copied(state))


def copied(state: Any) -> Any:
    """A copy that shares no tensor, array or container with `state`."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, np.ndarray):
        return state.copy()
    if type(state) is dict:
        return {key: copied(value) for key, value in state.items()}
    if type(state) in (list, tuple, set):
        return type(state)(map(copied, state))
    if isinstance(state, (str, bytes, int, float, complex, type(None))):
        return state
    return copy.deepcopy(state)  # a deque, an OrderedDict, a class of the owner's


def generator_owner(generator: Any) -> Owner:
    """The owner of a generator of torch, NumPy or Python."""
    return Owner(lambda: generator_state(generator), lambda state: set_generator_state(generator, state), "generator")


def attributes_owner(held: Any) -> Owner:
    """The owner of the plain values, tensors and arrays in an object's attributes."""
    attributes = vars(held)

    def get() -> dict[str, Any]:
        return {name: value for name, value in attributes.items() if _is_plain(value)}

    @torch.no_grad()
    def set(state: dict[str, Any]) -> None:
        for name in get().keys() - state.keys():
            del attributes[name]
        for name, value in state.items():
            now = attributes.get(name)
            if type(value) is type(now) and isinstance(value, (Tensor, np.ndarray)) and value.shape == now.shape:
                now[...] = value  # other objects may hold it, too
            else:
                attributes[name] = value

    return Owner(get, set, "task")


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return type(value) is Tensor and value.grad_fn is None and not value.requires_grad
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.ndarray))


def has_extra_state(module: nn.Module) -> bool:
    """Whether the module's class overrides `get_extra_state` and `set_extra_state`."""
    kind, base = type(module), nn.Module
    return kind.get_extra_state is not base.get_extra_state and kind.set_extra_state is not base.set_extra_state


class Structure:
    """Which tensors and attributes modules hold: found by a walk, and valid until they hold others."""

    def __init__(self, roots: Mapping[str, nn.Module], shards: Mapping[tuple[int, str], Tensor]):
        found = [(root, path, module) for root, top in roots.items() for path, module in top.named_modules()]
        self.modules = list({id(module): module for _, _, module in found}.values())
        self.registries = [registry for module in self.modules for registry in registries_of(module)]
        self.filled = [registry for registry in self.registries if registry]
        self.values = [*chain.from_iterable(map(dict.values, self.filled))]
        own = [module for module in self.modules if not type(module).__module__.startswith(_LIBRARIES)]
        self.attributes: list[dict[str, Any]] = [vars(module) for module in own]
        self.parameters: dict[str, Tensor] = {}  # this rank's parts of them
        self.leaves: list[Tensor] = []  # the parameters themselves
        self.buffers: dict[str, Tensor] = {}
        self.constants: dict[str, Tensor] = {}  # buffers outside of the state dict
        seen: set[int] = set()
        for root, path, module in found:
            parameters, buffers, _ = registries_of(module)
            for registry in (parameters, buffers):
                for name, held in registry.items():
                    tensor = shards.get((id(registry), name), held)
                    if tensor is None or id(tensor) in seen or not _can_be_held(tensor):
                        continue
                    seen.add(id(tensor))
                    named = self.parameters
                    if registry is buffers:
                        named = self.constants if name in non_persistent_buffers(module) else self.buffers
                    else:
                        self.leaves.append(tensor)
                    with torch.no_grad():
                        named[".".join(filter(None, (root, path, name)))] = _local(tensor)
        self.unsure = {**self.parameters, **self.constants}  # where a write without a trace is looked for

    def is_current(self) -> bool:
        """Whether the modules still hold the same tensors and submodules."""
        if sum(map(len, self.registries)) != len(self.values):
            return False
        return all(map(operator.is_, chain.from_iterable(map(dict.values, self.filled)), self.values))

    def versions(self) -> list[int]:
        """How often each parameter has been written."""
        return list(map(version_of, self.parameters.values()))


@dataclass
class State:
    """What a `take` has recorded."""

    structure: Structure
    contents: list[dict[str, Any]]  # of the filled registries
    attributes: list[dict[str, Any]]
    versions: list[int]
    training: list[bool]
    need_gradients: list[bool]
    owned: dict[str, Any]  # the states of owners
    copies: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by id: a tensor and its copy
    sums: dict[str, Tensor] = field(default_factory=dict)  # checksums


class _Copies(NamedTuple):
    """Memory for copies of certain tensors, to be used again.

    groups: targets and sources by device and dtype. BatchNorm counts its batches in integers, and CUDA copies a mixed
    list with a launch per tensor (ForeachBinaryOpList.cu at pytorch's commit 00a1abb).
    """

    pairs: dict[int, tuple[Tensor, Tensor]]
    groups: list[tuple[list[Tensor], list[Tensor]]]
    structure: Structure
    parameters: list[str]

    def fit(self) -> bool:
        """Whether no tensor has another shape than its copy."""
        return all(target.shape == source.shape for target, source in self.pairs.values())

    def fill(self) -> None:
        """Copy."""
        for targets, sources in self.groups:
            foreach_copy_(targets, sources)


class Snapshot:
    """See the head of this file. modules: by the first part of their parameters' names. owners: by name.

    updates: how often `note_step` is called per step. Attributes: `written`, the parameters that forwards are known to
    write, with the number of the call of `note_step` that last found it; `lost`, those that the last `restore` found
    written, and of which there is no copy.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], owners: Mapping[str, Owner] | None = None, updates: int = 1
    ) -> None:
        self._roots, self._owners, self._updates = modules, dict(owners or {}), updates
        self.written: dict[str, int] = {}
        self.lost: list[str] = []
        self._steps = 0
        # FSDP2 swaps these for gathered parameters in every forward, and swaps them back itself.
        registries = [registry for top in modules.values() for m in top.modules() for registry in registries_of(m)]
        self._shards = {(id(r), name): tensor for r in registries for name, tensor in r.items() if _is_shard(tensor)}
        self._structure = Structure(self._roots, self._shards)
        self._copies: _Copies | None = None
        self._unchanged: dict[int, tuple[Tensor, int, Tensor]] = {}  # by id: a tensor, its version, the copy of that
        self._state: State | None = None

    @property
    def _verifies(self) -> bool:
        return self._steps < 2 * self._updates

    @property
    def _taken(self) -> State:
        assert self._state is not None, "no complete take()"
        return self._state

    @torch.no_grad()
    def take(self, parameters: Parameters = "written") -> None:
        """Record the current state. parameters: which of them to copy, besides those that are known to be written."""
        self.lost, self._state = [], None
        if self._verifies or not self._structure.is_current():
            self._structure = Structure(self._roots, self._shards)
        now = self._structure
        attributes = list(map(dict.copy, now.attributes))
        state = State(
            structure=now,
            contents=list(map(dict.copy, now.filled)),
            attributes=attributes,
            versions=now.versions(),
            training=list(map(_IS_TRAINING, now.modules)),
            need_gradients=list(map(_NEEDS_GRADIENT, now.leaves)),
            owned={name: owner.copy() for name, owner in self._owners.items()},
            copies=self._copies_of_changing(parameters) | self._copies_of_constants(attributes),
        )
        if self._verifies:
            with outside_dispatch_modes():  # counting live tensors would take longer than the sums
                state.sums = {name: checksum(tensor) for name, tensor in now.unsure.items() if _has_memory(tensor)}
        self._state = state

    def _copies_of_changing(self, parameters: Parameters) -> dict[int, tuple[Tensor, Tensor]]:
        """Buffers in the state dict and the parameters to copy, into the memory of the last copies."""
        chosen = list(self.written)
        if parameters != "written":
            every = zip(self._structure.parameters, self._structure.leaves, strict=True)
            chosen = [name for name, leaf in every if parameters == "all" or leaf.requires_grad or name in self.written]
        copies = self._copies
        if copies is None or copies.structure is not self._structure or copies.parameters != chosen or not copies.fit():
            copies = self._copies = self._allocated(chosen)
        copies.fill()
        return copies.pairs

    def _allocated(self, parameters: list[str]) -> _Copies:
        before = {} if self._copies is None else self._copies.pairs
        groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        pairs = {}
        named = (self._structure.unsure.get(name) for name in parameters)
        for source in (*self._structure.buffers.values(), *(tensor for tensor in named if tensor is not None)):
            known, target = before.get(id(source), (None, source))
            if known is not source or target.shape != source.shape:
                target = torch.empty_like(source, requires_grad=False)
            pairs[id(source)] = source, target
            targets, sources = groups.setdefault((source.device, source.dtype), ([], []))
            targets.append(target)
            sources.append(source)
        return _Copies(pairs, list(groups.values()), self._structure, parameters)

    def _copies_of_constants(self, attributes: list[dict[str, Any]]) -> dict[int, tuple[Tensor, Tensor]]:
        """Constant buffers, and tensors in attributes: into new memory, where there is no copy of this version."""
        unchanged: dict[int, tuple[Tensor, int, Tensor]] = {}
        held = (value for values in attributes for value in values.values() if _is_kept(value))
        for tensor in chain(self._structure.constants.values(), held):
            version = version_of(tensor)
            known = self._unchanged.get(id(tensor))
            is_valid = known is not None and known[0] is tensor and known[1] == version and not self._verifies
            unchanged[id(tensor)] = known if known is not None and is_valid else (tensor, version, _copy_of(tensor))
        self._unchanged = unchanged
        silent = [] if not self.written else [self._structure.constants.get(name) for name in self.written]
        by_id = {id(tensor) for tensor in silent}  # they have copies in any case
        return {key: (tensor, own) for key, (tensor, _, own) in unchanged.items() if key not in by_id}

    def note_written(self) -> None:
        """Remember which parameters have been written since `take`. Call before anything else changes them."""
        self._note(2 * self._updates)

    def note_step(self) -> None:
        """`note_written` for a step whose gradients are complete, before its commit. What only the first step writes is
        forgotten after the second: an initialisation from data should not cost a copy for the rest of the run.
        """
        self._note(self._steps)
        if self._verifies:
            self._steps += 1
            if not self._verifies:
                self.written = {name: last for name, last in self.written.items() if last >= self._updates}

    def _note(self, number: int) -> None:
        if self._verifies or self._taken.versions != self._taken.structure.versions():
            self.written |= dict.fromkeys(self._written(), number)

    def note_lost(self, names: Collection[str]) -> None:
        """Parameters that a forward is known to write, from another rank or an earlier process."""
        self.written = dict.fromkeys(names, 2 * self._updates) | self.written

    def _written(self) -> list[str]:
        """Names of what has been written since `take`."""
        state = self._taken
        before, now = state.versions, state.structure.versions()
        moved = {name for name, a, b in zip(state.structure.parameters, before, now, strict=True) if a != b}
        with outside_dispatch_modes():
            unsure = state.structure.unsure
            silent = {name for name, known in state.sums.items() if not torch.equal(checksum(unsure[name]), known)}
        return [name for name in state.structure.unsure if name in moved or name in silent]

    def restore(self, but: Collection[str] = ()) -> None:
        """Return to the last `take`. Sets `lost`. but: kinds of owners that stay as they are."""
        state, written = self._taken, self._written()
        self.lost = [name for name in written if id(state.structure.unsure[name]) not in state.copies]
        self.written = dict.fromkeys(written, self._steps) | self.written
        self._restore_modules(state)
        for leaf, needs_gradient in zip(state.structure.leaves, state.need_gradients, strict=True):
            leaf.requires_grad_(needs_gradient)
        for tensor, own in state.copies.values():
            if tensor.shape == own.shape:
                tensor.data.copy_(own)  # moves no version: the tensor counts as written only where a forward has
            else:  # another tensor was assigned to its `.data`
                tensor.data = own.clone()
        for name, held in state.owned.items():
            if self._owners[name].kind not in but:
                self._owners[name].restore(held)

    def _restore_modules(self, state: State) -> None:
        """Which tensors, submodules and attributes there are, and training mode."""
        contents = dict(zip(map(id, state.structure.filled), state.contents, strict=True))
        for registry in state.structure.registries:
            before = contents.get(id(registry), {})
            moving = {name: now for name, now in registry.items() if (id(registry), name) in self._shards}
            _refill(registry, before | moving)
        for attributes, values in zip(state.structure.attributes, state.attributes, strict=True):
            _set_attributes(attributes, values)
        for module, is_training in zip(state.structure.modules, state.training, strict=True):
            module.training = is_training

    def restore_generators(self) -> None:
        """Those of the owners alone, as in the last `take`."""
        for name, held in self._taken.owned.items():
            if self._owners[name].kind == "generator":
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
        """Whatever the block changes is undone after it: for a trial call."""
        self.take(parameters)
        try:
            yield
        finally:
            self.restore()

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Around work that calls `take` after each part of it: an error undoes the part that it interrupted."""
        self.take()
        try:
            yield
        except BaseException:
            if self._state is not None:  # otherwise `take` was interrupted, and the part before it is finished
                self.restore()  # copies into memory that exists: allocates nothing of note
            raise


def _copy_of(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _refill(held: dict[str, Any], before: dict[str, Any]) -> None:
    """Let a dictionary hold the same objects as before, in the same order."""
    if held.keys() != before.keys() or any(before[name] is not value for name, value in held.items()):
        held.clear()
        held.update(before)


def _set_attributes(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    """The same for a module's attributes, but for what torch itself keeps there."""
    for name in [name for name in attributes if name not in before and name not in MODULE_ATTRIBUTES]:
        del attributes[name]
    for name, value in before.items():
        if attributes.get(name, attributes) is not value and name not in MODULE_ATTRIBUTES:
            attributes[name] = value


def _is_shard(tensor: Any) -> bool:
    return hasattr(tensor, "device_mesh")


def _local(tensor: Any) -> Tensor:
    return local_part(tensor) if _is_shard(tensor) else tensor


def _is_kept(value: Any) -> bool:
    """Whether it is a tensor that is kept: not a result whose graph still exists."""
    return type(value) is Tensor and value.grad_fn is None and _can_be_held(value)


def _can_be_held(tensor: Tensor) -> bool:
    """Not where there is nothing yet (lazy modules), nor where in-place writes are impossible: an inference tensor, or
    an expanded one, whose elements share memory.
    """
    if is_lazy(tensor) or tensor.is_inference():
        return False
    if tensor.layout is not torch.strided:
        return True
    return all(stride or size == 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _has_memory(tensor: Tensor) -> bool:
    """Not sparse, meta and fake tensors."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
