"""What a model returns for a batch, as one row of plain values per sample."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.data.batch import MicroBatch
from trainapp.errors import UserError
from trainapp.hooks.callbacks import labels_of
from trainapp.hooks.predictions import ClassDim
from trainapp.inference.parts import WHAT_TO_DO, by_sample, part_of, require_leading
from trainapp.train.losses import IGNORED, class_dim, is_built_in
from trainapp.train.model_inputs import beside_inputs
from trainapp.train.task_attributes import attribute

WHICH_CLASSES = (
    "give the task a method `predict(model, batch)` that returns the classes, logits.argmax(1) or logits.argmax(-1)"
)


@dataclass
class Predictor:
    """Rows for a task's batches.

    task: the run's, unchecked; setting: its name. names: of the classes, if known.
    """

    task: Any
    setting: str
    names: Sequence[str]
    is_checked: bool = False

    def __post_init__(self) -> None:
        self._class_dim = ClassDim(class_dim(self.task), WHICH_CLASSES)

    def rows(self, model: nn.Module, micro: MicroBatch) -> list[dict[str, Any]]:
        """One per sample. Raises UserError for outputs that are not of single samples."""
        output = self._output(model, micro.data)
        self._require_per_sample(model, output, micro)
        targets = _targets(micro.data)
        dim = self._dim_of_classes(output, targets)
        if dim is not None:
            is_sequence = output.ndim == 3  # an image keeps its shape, whatever counts
            rows = _classified(output.movedim(dim, -1), targets if is_sequence else None)
            return [self._named(row) for row in rows]
        plain = by_sample(output, self._is_own)
        return [{"prediction": part_of(plain, number)} for number in range(micro.samples)]

    @property
    def _is_own(self) -> bool:
        return callable(attribute(self.task, "predict"))

    def _output(self, model: nn.Module, batch: Any) -> Any:
        if self._is_own:
            return attribute(self.task, "predict")(model, batch)
        inputs, others = self._inputs(batch), beside_inputs(model, batch)
        try:
            inspect.signature(model.forward).bind(inputs, **others)
        except TypeError as error:
            raise UserError(
                f"mode=predict with task={self.setting}: {type(model).__name__} cannot be called with a batch's inputs "
                f"({error}); {WHAT_TO_DO}"
            ) from None
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
        raise UserError(
            f"mode=predict with task={self.setting}: which part of its batches ({kind}) the model takes is not known; "
            f"{WHAT_TO_DO}"
        )

    def _require_per_sample(self, model: nn.Module, output: Any, micro: MicroBatch) -> None:
        """The first dimension follows the number of samples. Once also by half of a batch: equal numbers may be chance.
        Raises UserError.
        """
        require_leading(output, micro.samples, self.setting, self._is_own)
        if self.is_checked or micro.samples < 2:
            return
        half = micro.samples // 2
        require_leading(self._output(model, micro.piece(0, half)), half, self.setting, self._is_own)
        self.is_checked = True

    def _dim_of_classes(self, output: Any, targets: Any) -> int | None:
        """None for an output without logits of classes. Raises UserError where its shape may be read both ways."""
        if not (isinstance(output, Tensor) and output.is_floating_point() and output.ndim > 1):
            return None
        if not isinstance(targets, Tensor) or (is_built_in(self.task) and targets.is_floating_point()):
            dim = class_dim(self.task)
            return None if dim is None or output.shape[dim] == 1 else dim
        try:
            return self._class_dim.of(output, targets)
        except ValueError as error:
            raise UserError(f"mode=predict with task={self.setting}: {error}") from None

    def _named(self, row: dict[str, Any]) -> dict[str, Any]:
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


def _classified(logits: Tensor, targets: Any) -> list[dict[str, Any]]:
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
