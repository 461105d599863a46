"""The modules, tensors and attributes that a `Snapshot` records, collected once."""

import copy
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.state.held import HeldObjects
from trainapp.state.slots import Attributes, attributes_of
from trainapp.state.stateful import can_be_restored, memory_of
from trainapp.state.walk import LAYERS, joined
from trainapp.torch_private import is_shard, local, non_persistent_buffers, registries_of

_LIBRARIES = ("torch.", "trainapp.")  # whose modules keep their state in buffers
REGISTRIES = 3  # of each module, in this order: parameters, buffers, submodules
Shards = Mapping[tuple[int, str], Tensor]  # by the id of the registry and the name in it


class ModulesKey:
    """An identity, without content: structures that share one have the same modules and tensors, though the objects
    in their attributes may differ.
    """


class Structure:
    """The tensors and attributes of modules, and the attributes of other objects. Invalid as soon as a module holds
    other tensors or submodules; nothing here runs in a step before that.

    Args:
        roots: modules, by the first part of their parameters' names.
        objects: other objects, by name.
        shards: see `find_shards`.
        of_libraries: ids of torch's modules whose attributes are among `attributes`, too; None for all of them.

    Attributes:
        looks_at_libraries: whether the attributes of all of torch's modules are among `attributes`.
    """

    def __init__(
        self,
        roots: Mapping[str, nn.Module],
        objects: Mapping[str, Any],
        shards: Shards,
        of_libraries: Collection[int] | None = (),
    ):
        self.modules_key = ModulesKey()
        # Each module once, though several roots may hold it.
        named_modules = _named_modules(roots)
        module_by_id = {id(module): module for _, module in named_modules}
        self.modules = list(module_by_id.values())
        self.registries: list[dict[str, Any]] = []
        for module in self.modules:
            self.registries.extend(registries_of(module))
        self.contents = [dict(registry) for registry in self.registries]

        # The attributes of the user's modules, then those of torch's, and of objects.
        users_modules = [module for module in self.modules if not type(module).__module__.startswith(_LIBRARIES)]
        self.looks_at_libraries = of_libraries is None
        library_modules = []
        for module in self.modules:
            is_chosen = of_libraries is None or id(module) in of_libraries
            if is_chosen and type(module).__module__.startswith(LAYERS):
                library_modules.append(module)
        with_attributes = [*users_modules, *library_modules]
        self.attributes: list[dict[str, Any]] = [vars(module) for module in with_attributes]
        self._first_of_library = len(self.registries) + len(users_modules)
        self._end_of_library = self._first_of_library + len(library_modules)

        # Whose registry or attributes each is, in the order of `registries`, `attributes` and `objects`.
        name_by_module: dict[int, str] = {}  # the first one, as of tensors
        for name, module in named_modules:
            name_by_module.setdefault(id(module), name)
        names: list[str] = []
        for module in self.modules:
            names.extend([name_by_module[id(module)]] * REGISTRIES)
        names.extend(name_by_module[id(module)] for module in with_attributes)
        self._library_modules = {name_by_module[id(module)]: module for module in library_modules}
        self._names_before_held = [*names, *objects]
        self._roots = roots
        self._objects = objects
        self._find_held()

        # For a quick comparison with what the modules hold later.
        self.non_empty_registries = [registry for registry in self.registries if registry]
        self.registered: list[Any] = []
        for registry in self.non_empty_registries:
            self.registered.extend(registry.values())

        # The tensors, each under its first name.
        self.parameters: dict[str, Tensor] = {}  # this rank's shards
        self.leaves: list[Tensor] = []  # the parameters themselves
        self.buffers: dict[str, Tensor] = {}
        self.constants: dict[str, Tensor] = {}  # buffers outside the state dict, which forwards rarely write
        collected: set[int] = set()  # ids
        for name, module in named_modules:
            self._collect_tensors(name, module, shards, collected)
        # Not copied in every step: their writes are found by version counters and checksums.
        self.rarely_written = {**self.parameters, **self.constants}

    def is_of_library(self, index: int) -> bool:
        """Return whether the values at this place, in the order of `holder_names`, are attributes of torch's module."""
        return self._first_of_library <= index < self._end_of_library

    def library_modules_among(self, names: Collection[str]) -> set[int]:
        """Return the ids of torch's modules in `attributes` that have an attribute of these names."""
        ids = set()
        for name in names:
            module_name, _, attribute = name.rpartition(".")
            module = self._library_modules.get(module_name)
            if module is not None and attribute in vars(module):
                ids.add(id(module))
        return ids

    def _find_held(self) -> None:
        """Find what modules and objects hold, and set what depends on it."""
        self.held = HeldObjects(self._roots, self._objects)
        self.objects: list[Attributes] = [attributes_of(value) for value in self._objects.values()]
        self.objects.extend(self.held.attributes.values())
        self.holder_names = [*self._names_before_held, *self.held.attributes]

    def with_current_held(self) -> "Structure":
        """Return the same structure with what modules and objects hold now. Records of this one stay valid."""
        structure = copy.copy(self)
        structure._find_held()
        return structure

    def _collect_tensors(self, module_name: str, module: nn.Module, shards: Shards, collected: set[int]) -> None:
        """Add the parameters and buffers of one module that were not `collected` under another name."""
        parameters, buffers, _ = registries_of(module)
        for name, parameter in _new_tensors(parameters, shards, collected):
            self.leaves.append(parameter)
            self.parameters[joined(module_name, name)] = _local_memory(parameter)

        outside_state_dict = non_persistent_buffers(module)
        for name, buffer in _new_tensors(buffers, shards, collected):
            tensors = self.constants if name in outside_state_dict else self.buffers
            tensors[joined(module_name, name)] = _local_memory(buffer)


def find_shards(modules: Collection[nn.Module]) -> Shards:
    """Return the modules' shards. FSDP2 swaps them for gathered parameters in every forward and restores them itself,
    so they are looked up once, between forwards.
    """
    shards: dict[tuple[int, str], Tensor] = {}
    for root in modules:
        for module in root.modules():
            for registry in registries_of(module):
                for name, value in registry.items():
                    if is_shard(value):
                        shards[id(registry), name] = value
    return shards


def _named_modules(roots: Mapping[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return all modules below the roots. One that several roots hold appears with several names."""
    named_modules = []
    for root_name, root in roots.items():
        for path, module in root.named_modules():
            named_modules.append((joined(root_name, path), module))
    return named_modules


def _new_tensors(registry: dict[str, Any], shards: Shards, collected: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the registry's tensors that are not `collected` yet and can be restored, and mark them as collected."""
    for name, value in registry.items():
        tensor = shards.get((id(registry), name), value)
        if tensor is None or id(tensor) in collected:
            continue
        if can_be_restored(tensor):
            collected.add(id(tensor))
            yield name, tensor


def _local_memory(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return memory_of(local(tensor))
