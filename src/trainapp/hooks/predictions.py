"""Predictions for the first samples of an evaluation: `callbacks=predictions`. A metric that keeps, a callback that
writes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from trainapp.errors import UserError
from trainapp.files import atomic_write, strict_json
from trainapp.hooks.callbacks import View, labels_of
from trainapp.hooks.metrics import logged_name
from trainapp.validation import PositiveInt, Str

SHOWN = 60  # characters of a cell in the trackers' table


@dataclass
class Rows:
    """What the metric computes: one mapping per sample, in the order of the data set."""

    rows: list[dict[str, Any]] = field(default_factory=list)


class ClassDim:
    """Found by the shapes of outputs and integer targets [B, ...]: logits are [B, ..., classes] or [B, classes, ...].

    dim: 1 or -1 where it is known; it decides where shapes do not, as with [B, T, T]. remedy: the end of the message
    where nothing does.
    """

    def __init__(self, dim: int | None = None, remedy: str = "give the metric class_dim=1 or class_dim=-1"):
        self.dim, self._remedy = dim, remedy

    def of(self, output: Tensor, targets: Tensor) -> int | None:
        """1 or -1; None where the output has no logits of classes, which one value per sample is not either.

        Raises ValueError for shapes that may be read both ways, if no earlier ones have told.
        """
        if targets.is_floating_point() or output.ndim != targets.ndim + 1 or output.ndim < 2:
            return None
        first, *rest = targets.shape
        layouts = {-1: [first, *rest, output.shape[-1]], 1: [first, output.shape[1], *rest]}
        fitting = [dim for dim, shape in layouts.items() if list(output.shape) == shape and output.shape[dim] > 1]
        if not fitting:
            return None
        if len(fitting) == 1:
            self.dim = fitting[0]
        elif output.ndim > 2 and self.dim is None:
            raise ValueError(
                f"of an output {list(output.shape)} for targets {list(targets.shape)}, the classes may be dimension 1 "
                f"or the last; {self._remedy}"
            )
        return fitting[0] if len(fitting) == 1 or output.ndim == 2 else self.dim


class FirstPredictions:
    """A metric that keeps target and prediction of the first `samples`: of logits the likeliest class and its
    probability, of other outputs the output itself.

    class_dim: of the logits, where their shape may be read both ways; None: then as the task has it, if it is built in.
    """

    def __init__(self, samples: PositiveInt = 8, class_dim: Literal[1, -1] | None = None):
        self.samples, self.class_dim = samples, ClassDim(class_dim)
        self._rows: list[dict[str, Any]] = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """outputs: logits [B, ..., classes] or [B, classes, ...] for integer targets [B, ...]; else values, kept as
        they are. Raises ValueError for shapes that may be read both ways.
        """
        left = self.samples - len(self._rows)
        if left > 0:
            outputs, targets = outputs[:left].float().cpu(), targets[:left].cpu()
            dim = self.class_dim.of(outputs, targets)
            self._rows += _values(outputs, targets) if dim is None else _classes(outputs.movedim(dim, -1), targets)

    def merge(self, other: "FirstPredictions") -> None:
        self._rows = (self._rows + other._rows)[: self.samples]  # of a data set ranks have consecutive parts

    def compute(self) -> Rows:
        return Rows(list(self._rows))

    def reset(self) -> None:
        self._rows = []


def _values(outputs: Tensor, targets: Tensor) -> list[dict[str, Any]]:
    pairs = zip(outputs, targets, strict=True)
    return [{"target": target.tolist(), "prediction": output.tolist()} for output, target in pairs]


def _classes(logits: Tensor, targets: Tensor) -> list[dict[str, Any]]:
    parts = zip(targets, *reversed(torch.softmax(logits, -1).max(-1)), strict=True)
    return [
        {"target": target.tolist(), "prediction": prediction.tolist(), "probability": probability.tolist()}
        for target, prediction, probability in parts
    ]


class SamplePredictions:
    """After each evaluation: the rows in predictions/step_N.jsonl, and as a table to the trackers.

    Classes by their names where the data set has `class_names`, tokens as text where it has `decode(tokens)`.
    metric: the name of the metric that keeps them.
    """

    def __init__(self, metric: Str = "predictions"):
        self.metric = metric

    def after_evaluation(self, view: View, metrics: Mapping[str, Any]) -> None:
        """Raises UserError where the metric is not configured."""
        for name, data, kept in view.computed(self.metric, metrics):
            if not isinstance(kept, Rows):
                raise UserError(
                    f"callbacks.predictions.metric={self.metric}: no metric of this name keeps predictions; "
                    "callbacks=predictions configures one, metrics.predictions"
                )
            if view.is_rank_zero:
                self._write(view, name, data, kept)

    def _write(self, view: View, name: str, data: Any, kept: Rows) -> None:
        rows = [{"sample": number} | _readable(row, data) for number, row in enumerate(kept.rows)]
        with atomic_write(view.new_file("predictions", name, ".jsonl")) as file:
            file.writelines(strict_json(row) + "\n" for row in rows)
        view.tracker.text(logged_name(name, "predictions"), as_table(rows), view.step)


def _readable(row: dict[str, Any], data: Any) -> dict[str, Any]:
    """With names of classes, or with text, besides the numbers."""
    names, decode = labels_of(data), getattr(data, "decode", None)
    more: dict[str, Any] = {}
    for key in ("target", "prediction"):
        value = row[key]
        if isinstance(value, int) and 0 <= value < len(names):
            more[f"{key}_name"] = names[value]
        elif isinstance(value, list) and value and isinstance(value[0], int) and callable(decode):
            counted = [token for token, true in zip(value, row["target"], strict=True) if true >= 0]  # no padding
            more[f"{key}_text"] = decode(counted)
    return row | more


def as_table(rows: list[dict[str, Any]]) -> str:
    """As Markdown, with short cells."""
    if not rows:
        return ""
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    lines += [[_cell(value) for value in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    text = text.replace("|", "\\|").replace("\n", " ")
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
