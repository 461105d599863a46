"""State of a model that a trace cannot follow: what it counts or draws may decide what a later step does."""

from typing import Any

from torch import nn

from trainapp.models.inspect import MODULE_ATTRIBUTES
from trainapp.rng import generator_state, is_generator
from trainapp.same_values import are_same
from trainapp.torch_private import outside_dispatch_modes

State = dict[str, Any]


def numbers_and_generators(model: nn.Module) -> State:
    """Copies of those that are attributes of its modules, by dotted name."""
    found: State = {}
    for name, module in model.named_modules():
        for key in vars(module).keys() - MODULE_ATTRIBUTES:
            value = vars(module)[key]
            if isinstance(value, (int, float)):
                found[f"{name}.{key}".lstrip(".")] = value
            elif is_generator(value):
                found[f"{name}.{key}".lstrip(".")] = generator_state(value)
    return found


def changed(before: State, after: State) -> list[str]:
    """The names of those that were there before, and are no longer the same."""
    common = before.keys() & after.keys()
    with outside_dispatch_modes():  # states of torch's generators are tensors
        return sorted(name for name in common if not are_same(before[name], after[name], unknown=False))
