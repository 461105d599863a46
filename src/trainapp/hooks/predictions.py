"""Evaluation results for inspection: predictions for the first samples (`callbacks=predictions`, a metric that collects
and a callback that writes) and the confusion matrix (`callbacks=confusion_matrix`, which draws the one of
torchmetrics).
"""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from trainapp.errors import UserError
from trainapp.files import atomic_write, strict_json
from trainapp.hooks.callbacks import View, labels_of
from trainapp.hooks.metrics import logged_name
from trainapp.optim.precision import at_least_fp32
from trainapp.validation import PositiveInt

SHOWN = 60  # characters per cell in the trackers' table
MOST_LABELS = 30  # with more classes, an image is too small for names and numbers


def dim_of_classes(output: Tensor, targets: Any, known: int | None = None) -> int | None:
    """The dimension of the classes in an output, 1 or -1, for targets [B, ...] and logits [B, ..., classes] or
    [B, classes, ...]. None if the output is not logits, which includes one value per sample.

    known: a built-in task's, or an earlier batch's; used if both fit, as for [B, T, T], and where no class numbers are
    in the targets. Raises UserError if both fit and `known` is None.
    """
    if not output.is_floating_point() or output.ndim < 2:
        return None
    if not isinstance(targets, Tensor) or targets.is_floating_point():
        return None if known is None or output.shape[known] == 1 else known
    if output.ndim != targets.ndim + 1:
        return None
    is_last = output.shape[:-1] == targets.shape and output.shape[-1] > 1
    is_second = (output.shape[0], *output.shape[2:]) == targets.shape and output.shape[1] > 1
    if is_last and is_second and output.ndim > 2 and known is None:
        raise UserError(
            f"predictions: of an output {list(output.shape)} for targets {list(targets.shape)}, the classes may be "
            "dimension 1 or the last; set metrics.predictions.class_dim=1 or -1 or, for mode=predict, return "
            "classes from a method `predict(model, batch)` of the task"
        )
    if is_last and is_second:
        return known or -1
    return -1 if is_last else 1 if is_second else None


class FirstPredictions:
    """A metric that keeps targets and predictions of the first `samples` samples: the likeliest class and its
    probability for logits, otherwise the output itself.

    class_dim: dimension of the classes if the logits' shape is ambiguous; None: a built-in task's own. Attribute:
    `rows`, a mapping per sample, in the order of the data set.
    """

    def __init__(self, samples: PositiveInt = 8, class_dim: Literal[1, -1] | None = None):
        self.samples = samples
        self.class_dim: int | None = class_dim
        self.rows: list[dict[str, Any]] = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """outputs: logits [B, ..., classes] or [B, classes, ...] for integer targets [B, ...]; other values are kept
        unchanged. Raises UserError for ambiguous shapes.
        """
        left = self.samples - len(self.rows)
        if left <= 0:
            return
        outputs, targets = at_least_fp32(outputs[:left]).cpu(), targets[:left].cpu()
        columns = {"target": targets, "prediction": outputs}
        if (dim := dim_of_classes(outputs, targets, self.class_dim)) is not None:
            columns["probability"], columns["prediction"] = torch.softmax(outputs, dim).max(dim)
        rows = zip(*(values.tolist() for values in columns.values()), strict=True)
        self.rows += [dict(zip(columns, row, strict=True)) for row in rows]

    def merge(self, other: "FirstPredictions") -> None:
        self.rows = (self.rows + other.rows)[: self.samples]  # ranks have consecutive parts of a data set

    def compute(self) -> "FirstPredictions":
        return self  # no number, so only callbacks get it

    def reset(self) -> None:
        self.rows = []


class SamplePredictions:
    """After each evaluation: writes the rows of metrics.predictions to predictions/step_N.jsonl, and as a table to the
    trackers. Adds class names if the data set has `class_names`, and text if it has `decode(tokens)`.
    """

    def after_evaluation(self, view: View, metrics: Mapping[str, Any]) -> None:
        """Raises UserError if the metric is not configured."""
        for name, data in view.evaluated.items():
            kept = metrics.get(logged_name(name, "predictions"))
            if not isinstance(kept, FirstPredictions):
                raise UserError("callbacks.predictions: needs metrics.predictions, which callbacks=predictions sets")
            if view.is_rank_zero:
                rows = [{"sample": number} | _readable(row, data) for number, row in enumerate(kept.rows)]
                with atomic_write(view.new_file("predictions", name, ".jsonl")) as file:
                    file.writelines(strict_json(row) + "\n" for row in rows)
                view.tracker.text(logged_name(name, "predictions"), as_table(rows), view.step)


def _readable(row: dict[str, Any], data: Any) -> dict[str, Any]:
    """The row with class names, or with text, in addition to the numbers."""
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
    """The rows as Markdown, with short cells."""
    lines = [list(rows[0]), ["---"] * len(rows[0])] if rows else []
    lines += [[_cell(value) for value in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    text = text.replace("|", "\\|").replace("\n", " ")
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


class ConfusionMatrix:
    """After each evaluation: writes the result of metrics.confusion_matrix as a table and an image to
    confusion_matrix/, and the image to the trackers.
    """

    def after_evaluation(self, view: View, metrics: Mapping[str, Any]) -> None:
        """Raises UserError if the metric is not configured, or does not compute a matrix."""
        for name, data in view.evaluated.items():
            matrix = metrics.get(logged_name(name, "confusion_matrix"))
            if not isinstance(matrix, Tensor) or matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
                raise UserError(
                    "callbacks.confusion_matrix: needs metrics.confusion_matrix, which computes a square matrix, as "
                    "set by callbacks=confusion_matrix"
                )
            if view.is_rank_zero:
                self._show(view, name, data, matrix)

    def _show(self, view: View, name: str, data: Any, matrix: Tensor) -> None:
        labels = [str(label) for label in labels_of(data) or range(len(matrix))]
        with atomic_write(view.new_file("confusion_matrix", name, ".csv")) as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["true class / predicted", *labels])
            writer.writerows([label, *row] for label, row in zip(labels, matrix.tolist(), strict=True))
        picture = view.new_file("confusion_matrix", name, ".png")
        draw(picture, labels, matrix, f"{name} step {view.step}".strip())
        view.tracker.image(logged_name(name, "confusion_matrix"), picture, view.step)


def draw(path: Path, names: Sequence[str], matrix: Tensor, title: str) -> None:
    """Draw the matrix as fractions of each true class."""
    from matplotlib.figure import Figure  # late: 0.3 s

    size = len(names)
    shares = matrix.double() / matrix.sum(1, keepdim=True).clamp(min=1)
    side = 3 + 0.35 * min(size, MOST_LABELS)
    figure = Figure(figsize=(side, side), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
    axes.set(title=title, xlabel="predicted", ylabel="true")
    if size <= MOST_LABELS:
        axes.set_xticks(range(size), names, rotation=90)
        axes.set_yticks(range(size), names)
        for row, column in matrix.nonzero().tolist():
            color = "white" if shares[row, column] > 0.5 else "black"
            number = str(int(matrix[row, column]))
            axes.text(column, row, number, ha="center", va="center", color=color, fontsize="x-small")
    with atomic_write(path, "wb") as file:
        figure.savefig(file, format="png")
