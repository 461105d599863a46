"""The start of a step, to return to: generators, parameters and buffers, and what else owns state."""

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from trainapp.checkpoint.stateful import Stateful
from trainapp.rng import Generators, preserved_rng
from trainapp.train.model_tensors import ModelTensors

_IS_TRAINING = operator.attrgetter("training")
_NEEDS_GRADIENT = operator.attrgetter("requires_grad")


class RestorePoint:
    """Everything that a forward may change: see ModelTensors and Stateful. Not the optimizer's state, which nothing
    before the commit touches.

    lost: parameters of the last `restore` that a forward had written without a copy of them to restore. The step cannot
    be undone in place then.
    """

    def __init__(self, model: nn.Module, device: torch.device, stateful: Stateful | None = None):
        self._stateful = stateful or Stateful(model=model)
        self._model = model
        self._generators = Generators(device)
        self._find_tensors()
        self._states: dict[str, Any] = {}
        self._modes: list[bool] = []
        self._frozen: list[bool] = []
        self.lost: list[str] = []
        self._is_complete = False  # whether the last `take` was not interrupted

    def _find_tensors(self) -> None:
        self._modules = [m for top in (self._model, *self._stateful.modules.values()) for m in top.modules()]
        self._parameters = [p for top in (self._model, *self._stateful.modules.values()) for p in top.parameters()]
        self.tensors = ModelTensors({"model": self._model, **self._stateful.modules})

    def take(self, unproven: bool = False, everything: bool = False) -> None:
        """Record the current state.

        unproven: whether memory may well run out: then also look for owners of state that are new, and for writes that
        leave no trace. everything: copy every parameter.
        """
        self.lost, self._is_complete = [], False
        self._generators.take()
        if unproven:
            self._find_owners()
        self.tensors.take(unproven, everything)
        self._states = self._stateful.take()
        self._modes = list(map(_IS_TRAINING, self._modules))
        self._frozen = list(map(_NEEDS_GRADIENT, self._parameters))
        self._is_complete = True

    def _find_owners(self) -> None:
        before = dict(self._stateful.modules)
        self._stateful.find()
        if self._stateful.modules != before:
            written = self.tensors.written
            self._find_tensors()
            self.tensors.written = written

    def restore(self) -> None:
        """Return to the last `take`."""
        self._generators.restore()
        self.lost = self.tensors.restore()
        self._stateful.restore(self._states)
        for module, training in zip(self._modules, self._modes, strict=True):
            module.training = training
        for parameter, needs_gradient in zip(self._parameters, self._frozen, strict=True):
            parameter.requires_grad_(needs_gradient)

    def restore_skipped(self) -> None:
        """The same for a step that is skipped for good, or a forward that will be repeated: generators and data have
        moved on.
        """
        self.lost = self.tensors.restore()
        self._stateful.restore(self._states, but=("data", "generator"))

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        """All generators as they were at the last `take`, for a forward that is repeated; after the block, as they were
        before it.
        """
        with preserved_rng(self._generators.device), self._stateful.preserved_generators():
            self._generators.restore()
            self._stateful.restore_generators(self._states)
            yield

    @contextlib.contextmanager
    def undone_on_error(self, unproven: bool) -> Iterator[None]:
        """Around work that calls `take` after each part of it: an error undoes the part that it interrupted.

        Global generators stay as they are.
        """
        self.take(unproven)
        try:
            yield
        except BaseException:
            if self._is_complete:  # otherwise `take` was interrupted, and the part before it is finished
                self.lost = self.tensors.restore()  # copies into memory that exists: allocates nothing of note
                self._stateful.restore(self._states)
            raise
