"""How to take the content of some objects of Python's library, NumPy and torch, and to put it back."""

import contextlib
import contextvars
import threading
from typing import Any

from torch.quasirandom import SobolEngine

from trainapp.techniques.kind import Kind, are_identical, items

_UNSET = object()


def _put_bytes(view: memoryview, content: bytes) -> None:
    if not view.readonly and view.c_contiguous:
        view.cast("B")[:] = content


def _put_variable(variable: Any, content: Any) -> None:
    if content is not _UNSET:
        variable.set(content)
        return
    with contextlib.suppress(LookupError):  # it has no default
        variable.set(contextvars.Context().run(variable.get))  # a value cannot be taken away


def _put_local(local: Any, content: dict[str, Any]) -> None:
    vars(local).clear()
    vars(local).update(content)


def _set_state(bits: Any, state: Any) -> None:
    bits.state = state


# Of the thread that asks: a device's backward runs in another one.
_LOCAL = Kind(
    lambda local: dict(vars(local)),
    _put_local,
    lambda content: items(content.values()),
    lambda a, b: a.keys() == b.keys() and are_identical(list(a.values()), [b[name] for name in a]),
)
LIBRARY: dict[type, Kind] = {
    memoryview: Kind(lambda view: view.tobytes(), _put_bytes),
    threading.local: _LOCAL,
    contextvars.ContextVar: Kind(
        lambda variable: variable.get(_UNSET), _put_variable, lambda content: items((content,)), lambda a, b: a is b
    ),
}
BIT_GENERATOR = Kind(lambda bits: bits.state, _set_state, same=lambda a, b: False, always=True)
OPEN = {SobolEngine}  # their objects are looked into, as those of other classes are
