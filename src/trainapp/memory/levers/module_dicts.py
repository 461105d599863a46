"""The dictionaries in which torch's modules keep what they hold: attributes, tensors, children and hooks."""

import operator
from collections.abc import Sequence
from typing import Any

from torch import nn

from trainapp.errors import UserError

# All that a forward reads; the others are called when a state dict is made or loaded.
REGISTRIES = tuple(
    name for name, held in vars(nn.Module()).items() if isinstance(held, dict) and "state_dict" not in name
)
NOTHING: dict[str, Any] = {}  # stands for the contents of every empty dictionary, which saves the copies


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


def are_identical(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether the same objects are in both, in the same order."""
    return len(a) == len(b) and all(map(operator.is_, a, b))


def put_back(owner: dict[str, Any], held: dict[str, Any]) -> None:
    """Make a dictionary hold exactly this again, in this order: optimizers go by the order of parameters."""
    if not owner and not held:
        return
    if list(owner) != list(held):
        owner.clear()
        owner.update(held)
    elif not all(map(operator.is_, owner.values(), held.values())):
        owner.update(held)
