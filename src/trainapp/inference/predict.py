"""`mode=predict`: a row of plain values for each sample of a data set, in the order of the data."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainapp.data.batch import MicroBatch, tensors_in
from trainapp.data.eval_batches import EvalBatches
from trainapp.errors import UserError
from trainapp.hooks.callbacks import labels_of
from trainapp.hooks.predictions import dim_of_classes
from trainapp.inference.rows import Row, write_rows
from trainapp.inference.sequences import Sequences
from trainapp.losses.losses import (
    IGNORED,
    Output,
    attribute,
    call_model,
    class_dim,
    form_of,
    part_of,
    part_of_output,
    unchecked,
)
from trainapp.optim.precision import at_least_fp32
from trainapp.training.evaluation.half_batch import try_half
from trainapp.training.evaluation.own_rows import SharedRows
from trainapp.training.session import Session


def predict(session: Session) -> None:
    """Write the model's predictions for each sample of a data set, shared between the ranks. Collective.

    Raises UserError for a data set that does not exist, and for outputs that cannot be split into samples.
    """
    batches = _batches_of_split(session)
    output = getattr(session.task, "output", None)
    predictor = Predictor(unchecked(session.task), session.config.task, labels_of(batches.dataset), output)

    def fetch_batches(written: int) -> Iterator[MicroBatch]:
        return batches.from_sample(written, session.sizes.evaluation.size, session.ranks)

    is_checked = False  # whether outputs are known to have the samples first

    def compute_rows(micro: MicroBatch) -> list[Row]:
        nonlocal is_checked
        rows = predictor.rows(session.strategy.model, micro)
        if not is_checked:
            try_half(session, micro, functools.partial(predictor.rows, session.strategy.model))
            is_checked = True
        return rows

    def compute(micro: MicroBatch) -> None:
        with torch.inference_mode(), session.state.precision.autocast:
            predictor.rows(session.strategy.model, micro)

    sequences = Sequences(session, batches, compute)
    while True:
        try:
            write_rows(session, "predictions", fetch_batches, compute_rows, batches.is_stream, sequences)
            return
        except SharedRows as shared:
            sequences.limit_batches(shared)


def _batches_of_split(session: Session) -> EvalBatches:
    """Return the batches of `predict.split`. Raises UserError if it does not exist."""
    split = session.config.predict.split
    name = "" if split == "val" else split
    if name in session.eval_sets:
        return session.eval_sets[name]
    splits = [set_name or "val" for set_name in session.eval_sets]
    choices = dict.fromkeys([*splits, "train"])  # each once
    raise UserError(
        f"predict.split={split}: there is no such data; choose {', '.join(choices)}, or set other data with data=... "
        "or eval.NAME"
    )


class Predictor:
    """The conversion of a model's output for a batch into one row of plain values per sample.

    Args:
        task: the run's task, unchecked.
        setting: the task's name.
        class_names: of the data, if known.
        output: the part of what the model returns, see `losses.part_of_output`.
    """

    def __init__(self, task: Any, setting: str, class_names: Sequence[str], output: Output = None):
        self.task = task
        self.setting = setting
        self.class_names = class_names
        self._output_part = output
        self._class_dim = class_dim(task)

    def rows(self, model: nn.Module, micro: MicroBatch) -> list[Row]:
        """Return one row per sample. Raises UserError for outputs that cannot be split into samples."""
        output = self._output(model, micro.data)
        targets = part_of(micro.data, "targets")

        # Classes, if it looks like logits of them; otherwise the output itself.
        dim = None
        if isinstance(output, Tensor) and output.ndim and len(output) == micro.samples:
            dim = dim_of_classes(output, targets, self._class_dim)
        if dim is None:
            values = self._split_by_sample(output, micro.samples)
            return [{"prediction": value} for value in values]
        self._class_dim = dim  # a later batch may have as many positions as classes
        return self._classify(output, targets, dim)

    def _output(self, model: nn.Module, batch: Any) -> Any:
        """Return what the task's `predict` or `embed` returns, otherwise the model's output."""
        predict_batch = attribute(self.task, "predict") or attribute(self.task, "embed")
        if callable(predict_batch):
            return predict_batch(model, batch)
        if part_of(batch, "inputs") is None:
            raise self._error(f"it is not known which part of its batches, {form_of(batch)}, the model takes")
        try:
            returned = call_model(model, batch, self._output_part)
        except TypeError as error:
            if not _is_about_arguments(model, error):
                raise
            raise self._error(f"the batch's `inputs` are not all that the model takes: {error}") from error
        return part_of_output(returned, self._output_part)

    def _split_by_sample(self, output: Any, samples: int, path: str = "") -> list[Any]:
        """Return one value per sample.

        Args:
            output: a dict, or a list or tuple with tensors, contains several outputs; any other list has one value per
                sample.
            samples: the number of samples.
            path: position in the whole output, for messages.
        """
        # Several outputs: a column for each, with the values of all samples, then a row per sample.
        columns = []
        if isinstance(output, Mapping) and output:
            for name, part in output.items():
                columns.append(self._split_by_sample(part, samples, f"{path}[{name!r}]"))
            names = [str(name) for name in output]
            rows = zip(*columns, strict=True)
            return [dict(zip(names, row, strict=True)) for row in rows]
        if isinstance(output, (list, tuple)) and tensors_in(output):
            for index, part in enumerate(output):
                columns.append(self._split_by_sample(part, samples, f"{path}[{index}]"))
            return [list(row) for row in zip(*columns, strict=True)]

        # A single output.
        if isinstance(output, (Tensor, np.ndarray)) and output.ndim and len(output) == samples:
            return output.tolist()
        if isinstance(output, (list, tuple)) and len(output) == samples:
            return list(output)
        raise self._error(f"its output{path} for {samples} samples {_form_text(output)}")

    def _error(self, problem: str) -> UserError:
        return UserError(
            f"mode=predict with task={self.setting}: {problem}; give the task a method `predict(model, batch)` that "
            "returns tensors whose first dimension is the samples, lists with a plain value per sample, or a dict of "
            "these"
        )

    def _classify(self, logits: Tensor, targets: Any, dim: int) -> list[Row]:
        """Return the likeliest class, with its name, and its probability.

        Sequences end at the last counted position, since padding depends on the other samples of the batch; images keep
        their shape.

        Args:
            logits: with classes in dimension `dim`.
            targets: of the batch.
            dim: 1 or -1.
        """
        probabilities, classes = torch.softmax(at_least_fp32(logits), dim).max(dim)
        rows: list[Row] = []
        for prediction, probability in zip(classes.tolist(), probabilities.tolist(), strict=True):
            rows.append({"prediction": prediction, "probability": probability})

        has_padding = isinstance(targets, Tensor) and not targets.is_floating_point()  # unlike class probabilities
        if logits.ndim == 3 and has_padding:
            lengths = _counted_lengths(targets)
            return [_cut_row(row, length) for row, length in zip(rows, lengths, strict=True)]
        if logits.ndim == 2:
            for row in rows:
                if row["prediction"] < len(self.class_names):
                    row["prediction_name"] = str(self.class_names[row["prediction"]])
        return rows


def _is_about_arguments(model: nn.Module, error: TypeError) -> bool:
    """Return whether the model's forward was not entered: its arguments are others."""
    name = getattr(model.forward, "__qualname__", "forward")
    return str(error).startswith(f"{name}() ") and "argument" in str(error)


def _form_text(output: Any) -> str:
    """Return what an output is, for a message."""
    shape = getattr(output, "shape", None)
    if shape is not None:
        return f"has shape {list(shape)}"
    text = f"is a {type(output).__name__}"
    if isinstance(output, (list, tuple)):
        text += f" of {len(output)}"
    return text


def _counted_lengths(targets: Tensor) -> list[int]:
    """Return the length of each sequence up to its last counted target, of targets [B, T]."""
    is_counted = targets != IGNORED
    lengths = torch.arange(1, targets.shape[1] + 1, device=targets.device)  # up to each position
    return (is_counted * lengths).amax(-1).tolist()


def _cut_row(row: Row, length: int) -> Row:
    return {name: values[:length] for name, values in row.items()}
