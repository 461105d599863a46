"""How to take the content of functions, bound methods and the like, and to put it back."""

import functools
import types
from collections.abc import Iterable
from typing import Any, NamedTuple

from trainapp.techniques.kind import FOREIGN, Kind, are_identical, home_of, items, put_nothing

_EMPTY = object()  # a cell of a closure


class _Function(NamedTuple):
    cells: list[Any]
    attributes: dict[str, Any]
    defaults: tuple[Any, ...]


def _take(function: Any) -> _Function:
    if home_of(function) in FOREIGN:
        return _Function([], {}, ())
    cells = [cell.cell_contents if cell != types.CellType() else _EMPTY for cell in function.__closure__ or ()]
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return _Function(cells, dict(vars(function)), defaults)


def _put(function: Any, content: _Function) -> None:
    """All but the defaults: a forward may change what is in them, but rarely gives a function others."""
    for cell, held in zip(function.__closure__ or (), content.cells, strict=False):
        if held is not _EMPTY:
            cell.cell_contents = held
        elif cell != types.CellType():
            del cell.cell_contents
    if home_of(function) not in FOREIGN:
        vars(function).clear()
        vars(function).update(content.attributes)


def _parts(content: _Function) -> Iterable[tuple[str, Any]]:
    return items((*content.cells, *content.attributes.values(), *content.defaults))


def _same(a: _Function, b: _Function) -> bool:
    names = a.attributes.keys() == b.attributes.keys()
    return names and are_identical(a.cells, b.cells) and all(a.attributes[n] is b.attributes[n] for n in a.attributes)


CALLABLES: dict[type, Kind] = {
    functools.partial: Kind(lambda f: (f.func, *f.args, *f.keywords.values()), put_nothing, items, are_identical),
    types.MethodType: Kind(lambda f: (f.__self__, f.__func__), put_nothing, items, are_identical),
    types.BuiltinMethodType: Kind(lambda f: (f.__self__,), put_nothing, items, are_identical),
    types.FunctionType: Kind(_take, _put, _parts, _same),
}
