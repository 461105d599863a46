"""Capture and restore everything a forward pass may change: for steps, evaluations, trial calls and recomputed blocks.

| what | how it is restored |
|---|---|
| a buffer in the state dict | copied in every `take`: BatchNorm's kernels write its statistics without a trace |
| another buffer (a rotary table, a mask), a tensor in an attribute or its tuple | copied when its version has changed |
| a parameter | copied in every `take` once a forward is known to have written it |
| lists, dicts and sets that modules and tasks hold; objects that they hold | by shallow copies: `held` |
| the registered parameters, buffers and submodules; other attributes of the user's modules | by reference |
| training mode, `requires_grad` | recorded |
| plain values of global variables that functions of the user's may assign | by reference: `global_variables` |
| a module that a task has made since, such as a teacher copied from the model in the first call | as the others |
| objects with their own state: `get_extra_state`, generators, a task, a data set | by their `Owner` |

Copying every parameter would take the memory of a second model. Instead, the parameter's version counter reveals a
write, and so do checksums in the steps that are verified, since writes through `.data` or NumPy leave the version
unchanged: in the first two steps, and in steps 4, 8, 16 and so on. From then on the parameter is copied. A first write
cannot be undone: `restore` names it in `lost`.

    snapshot = Snapshot({"model": model}, owners)
    snapshot.take()         # at the start of a step
    ...                     # forward, backward
    snapshot.record_step_writes()    # before the commit: remembers what the forward wrote
    snapshot.restore()      # instead of the commit, any number of times

`take` and `record_step_writes` run in every step, over all modules and tensors.
"""

import contextlib
import dataclasses
import operator
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from trainapp.state.attributes import fingerprint, has_iterators
from trainapp.state.changes import changed_names, container_fingerprints, has_memory, with_updates
from trainapp.state.checksum import checksum
from trainapp.state.contents import Refill
from trainapp.state.global_variables import GlobalVariables, Record
from trainapp.state.plain_values import is_plain, is_restorable, restorable_tensors
from trainapp.state.slots import Attributes
from trainapp.state.stand_ins import with_stand_ins
from trainapp.state.stateful import Owner, Stateful, memory_of
from trainapp.state.structure import REGISTRIES, ModulesKey, Structure, find_shards
from trainapp.state.walk import joined
from trainapp.torch_private import MODULE_ATTRIBUTES, foreach_copy_, outside_dispatch_modes, version_of

# Classes that `take` passes over without asking further: among 300 attributes of 13 modules, this saves 60 us.
_WITHOUT_TENSORS = frozenset({type(None), bool, int, float, str, list, dict, OrderedDict, set})
Parameters = Literal["written", "trained", "all"]
MOVED_ON = ("data", "generator")  # kinds of owners that are not rewound when a step is skipped


class _Constant(NamedTuple):
    """A tensor that forwards rarely write, a buffer outside the state dict or a tensor in an attribute: its copy serves
    every take until its version has changed.
    """

    tensor: Tensor
    version: int  # its version counter when it was copied
    copy: Tensor | None  # its value at that version; None if not needed


class _References(NamedTuple):
    """What is restored by reference, in all registries, attributes and modules, and the states of owners."""

    contents: list[dict[str, Any]]  # of the registries
    attributes: list[dict[str, Any]]  # of the user's modules, then of objects
    containers: list[Refill]  # what lists, dicts and sets hold
    training: list[bool]
    variables: Record  # global ones
    owner_states: dict[str, Any]


@dataclasses.dataclass
class State:
    """The record of a `take`."""

    structure: Structure
    references: _References
    versions: list[int]  # of the parameters
    need_gradients: list[bool]
    copies: list[tuple[Tensor, Tensor]]  # a tensor and its copy
    constants: dict[int, _Constant]  # by id
    arrays: list[tuple[np.ndarray, np.ndarray]]  # an array and its copy
    checksums: dict[str, Tensor]  # of the structure's rarely written tensors; empty in steps that are not verified
    # Of tuples, lists and similar values, for each of `references.attributes`; empty in steps that are not verified.
    fingerprints: list[dict[str, Any]]

    def copies_by_id(self) -> dict[int, Tensor]:
        """Return the copy of each tensor."""
        copies = {}
        for tensor_id, constant in self.constants.items():
            if constant.copy is not None:
                copies[tensor_id] = constant.copy
        for tensor, copy in self.copies:
            copies[id(tensor)] = copy
        return copies

    def has_new_versions(self) -> bool:
        """Return whether a parameter's version has changed since."""
        return self.versions != _parameter_versions(self.structure)

    def drop_unwritten(self) -> None:
        """Free the copies of constants that have not been written since."""
        for tensor_id, (tensor, version, _) in self.constants.items():
            if version_of(tensor) == version:
                self.constants[tensor_id] = _Constant(tensor, version, None)

    def has_lost(self) -> bool:
        """Return whether a tensor without a copy was modified since."""
        return any(copy is None and version_of(tensor) != version for tensor, version, copy in self.constants.values())


class Snapshot:
    """The recorded state of modules and of other owners of state. See the head of this file.

    Args:
        modules: by the first part of their parameters' names.
        owners: by name.
        objects: others by name, such as a task, whose plain values, tensors and arrays in attributes are restored.
        verified: number of first steps in which checksums are compared, and all that holds state is looked at; if not
            0, so are the 4th step, the 8th, the 16th and so on, since a later stage of training may write more.
        variables: global ones.

    Attributes:
        written: names of the parameters that forwards are known to write.
        changes: names of whatever the forwards of verified steps changed.
        lost: names of the parameters that the last `restore` found written without having a copy.
        verifies: whether this is one of the steps that are looked at so closely.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        owners: Mapping[str, Owner] | None = None,
        objects: Mapping[str, Any] | None = None,
        verified: int = 2,
        variables: GlobalVariables | None = None,
    ) -> None:
        # What is recorded.
        self._roots = modules
        self._built_modules = {id(module) for root in modules.values() for module in root.modules()}
        self._modules_made: dict[str, nn.Module] = {}  # by objects since then, by name
        self._owners = dict(owners or {})
        self._objects = objects or {}
        self._variables = variables if variables is not None and variables.namespaces else None
        self._shards = find_shards(modules.values())

        # What is learnt of the forwards.
        self.written: list[str] = []
        self.changes: set[str] = set()
        self.lost: list[str] = []
        self._verified_steps = verified
        self._finished_steps = 0
        self.verifies = verified > 0
        self._written_library_modules: set[int] = set()  # ids of modules of torch's with attributes that were written

        self._structure = self._new_structure()

        # The memory of the last copies, of these names in the structure with these modules, and grouped for copying.
        self._copies_key: tuple[ModulesKey, list[str]] | None = None
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._copy_groups: list[tuple[list[Tensor], list[Tensor]]] = []  # copies and tensors
        self._constants: dict[int, _Constant] = {}  # by id

        self._state: State | None = None  # None unless a `take` was complete

    @classmethod
    def of(cls, stateful: Stateful, verified: int = 2) -> "Snapshot":
        """Return a snapshot of everything that a step may change in these objects. Callbacks are not included: they run
        between steps.
        """
        owners = {}
        for name, owner in stateful.owners.items():
            if not owner.is_restored_elsewhere and owner.kind != "callbacks":
                owners[name] = owner
        modules: dict[str, nn.Module] = {}
        if "model" in stateful.roots:
            modules["model"] = stateful.roots["model"]
        modules |= stateful.modules
        variables = GlobalVariables(*modules.values(), *stateful.tasks().values())
        return cls(modules, owners, stateful.plain_tasks(), verified, variables)

    @property
    def _taken(self) -> State:
        assert self._state is not None, "no complete take()"
        return self._state

    # --- taking

    def begin_step(self, parameters: Parameters = "written") -> None:
        """Call `take` for an attempt at a step."""
        number = self._finished_steps + 1
        is_power_of_two = number & (number - 1) == 0
        self.verifies = number <= self._verified_steps or (self._verified_steps > 0 and number >= 4 and is_power_of_two)
        self.take(parameters)

    def take(self, parameters: Parameters = "written") -> None:
        """Record the current state.

        Args:
            parameters: which to copy, besides those known to be written.
        """
        self.lost = []
        self._state = None

        # Look at the modules anew if there are others, or if they hold other tensors, than in the last `take`.
        modules_made = self._find_modules_made()
        has_new_modules = modules_made != self._modules_made
        is_looked_at = self.verifies or self._structure.looks_at_libraries
        if is_looked_at or has_new_modules or not self._is_current(self._structure):
            self._modules_made = modules_made
            self._structure = self._new_structure()
        elif self._structure.held.holders and not self._structure.held.is_current():
            self._structure = self._structure.with_current_held()
        structure = self._structure
        references = self._references(structure, structure.contents)
        copies = self._copy_changing(parameters)

        # Tensors and arrays in attributes, besides the buffers that are rarely written.
        constants = list(structure.constants.values())
        arrays = []
        too_large = structure.held.too_large_values() if structure.held.attributes else {}
        for attributes in references.attributes:
            for value in attributes.values():
                if type(value) in _WITHOUT_TENSORS:  # nearly all of them
                    continue
                if id(value) in too_large:
                    continue
                if type(value) is np.ndarray:
                    arrays.append((value, value.copy()))
                elif type(value) is Tensor and is_restorable(value):
                    constants.append(memory_of(value))
                elif isinstance(value, tuple):
                    constants.extend(map(memory_of, restorable_tensors(value)))

        # In verified steps also what reveals writes that leave no trace.
        checksums: dict[str, Tensor] = {}
        fingerprints: list[dict[str, Any]] = []
        if self.verifies:
            checksums = self._checksums()
            fingerprints = container_fingerprints(structure)

        self._state = State(
            structure=structure,
            references=references,
            versions=_parameter_versions(structure),
            need_gradients=[leaf.requires_grad for leaf in structure.leaves],
            copies=copies,
            constants=self._copy_constants(constants),
            arrays=arrays,
            checksums=checksums,
            fingerprints=fingerprints,
        )

    def _new_structure(self) -> Structure:
        of_libraries = None if self.verifies else self._written_library_modules
        return Structure({**self._roots, **self._modules_made}, self._objects, self._shards, of_libraries)

    def _find_modules_made(self) -> dict[str, nn.Module]:
        """Return the modules in attributes of objects that were not there when these were built, by name."""
        modules = {}
        for name, attributes in zip(self._objects, self._structure.objects, strict=False):  # then come held objects
            for attribute, module in attributes.items():
                if isinstance(module, nn.Module) and id(module) not in self._built_modules:
                    modules[f"{name}.{attribute}"] = module
        return modules

    @staticmethod
    def _is_current(structure: Structure) -> bool:
        """Return whether the modules still hold the same tensors and submodules.

        `map` compares in C, in every step: 14 us for a GPT of 12 blocks, where a loop took 57 us.
        """
        if sum(map(len, structure.registries)) != len(structure.registered):
            return False
        values = chain.from_iterable(map(dict.values, structure.non_empty_registries))
        return all(map(operator.is_, values, structure.registered))

    def _references(self, structure: Structure, contents: list[dict[str, Any]] | None = None) -> _References:
        """Return the current references. contents: the registries' contents, if they are known to be current."""
        attributes = [values.copy() for values in structure.attributes]
        attributes.extend(_plain_attributes(values) for values in structure.objects)
        return _References(
            contents=contents or [dict(registry) for registry in structure.registries],
            attributes=attributes,
            containers=structure.held.record() if structure.held.containers else [],
            training=[module.training for module in structure.modules],
            variables=self._variables.record() if self._variables else [],
            owner_states={name: owner.copy() for name, owner in self._owners.items()},
        )

    def _copy_changing(self, parameters: Parameters) -> list[tuple[Tensor, Tensor]]:
        """Copy the buffers in the state dict and the chosen parameters, into the memory of the last copies."""
        # The memory of the last copies serves again, unless names or shapes have changed.
        names = self._names_to_copy(parameters)
        has_memory = self._copies_key == (self._structure.modules_key, names)
        if not has_memory or any(tensor.shape != copy.shape for tensor, copy in self._copies):
            self._allocate_copies(names)

        if self._copy_groups:  # entering `no_grad` takes as long as all the rest
            with torch.no_grad():
                for copies, tensors in self._copy_groups:
                    foreach_copy_(copies, tensors)
        return self._copies

    def _names_to_copy(self, parameters: Parameters) -> list[str]:
        """Return the names of the parameters and constants to copy in any case."""
        if parameters == "written":
            return list(self.written)
        names = list(self.written)
        for name, leaf in zip(self._structure.parameters, self._structure.leaves, strict=True):
            if (parameters == "all" or leaf.requires_grad) and name not in self.written:
                names.append(name)
        return names

    def _allocate_copies(self, names: list[str]) -> None:
        """Allocate memory for copies of the buffers in the state dict and the named tensors."""
        self._forget_copies()  # first: both would not fit in a full memory

        structure = self._structure
        tensors = list(structure.buffers.values())
        for name in names:
            if name in structure.rarely_written:
                tensors.append(structure.rarely_written[name])
        self._copies = [(tensor, torch.empty_like(tensor, requires_grad=False)) for tensor in tensors]

        # Grouped by device and dtype: BatchNorm's batch counter is an integer, and CUDA copies a mixed list with one
        # launch per tensor (ForeachBinaryOpList.cu at pytorch's commit 00a1abb).
        groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for tensor, copy in self._copies:
            copies_of_group, tensors_of_group = groups.setdefault((tensor.device, tensor.dtype), ([], []))
            copies_of_group.append(copy)
            tensors_of_group.append(tensor)
        self._copy_groups = list(groups.values())
        self._copies_key = (structure.modules_key, names)

    def _forget_copies(self) -> None:
        """Let go of the copies' memory: the next `take` copies into new memory."""
        self._copies_key = None
        self._copies = []
        self._copy_groups = []

    def _copy_constants(self, tensors: list[Tensor]) -> dict[int, _Constant]:
        """Copy constants whose current version has no copy, into new memory."""
        previous = self._constants
        self._constants = {}
        for tensor in tensors:
            constant = previous.get(id(tensor))
            version = version_of(tensor)
            is_copied = constant is not None and constant.tensor is tensor and constant.version == version
            if constant is None or not is_copied or self.verifies:
                constant = _Constant(tensor, version, tensor.detach().clone())
            self._constants[id(tensor)] = constant
        return self._constants

    def _checksums(self) -> dict[str, Tensor]:
        with outside_dispatch_modes():  # counting live tensors would take longer than summing
            return {
                name: checksum(tensor) for name, tensor in self._structure.rarely_written.items() if has_memory(tensor)
            }

    # --- finding what a forward has written or changed

    def record_written(self) -> None:
        """Record which parameters have been written since `take`. Call before anything else changes them."""
        if self.verifies or self._taken.has_new_versions():
            self.add_written(self._written())

    def record_step_writes(self) -> None:
        """Call `record_written` for a step whose gradients are complete, before its commit; in steps that are verified,
        also record what else changed.
        """
        self.record_written()
        if self.verifies:
            changed = self.changed()
            self.changes.update(changed)
            self._written_library_modules.update(self._structure.library_modules_among(changed))
        self._finished_steps += 1
        self.verifies = self._finished_steps < self._verified_steps

    def not_restored(self) -> list[str]:
        """Return the names of what verified steps have changed, and of which `take` makes no copy: it is too large."""
        held = self._structure.held
        too_large = {*held.too_large_containers(), *held.too_large_values().values()}
        return sorted(too_large & self.changes)

    def advanced_iterators(self) -> list[str]:
        """Return the names of the iterators, and of containers of them, that verified steps have advanced."""
        names = []
        for _, name, value in self._named_attributes():
            if name in self.changes and has_iterators(value):
                names.append(name)
        return sorted(names)

    def fingerprints_of_held(self, names: Collection[str]) -> dict[str, Any]:
        """Return fingerprints of the containers, and the attributes of held objects, that have these names."""
        held = self._structure.held
        fingerprints = {}
        for holder_name, name, value in self._named_attributes():
            if name in names and (holder_name in held.attributes or name in held.containers):
                fingerprints[name] = fingerprint(value)
        return fingerprints

    def _named_attributes(self) -> Iterator[tuple[str, str, Any]]:
        """Yield each attribute of modules and objects, after its holder's name and its own."""
        structure = self._structure
        holder_names = structure.holder_names[len(structure.registries) :]
        for holder_name, attributes in zip(holder_names, (*structure.attributes, *structure.objects), strict=True):
            for name, value in attributes.items():
                yield holder_name, joined(holder_name, name), value

    def add_written(self, names: Iterable[str]) -> None:
        """Add parameters that a forward is known to write: here, on another rank or in an earlier process."""
        for name in names:
            if name not in self.written:
                self.written.append(name)

    def _written(self) -> list[str]:
        """Return the names of the parameters and constants written since `take`."""
        state = self._taken
        rarely_written = state.structure.rarely_written
        written = set()

        # By version counters.
        versions = _parameter_versions(state.structure)
        for name, version_before, version in zip(state.structure.parameters, state.versions, versions, strict=True):
            if version != version_before:
                written.add(name)

        # In verified steps by checksums too: not all writes change the version.
        with outside_dispatch_modes():
            for name, checksum_before in state.checksums.items():
                if not torch.equal(checksum(rarely_written[name]), checksum_before):
                    written.add(name)
        return [name for name in rarely_written if name in written]

    def changed(self, with_data: bool = False, only_state: bool = False) -> list[str]:
        """Return the names of what holds other values than at `take`, except results left in attributes.

        Args:
            with_data: also of data sets and what they hold.
            only_state: of attributes only numbers. Without gradients, tensors that a forward leaves in attributes for
                others to read cannot be told from its state.
        """
        state = self._taken
        structure = state.structure

        # Tensors that have no copy, by their versions and checksums.
        copies: dict[int, Any] = {**state.copies_by_id()}
        for array, copy in state.arrays:
            copies[id(array)] = copy
        changed = [name for name in self._written() if id(structure.rarely_written[name]) not in copies]

        # Everything else by its value, before and now.
        before = state.references
        now = self._references(structure)
        attributes_before = before.attributes
        attributes_now = now.attributes
        if state.fingerprints:  # a list may be the same, with other contents
            attributes_before = with_updates(attributes_before, state.fingerprints)
            attributes_now = with_updates(attributes_now, container_fingerprints(structure))
        values_before = [*before.contents, *map(_without_modules, attributes_before), before.owner_states]
        values_now = [*now.contents, *map(_without_modules, attributes_now), now.owner_states]
        holder_names = [*structure.holder_names, ""]  # names of owners are whole
        with outside_dispatch_modes():
            for index, (holder, old, new) in enumerate(zip(holder_names, values_before, values_now, strict=True)):
                is_registry = index < len(before.contents)
                only_numbers = only_state or structure.is_of_library(index)
                for name in changed_names(old, new, copies, with_results=is_registry):
                    is_number = isinstance(new.get(name), (int, float))
                    if is_registry or is_number or not only_numbers:
                        changed.append(joined(holder, name))
        if not state.fingerprints and not only_state:  # containers by what they hold; fingerprints tell more
            changed.extend(container.name for container in before.containers if not container.is_unchanged())
        distinct = dict.fromkeys(changed)
        return [name for name in distinct if with_data or not _is_of_data(name)]

    # --- restoring

    def restore(self, except_kinds: Collection[str] = ()) -> None:
        """Return to the last `take`. Sets `lost`.

        Args:
            except_kinds: kinds of owners to leave unchanged.
        """
        state = self._taken

        # What was written without having a copy is lost; from now on it has one.
        written = self._written()
        copies = state.copies_by_id()
        self.lost = [name for name in written if id(state.structure.rarely_written[name]) not in copies]
        self.add_written(written)

        self._restore_tensors(state)
        self._restore_references(state.structure, state.references, except_kinds)

    def set_aside(self) -> State:
        """Take, and hand over the record, for `return_to` after any number of other takes, which copy into new memory.
        The copies of constants are shared with them.
        """
        self.take()
        self._forget_copies()
        return self._taken

    def return_to(self, state: State) -> list[str]:
        """Return to a record that was set aside. Return the names of parameters that forwards have written since, of
        which it has no copies: they stay as they are.
        """
        rarely_written = state.structure.rarely_written
        copies = state.copies_by_id()
        self._restore_tensors(state)
        self._restore_references(state.structure, state.references)
        self._constants = state.constants  # copies of later versions have the values of later writes
        return [name for name in self.written if name in rarely_written and id(rarely_written[name]) not in copies]

    def _restore_tensors(self, state: State) -> None:
        for leaf, needs_gradient in zip(state.structure.leaves, state.need_gradients, strict=True):
            leaf.requires_grad_(needs_gradient)
        for tensor, version, constant_copy in state.constants.values():
            # Unless the step is verified, only if the version has changed: a copy may be older than a write that left
            # the version as it was, such as the optimizer's where an attribute refers to a `weight.data`.
            if constant_copy is not None and (state.checksums or version_of(tensor) != version):
                _restore_tensor(tensor, constant_copy)
        for tensor, copy in state.copies:
            _restore_tensor(tensor, copy)
        for array, array_copy in state.arrays:
            array[...] = array_copy

    def _restore_references(
        self, structure: Structure, references: _References, except_kinds: Collection[str] = ()
    ) -> None:
        """Restore registries, attributes, training modes and owners."""
        self._restore_registries(structure, references.contents)
        module_count = len(structure.attributes)

        # Attributes of modules, except those that torch sets itself.
        of_modules = references.attributes[:module_count]
        for attributes, before in zip(structure.attributes, of_modules, strict=True):
            set_by_torch = {name: attributes[name] for name in MODULE_ATTRIBUTES & attributes.keys()}
            _refill(attributes, before | set_by_torch)

        # Attributes of objects, except those of other kinds, which were not recorded.
        of_objects = references.attributes[module_count:]
        for of_object, before in zip(structure.objects, of_objects, strict=True):
            plain = _plain_attributes(of_object)
            not_recorded = {name: value for name, value in of_object.items() if name not in plain}
            _refill(of_object, not_recorded | before)

        for container in references.containers:
            if not container.is_unchanged():
                container.undo()

        for module, is_training in zip(structure.modules, references.training, strict=True):
            module.training = is_training
        if self._variables:
            self._variables.restore(references.variables)
        self._restore_owners(references.owner_states, except_kinds)

    def _restore_registries(self, structure: Structure, contents: list[dict[str, Any]]) -> None:
        for registry, before in zip(structure.registries, contents, strict=True):
            swapped_by_fsdp = {name: value for name, value in registry.items() if (id(registry), name) in self._shards}
            _refill(registry, before | swapped_by_fsdp)

    def _restore_owners(self, states: Mapping[str, Any], except_kinds: Collection[str]) -> None:
        for name, state in states.items():
            if self._owners[name].kind not in except_kinds:
                self._owners[name].restore(state)

    def restore_generators(self) -> None:
        """Restore only the model's and task's generators: for a second forward of the same samples."""
        for name, state in self._taken.references.owner_states.items():
            if self._owners[name].kind == "generator" and not _is_of_data(name):
                self._owners[name].restore(state)

    # --- for recomputation

    def released(self) -> State:
        """Hand over the last record, for `replayed`: the next `take` copies into new memory."""
        state = self._taken
        self._state = None
        self._forget_copies()
        self._constants = {}
        return state

    @contextlib.contextmanager
    def replayed(self, state: State) -> Iterator[None]:
        """Temporarily reinstate `state` (except parameters, submodules and requires_grad) for recomputation. No tensor
        is written, since autograd may have saved it: copies take their place.
        """
        structure = state.structure
        before = state.references
        now = self._references(structure)

        # Stand-ins for the tensors and arrays that have copies.
        stand_ins: dict[int, Any] = {}
        for tensor_id, tensor_copy in state.copies_by_id().items():
            stand_ins[tensor_id] = tensor_copy.clone()
        for array, array_copy in state.arrays:
            stand_ins[id(array)] = array_copy.copy()

        # Buffers and attributes as they were, parameters and submodules as they are now.
        contents = now.contents.copy()
        for index in range(1, len(contents), REGISTRIES):  # buffers: the second registry of each module
            contents[index] = with_stand_ins(before.contents[index], stand_ins)
        attributes = [with_stand_ins(values, stand_ins) for values in before.attributes]

        try:
            self._restore_references(structure, before._replace(contents=contents, attributes=attributes))
            yield
        finally:
            self._restore_references(structure, now)

    # --- contexts

    @contextlib.contextmanager
    def preserved_generators(self) -> Iterator[None]:
        """Restore the owners' generators after the block."""
        generators = [owner for owner in self._owners.values() if owner.kind == "generator"]
        states = [generator.copy() for generator in generators]
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.restore(state)

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
        """Undo the part that an error interrupts, in a block that calls `take` after each part."""
        self.take()
        try:
            yield
        except BaseException:
            if self._state is not None:  # otherwise `take` was interrupted, and the previous part is finished
                self.restore()  # copies into existing memory: allocates next to nothing
            raise


def _parameter_versions(structure: Structure) -> list[int]:
    """Return the version counter of each parameter."""
    return [version_of(parameter) for parameter in structure.parameters.values()]


def _restore_tensor(tensor: Tensor, copy: Tensor) -> None:
    if tensor.shape == copy.shape:
        tensor.data.copy_(copy)  # leaves the version unchanged: only a forward's write counts
    else:  # another tensor was assigned to its `.data`
        tensor.data = copy.clone()


def _refill(values: Attributes, before: dict[str, Any]) -> None:
    """Refill a dictionary with the same objects as before, in the same order."""
    if values.keys() != before.keys() or any(before[name] is not value for name, value in values.items()):
        values.clear()
        values.update(before)


def _is_of_data(name: str) -> bool:
    root_name = name.partition(".")[0]
    return root_name.endswith("data")


def _plain_attributes(attributes: Attributes) -> dict[str, Any]:
    """Return the plain values, tensors, arrays and modules among an object's attributes, the user's objects, and
    containers of all but modules; an embedding loss may keep others.
    """
    return {name: value for name, value in attributes.items() if isinstance(value, nn.Module) or is_plain(value)}


def _without_modules(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes that are no modules: what changes of one is in its tensors."""
    return {name: value for name, value in attributes.items() if not isinstance(value, nn.Module)}
