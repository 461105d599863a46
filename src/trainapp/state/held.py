"""The lists, dicts and sets that modules and tasks hold, and objects such as a replay buffer: what a step's `Snapshot`
restores in them.
"""

import operator
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainapp.state.contents import CONTAINERS, MOST_BYTES, Refill, is_users_object, users_members
from trainapp.state.slots import Attributes, attributes_of
from trainapp.state.walk import LIBRARIES, MOST_ITEMS, Member, closure_of, joined, moves_at_commit, walk

# Items of all containers that are copied in every step. A list of as many takes 1 ms, with freeing the last copy, a
# deque 1.7, a dict 4. The length alone would be enough for an append-only list, but a ring is written in the middle.
MOST_COPIED_ITEMS = 100_000
# Values that hold nothing that would be recorded. Most attributes are of these classes.
_WITHOUT_CONTENTS = frozenset(
    (
        *(type(None), bool, int, float, complex, str, bytes, tuple),
        *(torch.Size, torch.device, torch.dtype, Tensor, nn.Parameter, np.ndarray),
    )
)


class HeldObjects:
    """The containers and objects that modules and other objects hold, found once.

    Args:
        modules: by the first part of their names.
        objects: others, such as a task, by name; their own attributes are recorded by the `Snapshot`.

    Attributes:
        containers: those to record, by name.
        attributes: those of the objects, and the variables of closures, by name.
        holders: attributes and containers to compare in `is_current`; empty where nothing is held.
    """

    def __init__(self, modules: Mapping[str, nn.Module], objects: Mapping[str, Any]):
        self.containers: dict[str, Any] = {}
        self.attributes: dict[str, Attributes] = {}
        self.holders: list[Any] = []
        visited: set[int] = set()
        for root_name, root in {**modules, **objects}.items():
            for member in walk(root, root_name, visited, _recorded_members):
                self._add(member)
        if not self.containers and not self.attributes:  # the usual case, in which a step asks no further
            self.holders.clear()
        self._contents = list(self._current_contents())

    def _add(self, member: Member) -> None:
        """Add what a member is: a container, an object, a closure, or a module whose attributes hold these."""
        value = member.value
        if isinstance(value, CONTAINERS):
            self.containers[member.name] = value
            if len(value) <= MOST_ITEMS:
                self.holders.append(value)
        elif isinstance(value, types.FunctionType):
            if value.__closure__:
                self.attributes[member.name] = closure_of(value)
        elif isinstance(value, nn.Module):
            if not type(value).__module__.startswith(LIBRARIES):
                self.holders.append(vars(value))
        elif is_users_object(value) and not moves_at_commit(value):
            attributes = attributes_of(value)
            self.holders.append(attributes)
            if member.depth:
                self.attributes[member.name] = attributes

    def is_current(self) -> bool:
        """Return whether modules, objects and short containers hold the same containers and objects as they did."""
        contents = list(self._current_contents())
        return len(contents) == len(self._contents) and all(map(operator.is_, contents, self._contents))

    def _current_contents(self) -> Iterator[Any]:
        for holder in self.holders:
            for value in holder.values() if isinstance(holder, Mapping) else holder:
                if type(value) not in _WITHOUT_CONTENTS:
                    yield value

    def record(self) -> list[Refill]:
        """Return copies of the containers, except of those that are too large."""
        too_large = self.too_large_containers()
        return [Refill(name, value) for name, value in self.containers.items() if name not in too_large]

    def too_large_containers(self) -> set[str]:
        """Return the names of the containers that are not copied, in the order in which they were found."""
        names = set()
        items_left = MOST_COPIED_ITEMS
        for name, container in self.containers.items():
            if len(container) <= items_left:
                items_left -= len(container)
            else:
                names.add(name)
        return names

    def too_large_values(self) -> dict[int, str]:
        """Return the names of the objects' tensors and arrays that are not copied, by the value's id."""
        names = {}
        bytes_left = MOST_BYTES
        for holder_name, attributes in self.attributes.items():
            for name, value in attributes.items():
                if isinstance(value, (Tensor, np.ndarray)):
                    if value.nbytes <= bytes_left:
                        bytes_left -= value.nbytes
                    else:
                        names[id(value)] = joined(holder_name, name)
        return names


def _recorded_members(member: Member) -> Iterator[Member]:
    """Yield what an object of the user's holds, except what moves at a step's commit, and rows of data."""
    value = member.value
    if moves_at_commit(value) or (isinstance(value, (*CONTAINERS, tuple, frozenset)) and len(value) > MOST_ITEMS):
        return
    if isinstance(value, nn.Module) and type(value).__module__.startswith(LIBRARIES):
        return
    yield from users_members(member)
