"""The confusion matrix of an evaluation: `callbacks=confusion_matrix`. A metric that counts, a callback that draws."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from trainapp.errors import UserError
from trainapp.files import atomic_write
from trainapp.hooks.callbacks import View, labels_of
from trainapp.hooks.metrics import logged_name
from trainapp.hooks.predictions import ClassDim
from trainapp.validation import PositiveInt, Str

MOST_LABELS = 30  # beyond it a picture has no room for names and numbers


class Counts:
    """A metric: how often class i was taken for class j, [num_classes, num_classes].

    `update` takes logits [B, ..., num_classes] or [B, num_classes, ...] and targets [B, ...]; a target of `ignored`
    does not count. class_dim: of the logits, as for `FirstPredictions`.
    """

    def __init__(self, num_classes: PositiveInt, ignored: int = -100, class_dim: Literal[1, -1] | None = None):
        self.num_classes, self.ignored, self.class_dim = num_classes, ignored, ClassDim(class_dim)
        self._counts = torch.zeros(num_classes * num_classes, dtype=torch.int64)

    def to(self, device: torch.device) -> None:
        self._counts = self._counts.to(device)

    def update(self, logits: Tensor, targets: Tensor) -> None:
        dim = self.class_dim.of(logits, targets)
        if self.num_classes == 1 and logits.shape == (*targets.shape, 1):
            dim = -1
        if dim is None or logits.shape[dim] != self.num_classes:
            expected = f"[B, ..., {self.num_classes}] or [B, {self.num_classes}, ...]"
            raise ValueError(f"expected logits {expected} and integer targets [B, ...]")
        targets, predictions = targets.flatten(), logits.argmax(dim).flatten()
        counted = targets != self.ignored
        cells = torch.where(counted, targets * self.num_classes + predictions, 0)
        self._counts.index_add_(0, cells, counted.long())  # no shape depends on a value: nothing waits for the device

    def merge(self, other: "Counts") -> None:
        self._counts += other._counts

    def compute(self) -> Tensor:
        return self._counts.reshape(self.num_classes, self.num_classes).to("cpu", copy=True)

    def reset(self) -> None:
        self._counts.zero_()


class ConfusionMatrix:
    """After each evaluation: a table and a picture in confusion_matrix/, and the picture to the trackers.

    metric: the name of the metric that counts.
    """

    def __init__(self, metric: Str = "confusion_matrix"):
        self.metric = metric

    def after_evaluation(self, view: View, metrics: Mapping[str, Any]) -> None:
        """Raises UserError where the metric is not configured, or computes something else."""
        for name, data, matrix in view.computed(self.metric, metrics):
            if not isinstance(matrix, Tensor) or matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
                raise UserError(
                    f"callbacks.confusion_matrix.metric={self.metric}: no metric of this name computes a square "
                    "matrix; callbacks=confusion_matrix configures one, metrics.confusion_matrix"
                )
            if view.is_rank_zero:
                self._show(view, name, data, matrix)

    def _show(self, view: View, name: str, data: Any, matrix: Tensor) -> None:
        labels = [str(label) for label in labels_of(data)] or [str(number) for number in range(len(matrix))]
        write_table(view.new_file("confusion_matrix", name, ".csv"), labels, matrix.tolist())
        picture = view.new_file("confusion_matrix", name, ".png")
        draw(picture, labels, matrix, f"{name} step {view.step}".strip())
        view.tracker.image(logged_name(name, "confusion_matrix"), picture, view.step)


def write_table(path: Path, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """One row per true class."""
    with atomic_write(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["true class / predicted", *names])
        writer.writerows([name, *row] for name, row in zip(names, rows, strict=True))


def draw(path: Path, names: Sequence[str], matrix: Tensor, title: str) -> None:
    """As shares of each true class."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # late: 0.3 s
    from matplotlib.figure import Figure

    size = len(names)
    shares = matrix.double() / matrix.sum(1, keepdim=True).clamp(min=1)
    side = 3 + 0.35 * min(size, MOST_LABELS)
    figure = Figure(figsize=(side, side), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
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
        canvas.print_png(file)
