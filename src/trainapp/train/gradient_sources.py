"""Where the gradients of a step come from: the micro-batches, and what is computed for each of them.

`accumulate_gradients` does the same for all of them: forward and backward of each micro-batch. What differs between a
loss that is a sum over samples and one that compares them (`cached_gradients`) is here.
"""

import contextlib
from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from trainapp.data.batch import MicroBatch
from trainapp.losses.losses import Task
from trainapp.train.run import Run, Step
from trainapp.train.totals import Totals


class GradientSource(Protocol):
    """weight: multiplies the loss of a micro-batch in its backward. totals: before the first micro-batch. adds_up:
    whether each micro-batch adds to them.
    """

    weight: Tensor
    totals: Totals
    adds_up: bool

    @property
    def task(self) -> Task:
        """Computed for each micro-batch, in the forward of the strategy."""
        ...

    def micro_batches(self) -> Iterator[MicroBatch]:
        """The step's micro-batches, in order."""
        ...

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss, multiplied by fp16's loss scale where it is not yet."""
        ...

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        """Around all of the step's forwards and backwards."""
        ...


class SumOverSamples:
    """The usual loss: the gradients of a step are the sum of those of its micro-batches."""

    adds_up = True

    def __init__(self, run: Run, step: Step):
        self._run, self.task, self.totals = run, run.training_task, Totals()
        # The true count is known only at the end (padding); `clip_gradients` corrects what was scaled by samples.
        self.weight = run.meter.weight(step.samples)

    def micro_batches(self) -> Iterator[MicroBatch]:
        return fetched_and_cut(self._run)

    def scaled(self, loss: Tensor) -> Tensor:
        return self._run.state.precision.scaler.scale(loss)

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def fetched_and_cut(run: Run) -> Iterator[MicroBatch]:
    """The coming step's micro-batches from the data."""
    sizes = run.sizes
    micro_batches = run.batches.micro_batches(run.state.progress, sizes.train.size, sizes.parts)
    for fetched in run.meter.timed(micro_batches):
        yield from sizes.train.cut(fetched, run.ranks)
