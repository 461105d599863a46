"""Evaluation results for inspection.

`callbacks=predictions`: predictions for the first samples, by a metric that collects and a callback that writes them.
`callbacks=confusion_matrix`: a picture and a table of the matrix that torchmetrics computes.
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
from trainapp.units import plural
from trainapp.validation import PositiveInt

CELL_WIDTH = 60  # characters per cell in the trackers' table
MOST_LABELS = 30  # with more classes, an image is too small for names and numbers


def dim_of_classes(output: Tensor, targets: Any, expected: int | None = None) -> int | None:
    """Return the dimension of the classes in an output, 1 or -1. None if the output is not logits, which includes one
    value per sample.

    Raises UserError if both dimensions fit and none is expected.

    Args:
        output: logits [B, ..., classes] or [B, classes, ...].
        targets: [B, ...].
        expected: a built-in task's dimension, or an earlier batch's; used if both fit, as for [B, T, T], and where no
            class numbers are in the targets.
    """
    if not output.is_floating_point() or output.ndim < 2:
        return None

    # Without class numbers, only the expected dimension tells.
    if not isinstance(targets, Tensor) or targets.is_floating_point():
        if expected is None or output.shape[expected] == 1:
            return None
        return expected

    # With them, the classes are the dimension that the targets lack.
    if output.ndim != targets.ndim + 1:
        return None
    fits_last = output.shape[:-1] == targets.shape and output.shape[-1] > 1
    fits_second = (output.shape[0], *output.shape[2:]) == targets.shape and output.shape[1] > 1
    if fits_last and fits_second:
        if output.ndim > 2 and expected is None:  # for [B, classes], both are the same dimension
            raise UserError(
                f"predictions: of an output {list(output.shape)} for targets {list(targets.shape)}, the classes may be "
                "dimension 1 or the last; set metrics.predictions.class_dim=1 or -1 or, for mode=predict, return "
                "classes from a method `predict(model, batch)` of the task"
            )
        return expected or -1
    if fits_last:
        return -1
    if fits_second:
        return 1
    return None


class FirstPredictions:
    """A metric that collects targets and predictions of the first samples: the likeliest class and its probability for
    logits, otherwise the output itself.

    Args:
        samples: how many.
        class_dim: the dimension of the classes if the logits' shape is ambiguous; None: a built-in task's own.

    Attributes:
        rows: a mapping per sample, in the order of the data set.
    """

    def __init__(self, samples: PositiveInt = 8, class_dim: Literal[1, -1] | None = None):
        self.samples = samples
        self.class_dim: int | None = class_dim
        self.rows: list[dict[str, Any]] = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Collect the samples of a batch, as far as they are among the first. Raises UserError for ambiguous shapes.

        Args:
            outputs: logits [B, ..., classes] or [B, classes, ...]; other values are taken unchanged.
            targets: integers [B, ...] for logits.
        """
        remaining = self.samples - len(self.rows)
        if remaining <= 0:
            return

        # On the host, a column per kind of value: of logits, the likeliest class and its probability.
        outputs = at_least_fp32(outputs[:remaining]).cpu()
        targets = targets[:remaining].cpu()
        columns = {"target": targets, "prediction": outputs}
        dim = dim_of_classes(outputs, targets, self.class_dim)
        if dim is not None:
            probability, prediction = torch.softmax(outputs, dim).max(dim)
            columns["prediction"] = prediction
            columns["probability"] = probability

        # A row per sample.
        values_by_column = [column.tolist() for column in columns.values()]
        for values in zip(*values_by_column, strict=True):
            self.rows.append(dict(zip(columns, values, strict=True)))

    def require_samples_first(self, samples: int, outputs: Tensor, targets: Tensor) -> None:
        """Raise UserError unless outputs and targets have this many samples as their first dimension."""
        for name, values in (("outputs", outputs), ("targets", targets)):
            if not values.ndim or len(values) != samples:
                raise UserError(
                    f"metrics.predictions: {name} for {plural(samples, 'sample')} have shape {list(values.shape)}, "
                    "whose first dimension is not the samples, so that their rows would be of something else; return "
                    "a pair of tensors with the samples first under metrics['predictions'] of the task, or leave out "
                    "callbacks=predictions"
                )

    def merge(self, other: "FirstPredictions") -> None:
        self.rows = (self.rows + other.rows)[: self.samples]  # ranks have consecutive parts of a data set

    def compute(self) -> "FirstPredictions":
        return self  # no number, so only callbacks get it

    def reset(self) -> None:
        self.rows = []


class SamplePredictions:
    """The callback that writes the rows of metrics.predictions after each evaluation: to predictions/step_N.jsonl, and
    as a table to the trackers. Adds class names if the data set has `class_names`, and text if it has `decode(tokens)`.
    """

    def after_evaluation(self, view: View, metrics: Mapping[str, Any]) -> None:
        """Write the rows of every evaluation set. Raises UserError if the metric is not configured."""
        for name, data in view.evaluated.items():
            predictions = metrics.get(logged_name(name, "predictions"))
            if not isinstance(predictions, FirstPredictions):
                raise UserError("callbacks.predictions: needs metrics.predictions, which callbacks=predictions sets")
            if view.is_rank_zero:
                self._write(view, name, data, predictions.rows)

    def _write(self, view: View, name: str, data: Any, predictions: list[dict[str, Any]]) -> None:
        rows = []
        for number, prediction in enumerate(predictions):
            readable = _readable_values(prediction, data)
            rows.append({"sample": number, **prediction, **readable})

        with atomic_write(view.new_file("predictions", name, ".jsonl")) as file:
            for row in rows:
                file.write(strict_json(row) + "\n")
        view.tracker.text(logged_name(name, "predictions"), markdown_table(rows), view.step)


def _readable_values(row: dict[str, Any], data: Any) -> dict[str, str]:
    """Return target and prediction as class names or text, where the data set has them."""
    names = labels_of(data)
    decode = getattr(data, "decode", None)
    readable: dict[str, str] = {}
    for key in ("target", "prediction"):
        value = row[key]
        is_class = isinstance(value, int) and 0 <= value < len(names)
        is_sequence = isinstance(value, list) and value and isinstance(value[0], int)
        if is_class:
            readable[f"{key}_name"] = names[value]
        elif is_sequence and callable(decode):
            tokens = []
            for token, target in zip(value, row["target"], strict=True):
                is_padding = target < 0
                if not is_padding:
                    tokens.append(token)
            readable[f"{key}_text"] = decode(tokens)
    return readable


def markdown_table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table with short cells; the first row names the columns."""
    cells_by_line = []
    if rows:
        columns = list(rows[0])
        cells_by_line.append(columns)
        cells_by_line.append(["---"] * len(columns))
    for row in rows:
        cells_by_line.append([_cell(value) for value in row.values()])

    lines = []
    for cells in cells_by_line:
        joined = " | ".join(cells)
        lines.append(f"| {joined} |")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    text = str(value)
    if isinstance(value, float):
        text = f"{value:.4g}"
    text = text.replace("|", "\\|").replace("\n", " ")
    if len(text) > CELL_WIDTH:
        text = f"{text[:CELL_WIDTH]}..."
    return text


class ConfusionMatrix:
    """The callback that writes the result of metrics.confusion_matrix after each evaluation: as a table and an image to
    confusion_matrix/, and the image to the trackers.
    """

    def after_evaluation(self, view: View, metrics: Mapping[str, Any]) -> None:
        """Write the matrix of every evaluation set. Raises UserError if the metric is not configured, or computes
        anything but a square matrix.
        """
        for name, data in view.evaluated.items():
            matrix = metrics.get(logged_name(name, "confusion_matrix"))
            if not isinstance(matrix, Tensor) or matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
                raise UserError(
                    "callbacks.confusion_matrix: needs metrics.confusion_matrix, which computes a square matrix, as "
                    "set by callbacks=confusion_matrix"
                )
            if view.is_rank_zero:
                self._write(view, name, data, matrix)

    def _write(self, view: View, name: str, data: Any, matrix: Tensor) -> None:
        # Without names, classes are numbers.
        names = labels_of(data) or range(len(matrix))
        labels = [str(label) for label in names]

        with atomic_write(view.new_file("confusion_matrix", name, ".csv")) as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["true class / predicted", *labels])
            for label, counts in zip(labels, matrix.tolist(), strict=True):
                writer.writerow([label, *counts])

        picture = view.new_file("confusion_matrix", name, ".png")
        title = f"{name} step {view.step}".strip()
        draw_matrix(picture, labels, matrix, title)
        view.tracker.image(logged_name(name, "confusion_matrix"), picture, view.step)


def draw_matrix(path: Path, labels: Sequence[str], matrix: Tensor, title: str) -> None:
    """Draw a confusion matrix as a PNG file, coloured by the fraction of each true class.

    Args:
        path: of the picture.
        labels: names of the classes.
        matrix: counts, [true classes, predicted classes].
        title: above the picture.
    """
    from matplotlib.figure import Figure  # late: 0.3 s

    # Of each true class. One without samples has fractions of 0.
    classes = len(labels)
    class_sizes = matrix.sum(1, keepdim=True).clamp(min=1)
    fractions = matrix.double() / class_sizes

    side = 3 + 0.35 * min(classes, MOST_LABELS)  # inches
    figure = Figure(figsize=(side, side), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(fractions.numpy(), cmap="Blues", vmin=0, vmax=1)
    axes.set(title=title, xlabel="predicted", ylabel="true")

    # Names and counts, where there is room for them. White on a dark field.
    if classes <= MOST_LABELS:
        axes.set_xticks(range(classes), labels, rotation=90)
        axes.set_yticks(range(classes), labels)
        for row, column in matrix.nonzero().tolist():
            color = "white" if fractions[row, column] > 0.5 else "black"
            count = str(int(matrix[row, column]))
            axes.text(column, row, count, ha="center", va="center", color=color, fontsize="x-small")
    with atomic_write(path, "wb") as file:
        figure.savefig(file, format="png")
