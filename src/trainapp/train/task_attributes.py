"""What a task says of itself by attributes: `whole_batch`, `counts`, `split`, `predict`, `embed` and others."""

import functools
import inspect
from typing import Any


def unchecked(task: Any) -> Any:
    """The task of the configuration, without the checks around it."""
    return getattr(task, "unchecked", task)


def attribute(task: Any, name: str, default: Any = None) -> Any:
    """An attribute of a task, whether it is checked or not; of a `functools.partial`, that of its function where it has
    none of its own, called with those of its arguments that it takes. `default` where there is none.
    """
    own: Any = unchecked(task)
    given: dict[str, Any] = {}
    while not hasattr(own, name) and isinstance(own, functools.partial):
        own, given = own.func, own.keywords | given
    found = getattr(own, name, default)
    taken = given.keys() & _parameters(found)
    return functools.partial(found, **{key: given[key] for key in taken}) if taken else found


def _parameters(found: Any) -> set[str]:
    try:
        return set(inspect.signature(found).parameters)
    except (TypeError, ValueError):  # no function, or one without a signature
        return set()
