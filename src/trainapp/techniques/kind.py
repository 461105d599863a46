"""How a value of one type is taken and put back: what `content_kinds` says of each."""

import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

PLAIN = frozenset({int, float, bool, complex, str, bytes, type(None), type, slice, range, types.ModuleType})
# Their objects are not looked into: the locks, streams and registries of all the process are among them.
FOREIGN = {"torch", "numpy", "pyarrow", "pandas", "trainapp"} | (sys.stdlib_module_names - {"types", "collections"})


class Kind(NamedTuple):
    """How to treat values of one type."""

    take: Callable[[Any], Any]  # its content: shares nothing with it that changes but its `parts`
    put: Callable[[Any, Any], Any] | None = None  # the inverse; None: it cannot be put back
    parts: Callable[[Any], Iterable[tuple[str, Any]]] = lambda content: ()  # of the content, with the steps to them
    same: Callable[[Any, Any], bool] = lambda a, b: a == b  # whether two contents are
    is_container: bool = False
    always: bool = False  # taken in every forward, whether the last one changed it or not


def home_of(value: Any) -> str:
    return (value.__module__ or "").partition(".")[0]


def are_identical(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def items(content: Iterable[Any]) -> Iterable[tuple[str, Any]]:
    return (("[]", part) for part in content)


def put_nothing(value: Any, content: Any) -> None:
    """It holds what it was made with; its parts may change."""
