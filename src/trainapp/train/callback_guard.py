"""What a callback leaves as it was: `preserved_states` restores it, `made_of` and `differences` notice the rest."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from trainapp.checkpoint.stateful import Stateful
from trainapp.models.inspect import MODULE_ATTRIBUTES
from trainapp.same_values import are_same
from trainapp.torch_modes import hooks_of
from trainapp.torch_private import version_of

_SETTINGS = (bool, int, float, str, tuple, type(None))


@contextlib.contextmanager
def preserved_states(stateful: Stateful) -> Iterator[None]:
    """Restore what has a state after the block: generators of the model, the task and data sets, counters with
    `get_extra_state`, and the like. A method of the user's is called only where the state has changed.
    """
    states = stateful.take()
    try:
        yield
    finally:
        now = stateful.take()
        stateful.restore(
            {name: state for name, state in states.items() if not are_same(state, now.get(name), unknown=False)}
        )


def made_of(roots: Mapping[str, nn.Module]) -> dict[str, list[Any]]:
    """What modules compute with, by name: which modules, parameters and buffers there are, how often those have been
    written, which need gradients, all hooks, and the settings of torch's own modules.

    A write through `.data` or NumPy moves no version and is not seen; nor are attributes of other classes, where a
    forward may keep what it likes.
    """
    found: dict[str, list[Any]] = {}
    for root, top in roots.items():
        for path, module in top.named_modules(remove_duplicate=False):
            name = ".".join(filter(None, (root, path)))
            found[name or "the model"] = [module]
            found[f"the hooks of {name or 'the model'}"] = hooks_of(module)
            if type(module).__module__.startswith("torch.nn."):
                for key, value in vars(module).items():
                    if key not in MODULE_ATTRIBUTES and isinstance(value, _SETTINGS):
                        found[f"{name}.{key}"] = [type(value), value]
        for path, tensor in (*top.named_parameters(), *top.named_buffers()):
            name = ".".join(filter(None, (root, path)))
            found[name] = [tensor, version_of(tensor)]
            found[f"requires_grad of {name}"] = [tensor.requires_grad]
            found[f"the hooks of {name}"] = hooks_of(tensor)
    return found


def differences(before: Mapping[str, list[Any]], after: Mapping[str, list[Any]]) -> list[str]:
    """The names under which two results of `made_of` differ, sorted."""
    return sorted(name for name in before.keys() | after.keys() if not _are_same(before.get(name), after.get(name)))


def _are_same(a: list[Any] | None, b: list[Any] | None) -> bool:
    if a is None or b is None or len(a) != len(b):
        return False
    return all(x is y or (isinstance(x, _SETTINGS) and x == y) for x, y in zip(a, b, strict=True))
