"""JSON as the standard has it: without NaN and Infinity, which Python writes by default and other readers refuse."""

import json
import math
from typing import Any


def dumps(value: Any, **options: Any) -> str:
    """`json.dumps`, with null for each number that is not finite.

    In an object the reason stands next to it: `{"loss": nan}` becomes `{"loss": null, "loss_note": "nan"}`, unless the
    object has a note of its own. options: of `json.dumps`.
    """
    return json.dumps(_finite(value), allow_nan=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        notes = {
            f"{key}_note": str(float(item))
            for key, item in value.items()
            if isinstance(item, float) and not math.isfinite(item)
        }
        return notes | {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
