"""Stand-ins for tensors and arrays: a recomputation sees their earlier values, and writes none of the real ones."""

from collections.abc import Mapping
from typing import Any

from trainapp.state.plain_values import restorable_tensors


def with_stand_ins(values: dict[str, Any], stand_ins: Mapping[int, Any]) -> dict[str, Any]:
    """Return the values, with a stand-in for each that has one, in tuples too."""
    return {name: _stand_in(value, stand_ins) for name, value in values.items()}


def _stand_in(value: Any, stand_ins: Mapping[int, Any]) -> Any:
    if not isinstance(value, tuple) or not any(id(tensor) in stand_ins for tensor in restorable_tensors(value)):
        return stand_ins.get(id(value), value)

    # A new tuple, of the same type.
    items = [_stand_in(item, stand_ins) for item in value]
    if hasattr(value, "_make"):  # a named tuple
        return type(value)._make(items)
    return type(value)(items)
