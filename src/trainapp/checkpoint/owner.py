"""One owner of state outside of tensors, and copies of it."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor


class Owner(NamedTuple):
    """Something with state. `get` may return references; `set` may keep what it is given."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    kind: str  # "model", "task", "data" or "callbacks"; "generator"
    is_held: bool = False  # a transaction holds it in another way: a module's tensors, a stream's samples

    def copy(self) -> Any:
        """The state, for `restore`. A generator's is a copy already; in a trace, another would be without numbers."""
        return self.get() if self.kind == "generator" else copied(self.get())

    def restore(self, state: Any) -> None:
        """Return to what `copy` has returned; any number of times."""
        self.set(state if self.kind == "generator" else copied(state))


def copied(state: Any) -> Any:
    """A copy that shares no tensor, array or container with `state`."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, np.ndarray):
        return state.copy()
    if type(state) is dict:
        return {key: copied(value) for key, value in state.items()}
    if type(state) in (list, tuple, set):
        return type(state)(map(copied, state))
    if isinstance(state, (str, bytes, int, float, complex, type(None))):
        return state
    return copy.deepcopy(state)  # a deque, an OrderedDict, a class of the owner's
