"""The dictionaries in which torch's modules keep what they hold: attributes, tensors, children and hooks."""

import copy
import itertools
import operator
from collections.abc import Collection
from typing import Any

from torch import nn

from trainapp.errors import UserError

# All that a forward reads; the others are called when a state dict is made or loaded.
REGISTRIES = tuple(
    name for name, held in vars(nn.Module()).items() if isinstance(held, dict) and "state_dict" not in name
)
# attributes -> tuple. The registries among the attributes of a module.
registries_in = operator.itemgetter(*REGISTRIES)


def modules_in(block: nn.Module) -> list[nn.Module]:
    """The block and all modules in it, each once. `nn.Module.modules` takes twice as long: it also makes names.

    Raises UserError for a scripted module: its tensors are not in Python's dictionaries.
    """
    found, seen = [block], {id(block)}
    for module in found:  # grows on the way
        children = vars(module)["_modules"]
        if not isinstance(children, dict):
            raise UserError(
                f"activation_checkpointing: a {type(block).__name__} holds a scripted module (torch.jit), whose state "
                "cannot be put back for a recomputation; use the module it was made from, or "
                "activation_checkpointing=none"
            )
        for child in children.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


def are_identical(a: Collection[Any], b: Collection[Any]) -> bool:
    """Whether the same objects are in both, in the same order."""
    return len(a) == len(b) and all(map(operator.is_, a, b))


class Held:
    """What some dictionaries hold at one time, in order: optimizers go by the order of parameters.

    In flat lists, which are compared in less time than a call per dictionary takes.
    """

    def __init__(self, owners: list[dict[str, Any]]):
        self._owners = list(filter(None, owners))
        self._empty = list(itertools.filterfalse(None, owners))  # most
        self._sizes = list(map(len, self._owners))
        self._names = list(itertools.chain.from_iterable(self._owners))
        self.values = list(itertools.chain.from_iterable(map(dict.values, self._owners)))  # of one after the other

    def now(self) -> "Held":
        """What the same dictionaries hold now."""
        return Held(self._owners + self._empty)

    def with_values(self, values: dict[int, Any]) -> "Held":
        """The same with other values, by their places in `values`."""
        other = copy.copy(self)
        other.values = self.values.copy()
        for place, value in values.items():
            other.values[place] = value
        return other

    def put_back(self) -> None:
        """Make the dictionaries hold exactly this again."""
        if any(self._empty):
            for owner in self._empty:
                owner.clear()
        sizes, names = list(map(len, self._owners)), list(itertools.chain.from_iterable(self._owners))
        if sizes == self._sizes and names == self._names:
            now = itertools.chain.from_iterable(map(dict.values, self._owners))
            if all(map(operator.is_, now, self.values)):
                return
        held = zip(self._names, self.values, strict=True)
        for owner, size in zip(self._owners, self._sizes, strict=True):
            own = dict(itertools.islice(held, size))
            if list(owner) != list(own) or not are_identical(owner.values(), own.values()):
                owner.clear()
                owner.update(own)
