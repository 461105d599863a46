"""What the forward of a block changes besides its outputs, so that the block can be run a second time without a trace.

A recomputation must start from the state that the first forward started from (a block may compute with a running
statistic that it then updates) and leave the state that it finds. Nothing is written back into a tensor: copies take
the place of the originals while the block is recomputed, so that other modules that share a tensor, and gradients that
have saved it, never see a write.
"""

import collections
import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.errors import TrainingStopped
from trainapp.models.inspect import MODULE_ATTRIBUTES
from trainapp.optim.updated_memory import UpdatedMemory
from trainapp.rng import HostGenerators, generator_state, is_generator, set_generator_state
from trainapp.torch_private import buffers_of, is_tracing, non_persistent_buffers, parameters_of, version_of

_ABSENT = object()
_CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict)
Place = tuple[int, str]  # of a tensor: the dictionary that holds it, by its number in the block, and its name


class BlockState:
    """The state that a block's forward may change.

    Covered: buffers, parameters, tensors and generators that are attributes of its modules, Python's and NumPy's global
    generators, and all other attributes: numbers and the like exactly, lists and dictionaries with those nested in
    them, but no other objects in them. Torch's global generators are the business of torch.utils.checkpoint.

    Buffers are copied in every forward, and the copies of those outside the state dict (rotary tables, masks) dropped
    after it if nothing has moved their version. Parameters and other tensors are copied in the first forward only, to
    see which of them the forward writes; from then on only those.
    """

    def __init__(self, block: nn.Module):
        self.block = block
        self._written: set[Place] = set()
        self._is_known = self._is_traced = False

    @contextlib.contextmanager
    def noted(self, before: "Before") -> Iterator[None]:
        """Use around the forward. Fills `before`."""
        self._take(before)
        yield
        self._drop_unwritten(before)

    def _take(self, before: "Before") -> None:
        before.generators = HostGenerators()
        # A trace compares no values, but counts the copies that the first real forward makes.
        copies_all = not (self._is_traced if is_tracing() else self._is_known)
        for module in self.block.modules():
            buffers, attributes, constant = buffers_of(module), vars(module), non_persistent_buffers(module)
            for owner in (parameters_of(module), buffers, attributes):
                place = len(before.owners)
                own = attributes.keys() - MODULE_ATTRIBUTES if owner is attributes else owner
                found: dict[str, Any] = {name: owner[name] for name in own}
                before.owners.append((owner, found))
                for name, value in found.items():
                    if isinstance(value, Tensor):
                        before.versions[place, name] = version_of(value)
                        if owner is buffers or copies_all or (place, name) in self._written:
                            before.copies[place, name] = _copy(value)
                        if owner is not buffers or name in constant:
                            before.droppable.add((place, name))
                    elif type(value) in _CONTAINERS:
                        before.copies[place, name] = _copy_container(value, before.containers)
                    elif is_generator(value):
                        before.own_generators.append((value, generator_state(value)))

    def _drop_unwritten(self, before: "Before") -> None:
        """Drop the copies of tensors that this forward has not written."""
        for place, name in before.droppable & before.copies.keys() - self._written:
            tensor = before.owners[place][1][name]
            moved = version_of(tensor) != before.versions[place, name]
            if moved or not (self._is_known or is_tracing() or _equal(tensor, before.copies[place, name])):
                self._written.add((place, name))
            else:
                del before.copies[place, name]
        before.droppable.clear()
        if is_tracing():
            self._is_traced = True
        else:
            self._is_known = True

    @contextlib.contextmanager
    def rewound(self, before: "Before") -> Iterator[None]:
        """Use around the recomputation: the state of `before`, and after it that of now.

        Raises TrainingStopped if a tensor of that state is gone.
        """
        now: list[tuple[dict[str, Any], str, Any]] = []
        copies: dict[int, Any] = {}  # of an original that is shared: one
        nested: dict[int, Any] = {}
        for place, (owner, found) in enumerate(before.owners):
            if not found and (not owner or owner.keys() <= MODULE_ATTRIBUTES):
                continue
            for name in (found.keys() | owner.keys()) - MODULE_ATTRIBUTES:
                original, current = found.get(name, _ABSENT), owner.get(name, _ABSENT)
                kept = before.copies.get((place, name), _ABSENT)
                if kept is not _ABSENT:
                    again = _copy(kept) if isinstance(kept, Tensor) else _copy_container(kept, nested)
                    original = copies.setdefault(id(original), again)
                elif isinstance(original, Tensor) and version_of(original) != before.versions[place, name]:
                    self._require_updated(original, name)
                if original is not current:
                    now.append((owner, name, current))
                    _put(owner, name, original)
        own = [(generator, generator_state(generator)) for generator, _ in before.own_generators]
        try:
            for generator, state in before.own_generators:
                set_generator_state(generator, state)
            with before.generators.rewound():
                yield
        finally:
            for owner, name, current in now:
                _put(owner, name, current)
            for generator, state in own:
                set_generator_state(generator, state)

    def _require_updated(self, tensor: Tensor, name: str) -> None:
        """Raises TrainingStopped for a tensor that something else than the backward's own updates has written."""
        if UpdatedMemory.watches(tensor):
            return
        raise TrainingStopped(
            f"activation_checkpointing: `{name}` in a {type(self.block).__name__} is written in some forwards only, or "
            "by another module, and what it held before is lost, so that the block cannot be recomputed; register it "
            "as a buffer of the block, or use activation_checkpointing=none"
        )


class Before:
    """The state before one forward."""

    def __init__(self) -> None:
        self.owners: list[tuple[dict[str, Any], dict[str, Any]]] = []  # dictionaries of the modules, and what they held
        self.copies: dict[Place, Any] = {}
        self.containers: dict[int, Any] = {}  # the copy of each, by the identity of the original
        self.versions: dict[Place, int] = {}
        self.droppable: set[Place] = set()
        self.own_generators: list[tuple[Any, Any]] = []
        self.generators: HostGenerators


def _put(owner: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        owner.pop(name, None)
    else:
        owner[name] = value


def _copy_container(value: Any, known: dict[int, Any]) -> Any:
    """A copy with copies of the containers in it, and with everything else that it holds. known: the copies so far."""
    if id(value) not in known:
        known[id(value)] = copied = copy.copy(value)
        places: Any = copied if isinstance(copied, dict) else () if isinstance(copied, set) else range(len(copied))
        for place in places:
            if type(copied[place]) in _CONTAINERS:
                copied[place] = _copy_container(copied[place], known)
    return known[id(value)]


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether bits are equal; NaN counts as different. Waits for the device."""
    return a.layout is not torch.strided or torch.equal(a, b)
