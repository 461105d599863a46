"""`optimizer.in_backward`: the last backward of a step updates each parameter once its gradient is complete.

The same update as after the backward, bit for bit, without the memory of all gradients at once. The commit begins
inside the backward: an error in it leaves some parameters updated, so that only a checkpoint is safe. What needs all
gradients before the first update is refused (`config.excludes`).
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from trainapp.errors import TrainingStopped, UserError
from trainapp.optim.in_backward import ParameterSteps
from trainapp.optim.nonfinite import gradient_norm, norms_of, scale_gradients
from trainapp.train.phase import Phase
from trainapp.train.run import Run, Step
from trainapp.train.step import (
    accumulate_gradients,
    count_factor,
    count_step,
    leave_out,
    may_be_extreme,
    set_rates,
)
from trainapp.train.totals import Totals


def update_in_backward(run: Run, step: Step) -> tuple[Totals, Tensor, bool]:
    """Gradients, update and count of a step. Returns its totals, the gradient norm, and whether it was applied.

    Raises UserError for a model that uses a parameter after its gradient is complete.
    """
    note_accumulation(run)
    commit = _Commit(run, step)
    totals = accumulate_gradients(run, step, commit.in_last_backward)
    if commit.applies:
        norm = commit.finished(totals)
    else:
        norm = gradient_norm(run.meter.gradients())
        leave_out(run, step, totals)
    count_step(run, step, commit.applies, totals)
    return totals, norm, commit.applies


def note_accumulation(run: Run) -> None:
    """Note once that nothing is saved where gradients must be kept between micro-batches."""
    count = run.batches.accumulation(run.sizes.train.size, run.sizes.parts)
    if count > 1:
        run.tracker.warn_once(
            f"optimizer.in_backward=true with {count} micro-batches: gradients are kept from one to the next, so that "
            "little is saved",
            topic="in_backward",
        )


class _Commit:
    """The update of one step. norms: of each parameter's gradient before the division by the count, by id."""

    def __init__(self, run: Run, step: Step):
        self.run, self.step = run, step
        self.applies = False
        self._steps = ParameterSteps(run.state.optimizer)
        self._norms: dict[int, Tensor] = {}
        self._dtype: torch.dtype | None = None
        self._factor: Tensor | None = None

    @contextlib.contextmanager
    def in_last_backward(self, totals: Totals) -> Iterator[None]:
        """Use around the backward that completes the gradients. Everything that the update needs is known by now."""
        run, samples = self.run, self.step.samples
        run.attempt.phase = Phase.CLIP  # as after other backwards: what is read here is not read by the model
        run.snapshot.note_step()
        self.applies = run.nonfinite.allows_update(run.state.progress.step, totals.loss, 0.0, totals.count)
        if not self.applies:
            run.attempt.phase = Phase.BACKWARD
            yield
            return
        set_rates(run)
        self._dtype = torch.float64 if may_be_extreme(totals.count, samples) else run.state.precision.norm_dtype
        self._factor = count_factor(totals.count, samples, run.state.device)
        run.attempt.phase = Phase.BACKWARD
        with contextlib.ExitStack() as hooks:
            for parameter in run.meter.parameters:
                if parameter.requires_grad:
                    hooks.enter_context(parameter.register_post_accumulate_grad_hook(self._update))
            try:
                yield
            except RuntimeError as error:
                if "modified by an inplace operation" in str(error):
                    raise UserError(
                        "optimizer.in_backward=true: the backward needs a parameter again after its gradient is "
                        "complete, such as one that is also used under detach(), or parameters that are slices of one "
                        f"tensor ({str(error).splitlines()[0]}); use optimizer.in_backward=false"
                    ) from error
                raise
            if run.attempt.phase.is_torn:
                run.attempt.phase = Phase.UPDATE_IN_BACKWARD  # what follows is not read by the model, either

    def finished(self, totals: Totals) -> Tensor:
        """Update what had gradients in earlier micro-batches only. Returns the norm. Raises TrainingStopped for
        values that are not finite: the parameters have them, too, and reach no checkpoint.
        """
        run = self.run
        run.attempt.phase = Phase.UPDATE_IN_BACKWARD
        for parameter in run.meter.parameters:
            if parameter.grad is not None:
                self._update(parameter)
        norms = [self._norms[id(p)] for p in run.meter.parameters if id(p) in self._norms]
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        if self._factor is not None:
            norm = norm * self._factor
        progress = run.state.progress
        run.nonfinite.allows_update(progress.step, totals.loss, norm, totals.count)
        run.nonfinite.count(True, progress.step)
        return norm

    def _update(self, parameter: Tensor) -> None:
        run = self.run
        if id(parameter) in self._norms:
            raise TrainingStopped(
                f"step {self.step.number}: optimizer.in_backward=true, but the gradient of a parameter of shape "
                f"{list(parameter.shape)} came in several parts, as with torch's checkpoint(use_reentrant=True); use "
                "optimizer.in_backward=false"
            )
        phase, run.attempt.phase = run.attempt.phase, Phase.UPDATE_IN_BACKWARD
        assert parameter.grad is not None
        self._norms[id(parameter)] = norms_of([parameter.grad], self._dtype)[0]
        if self._steps.trains(parameter):
            if self._factor is not None:
                scale_gradients([parameter.grad], self._factor)
            self._steps.step(parameter)
            # Torch's fused kernels leave it as it is (2.13): a graph that has saved the old values would not notice.
            torch.autograd.graph.increment_version(parameter)
        parameter.grad = None
        if phase is not Phase.UPDATE_IN_BACKWARD:
            run.attempt.phase = Phase.BACKWARD_AFTER_UPDATES
