"""`mode=predict`: what the model says of each sample of a data set, as JSON lines in the order of the data."""

import functools
import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainapp.data.batch import MicroBatch, tensors_in
from trainapp.data.source import EvalBatches
from trainapp.errors import UserError
from trainapp.hooks.callbacks import labels_of
from trainapp.hooks.predictions import ClassDim
from trainapp.inference.rows import Row, begin, opened, write_rows
from trainapp.losses.inputs import beside_inputs
from trainapp.losses.losses import IGNORED, attribute, class_dim, is_built_in, unchecked
from trainapp.training.session import Session

log = logging.getLogger(__name__)
PER_SAMPLE = (
    "give the task a method `predict(model, batch)` that returns tensors whose first dimension is the samples, lists "
    "with a plain value per sample, or a dict of these"
)


def predict(session: Session) -> None:
    """Write the predictions for a data set, of which each rank has a share, from where an error or an earlier process
    has left them. Collective.

    Raises UserError for a data set that does not exist, and for outputs that are not of single samples.
    """
    begin(session)
    batches, ranks = _chosen(session), session.ranks
    predictor = Predictor(unchecked(session.task), session.config.task, class_names(getattr(batches, "dataset", None)))
    ranks.enable_votes(False)  # each rank recovers alone, as its forwards are its own
    # Of a stream each rank has every world-th sample.
    first, stride = (ranks.rank, ranks.world) if batches.is_stream else (batches.start, 1)
    with opened(session, "predictions.jsonl", lambda number: first + stride * number) as rows:
        if rows.done:
            log.info("predictions: %d samples are in %s; continuing there", rows.done, rows.partial)
        fetched = batches.from_sample(rows.done, session.sizes.evaluation.size, ranks)
        if write_rows(session, rows, fetched, functools.partial(predictor.rows, session.strategy.model)):
            log.info("predictions of %d samples: %s", rows.publish(), rows.path)


def _chosen(session: Session) -> EvalBatches:
    name = "" if session.config.predict.split == "val" else session.config.predict.split
    if name in session.eval_sets:
        return session.eval_sets[name]
    known = [name or "val" for name in session.eval_sets] + ["train"]
    raise UserError(
        f"predict.split={session.config.predict.split}: there is no such data; choose "
        f"{', '.join(dict.fromkeys(known))}, or name other data by data=... or eval.NAME"
    )


class Predictor:
    """What a model returns for a batch, as one row of plain values per sample.

    task: the run's, unchecked; setting: its name. names: of the classes, if known.
    """

    def __init__(self, task: Any, setting: str, names: Sequence[str]):
        self.task, self.setting, self.names = task, setting, names
        self._class_dim = ClassDim(class_dim(task), "return classes from a method `predict(model, batch)` of the task")

    def rows(self, model: nn.Module, micro: MicroBatch) -> list[Row]:
        """One per sample. Raises UserError for outputs that are not of single samples."""
        output, targets = self._output(model, micro.data), _targets(micro.data)
        dim = self._dim_of_classes(output, targets, micro.samples)
        if dim is None:
            return [{"prediction": value} for value in self._by_sample(output, micro.samples)]
        is_sequence = output.ndim == 3  # an image keeps its shape, whatever counts
        rows = _classified(output.movedim(dim, -1), targets if is_sequence else None)
        return [self._named(row) for row in rows]

    def _output(self, model: nn.Module, batch: Any) -> Any:
        own = attribute(self.task, "predict")
        if callable(own):
            return own(model, batch)
        inputs, others = self._inputs(batch), beside_inputs(model, batch)
        try:
            inspect.signature(model.forward).bind(inputs, **others)
        except TypeError as error:
            what = f"{type(model).__name__} cannot be called with a batch's inputs ({error})"
            raise self._refused(what) from None
        output = model(inputs, **others)
        return getattr(output, "logits", output)

    def _inputs(self, batch: Any) -> Any:
        if isinstance(batch, Mapping) and "inputs" in batch:
            return batch["inputs"]
        if not isinstance(batch, Mapping) and hasattr(batch, "inputs"):
            return batch.inputs
        if isinstance(batch, Tensor):
            return batch
        if isinstance(batch, (tuple, list)) and len(batch) in (1, 2):
            return batch[0]
        kind = f"keys {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        raise self._refused(f"which part of its batches ({kind}) the model takes is not known")

    def _by_sample(self, output: Any, samples: int, place: str = "") -> list[Any]:
        """A value per sample. A dict, or a list or tuple with tensors, holds several outputs; any other list has one
        value per sample. place: in the whole output, for messages.
        """
        if isinstance(output, Mapping) and output:
            values = [self._by_sample(value, samples, f"{place}[{name!r}]") for name, value in output.items()]
            return [dict(zip(map(str, output), row, strict=True)) for row in zip(*values, strict=True)]
        if isinstance(output, (list, tuple)) and tensors_in(output):
            values = [self._by_sample(value, samples, f"{place}[{number}]") for number, value in enumerate(output)]
            return list(map(list, zip(*values, strict=True)))
        if isinstance(output, (Tensor, np.ndarray)) and output.ndim and len(output) == samples:
            return output.tolist()
        if isinstance(output, (list, tuple)) and len(output) == samples:
            return list(output)
        shape = getattr(output, "shape", None)
        size = f" of {len(output)}" if isinstance(output, (list, tuple)) else ""
        what = f"is a {type(output).__name__}{size}" if shape is None else f"has shape {list(shape)}"
        raise self._refused(f"its output{place} for {samples} samples {what}")

    def _refused(self, what: str) -> UserError:
        return UserError(f"mode=predict with task={self.setting}: {what}; {PER_SAMPLE}")

    def _dim_of_classes(self, output: Any, targets: Any, samples: int) -> int | None:
        """None for an output without logits of classes. Raises UserError where its shape may be read both ways."""
        if not (isinstance(output, Tensor) and output.is_floating_point() and output.ndim > 1):
            return None
        if len(output) != samples:
            return None
        if not isinstance(targets, Tensor) or (is_built_in(self.task) and targets.is_floating_point()):
            dim = class_dim(self.task)
            return None if dim is None or output.shape[dim] == 1 else dim
        try:
            return self._class_dim.of(output, targets)
        except ValueError as error:
            raise UserError(f"mode=predict with task={self.setting}: {error}") from None

    def _named(self, row: Row) -> Row:
        number = row["prediction"]
        is_named = isinstance(number, int) and number < len(self.names)
        return row | ({"prediction_name": str(self.names[number])} if is_named else {})


def class_names(data: Any) -> Sequence[str]:
    """Those of a data set, as `class_names` or in its `spec`; else empty."""
    return labels_of(data) or list(getattr(data, "spec", {}).get("classes") or ())


def _targets(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return batch.get("targets")
    if isinstance(batch, (tuple, list)) and not hasattr(batch, "targets"):
        return batch[1] if len(batch) == 2 else None
    return getattr(batch, "targets", None)


def _classified(logits: Tensor, targets: Any) -> list[Row]:
    """The likeliest class and its probability; of sequences, those up to the last position that counts: how far a batch
    is padded depends on its other samples.
    """
    probability, prediction = (found.cpu() for found in torch.softmax(logits.float(), -1).max(-1))
    ends: list[int | None] = [None] * len(logits)
    if isinstance(targets, Tensor) and not targets.is_floating_point():  # shares of classes have no padding
        counts = targets != IGNORED
        places = torch.arange(1, counts.shape[1] + 1, device=counts.device)
        ends = (counts * places).amax(-1).tolist()
    rows = zip(prediction, probability, ends, strict=True)
    return [
        {"prediction": p[:end].tolist(), "probability": q[:end].tolist()}
        if p.ndim
        else {"prediction": p.item(), "probability": q.item()}
        for p, q, end in rows
    ]
