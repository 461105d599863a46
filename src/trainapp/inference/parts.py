"""Which part of an output belongs to each sample.

A tensor's first dimension is the samples; dicts, lists and tuples hold several outputs. What a task's own `predict`
returns may also have lists and tuples without tensors, such as ids: they hold one plain value per sample.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from trainapp.data.batch import tensors_in
from trainapp.errors import UserError

WHAT_TO_DO = (
    "give the task a method `predict(model, batch)` that returns a tensor whose first dimension is the samples, or a "
    "dict, list or tuple of such"
)

_ONE_PER_SAMPLE = (
    "let its predict return a tensor whose first dimension is the samples, a list with a plain value per sample, or a "
    "dict of such"
)


def require_leading(output: Any, samples: int, setting: str, is_own: bool) -> None:
    """Raises UserError for an output with anything that is not one value, or several, for each of so many samples.

    setting: the task's name. is_own: whether the output is that of the task's own `predict`.
    """
    for place, part in _parts(output, is_own):
        problem = _problem_of_tensor(part, samples) if isinstance(part, Tensor) else _problem(part, samples, is_own)
        if problem:
            raise UserError(
                f"mode=predict with task={setting}: its output{place} for {samples} sample{'s' * (samples > 1)} "
                f"{problem}; {_ONE_PER_SAMPLE if is_own else WHAT_TO_DO}"
            )


def by_sample(output: Any, is_own: bool) -> Any:
    """Plain values for `part_of`, on the CPU: one wait for the device instead of one per sample."""
    if isinstance(output, Tensor):
        return output.tolist()
    if isinstance(output, Mapping):
        return {str(name): by_sample(value, is_own) for name, value in output.items()}
    if _holds_several(output, is_own):
        return tuple(by_sample(value, is_own) for value in output)
    return _plain(output)


def part_of(plain: Any, number: int) -> Any:
    """A sample's part: lists have the samples, tuples and dicts hold several of them."""
    if isinstance(plain, dict):
        return {name: part_of(value, number) for name, value in plain.items()}
    if isinstance(plain, tuple):
        return [part_of(value, number) for value in plain]
    return plain[number]


def _parts(output: Any, is_own: bool, place: str = "") -> Iterator[tuple[str, Any]]:
    """The outputs that containers hold, each with its place: `['boxes'][0]`."""
    if isinstance(output, Mapping):
        for name, value in output.items():
            yield from _parts(value, is_own, f"{place}[{name!r}]")
    elif _holds_several(output, is_own):
        for number, value in enumerate(output):
            yield from _parts(value, is_own, f"{place}[{number}]")
    else:
        yield place, output


def _holds_several(output: Any, is_own: bool) -> bool:
    """Whether it is a list or tuple of several outputs, not of the samples' values."""
    return isinstance(output, (list, tuple)) and len(output) > 0 and (not is_own or bool(tensors_in(output)))


def _problem_of_tensor(part: Tensor, samples: int) -> str | None:
    if part.ndim and len(part) == samples and not part.is_complex():
        return None
    shape = f"complex {list(part.shape)}" if part.is_complex() else str(list(part.shape))
    return f"has shape {shape}, which is not a real value or several for each of them"


def _problem(part: Any, samples: int, is_own: bool) -> str | None:
    """Of a part that is no tensor."""
    kind = type(part).__name__
    if not is_own:
        return f"is a {kind}, which is no tensor"
    values = part.tolist() if isinstance(part, np.ndarray) else part
    if not isinstance(values, (list, tuple)):
        return f"is a {kind}, which is not one value for each of them"
    if len(values) != samples:
        return f"is a {kind} of {len(values)}, which is not one value for each of them"
    foreign = next(_foreign(values), None)
    if foreign is None:
        return None
    return f"holds a {foreign}, which is no string, number or None, nor a list or dict of these"


def _foreign(value: Any) -> Iterator[str]:
    """The types of values that are not plain."""
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _foreign(item)
    elif value is not None and not isinstance(value, (str, int, float)):
        yield type(value).__name__


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
