"""What is said of a metric that fails, and what is kept of its error."""

import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from trainapp.errors import UserError
from trainapp.paths import PACKAGE

_LIBRARIES = (*map(sysconfig.get_path, ("purelib", "platlib", "stdlib")), PACKAGE)
_INSTALLED = tuple(Path(str(folder)).resolve() for folder in _LIBRARIES)


class MetricFailed(UserError):
    """A configured metric cannot be updated or computed. Its cause is the error that the metric has raised."""


def of_update(
    name: str, metric: Any, positional: Sequence[Any], named: Mapping[str, Any], error: Exception
) -> MetricFailed:
    """The failure of an update with these arguments."""
    shown = ", ".join([*map(_described, positional), *(f"{key}={_described(v)}" for key, v in named.items())])
    return _failed(
        error,
        f"metrics.{name}: the update of a {type(metric).__name__} fails on what the task passes ({shown})",
        f"let the task return under metrics[{name!r}] what this metric takes, or correct it, or leave it out",
    )


def of_compute(name: str, metric: Any, error: Exception) -> MetricFailed:
    """That of the end of an evaluation, where all samples are known."""
    return _failed(
        error,
        f"metrics.{name}: compute of a {type(metric).__name__} fails",
        "correct the metric or its arguments, or leave it out",
    )


def _failed(error: Exception, what: str, advice: str) -> MetricFailed:
    """The message has the traceback from the user's own code on; of an error within a library, none: it is no help."""
    error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without the frame that has caught it
    if isinstance(error, UserError):
        text = str(error)
    else:
        text = f"{what}: {type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}; {advice}"
        shown = error.__traceback__
        while shown is not None and not _is_own(shown.tb_frame.f_code.co_filename):
            shown = shown.tb_next
        if shown is not None:
            text = f"{text}\n{''.join(traceback.format_exception(type(error), error, shown)).rstrip()}"
    failed = MetricFailed(text)
    failed.__cause__ = error
    _free(error)
    return failed


def _is_own(file: str) -> bool:
    return not file.startswith("<") and not any(Path(file).resolve().is_relative_to(folder) for folder in _INSTALLED)


def _free(error: BaseException) -> None:
    """Let go of the tensors in the frames of the error, and of those that it came from: it lives until the run ends."""
    current: BaseException | None = error
    seen: set[int] = set()
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        current = current.__cause__ or current.__context__


def _described(value: Any) -> str:
    if isinstance(value, (Tensor, np.ndarray)):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__
