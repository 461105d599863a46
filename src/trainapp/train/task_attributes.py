"""What a task says of itself by attributes: `whole_batch`, `counts`, `split`, `predict`, `embed` and others."""

import functools
from typing import Any


def attribute(task: Any, name: str, default: Any = None) -> Any:
    """An attribute of a task, whether it is checked or not; of a `functools.partial`, that of its function where it has
    none of its own. `default` where there is none.
    """
    own = getattr(task, "unchecked", task)
    while not hasattr(own, name) and isinstance(own, functools.partial):
        own = own.func
    return getattr(own, name, default)
