"""`optimizer.in_backward`: the last backward of a step updates each parameter once its gradient is complete.

Bit-identical to a separate step, without holding all gradients. The commit begins inside the backward: an error in it
leaves some parameters updated, so that only a checkpoint is safe. Settings that need all gradients before the first
update are refused (`config.excludes`).
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trainapp.data.batch import MicroBatch
from trainapp.draws.sample_draws import SampleDraws
from trainapp.errors import TrainingStopped, UserError
from trainapp.optim.optimizers import step_parameter
from trainapp.optim.precision import gradient_norm, norms_of, scale_gradients
from trainapp.training.engine import Engine, Totals, count_factor
from trainapp.training.phase import Phase, UpdateContext


class InBackward(Engine):
    """An engine that commits in the backward that completes the gradients."""

    def begin(self, context: UpdateContext) -> None:
        super().begin(context)
        self._applies = False
        self._norms: dict[int, Tensor] = {}  # of each gradient before the division by the count, by parameter's id
        self._groups: dict[int, dict[str, Any]] = {}  # the optimizer's groups, by parameter's id
        for group in self.state.optimizer.param_groups:
            for parameter in group["params"]:
                self._groups[id(parameter)] = group

    @property
    def reported_phase(self) -> Phase:
        """The phase as reports and plans name it; updates in the backward have phases of their own."""
        if not self._commit_has_begun:
            return self.phase
        if self.phase is Phase.BACKWARD:
            return Phase.BACKWARD_AFTER_UPDATES
        return Phase.UPDATE_IN_BACKWARD

    def backward(self, loss: Tensor, micro: MicroBatch) -> None:
        """Accumulate gradients; in the last micro-batch, apply each once it is complete.

        Raises UserError for a model that uses a parameter after its gradient is complete.
        """
        completes_gradients = micro.last and not self.only_compares
        updating: contextlib.AbstractContextManager[None]
        if completes_gradients:
            updating = self._updating()
        else:
            updating = contextlib.nullcontext()
        with updating:
            super().backward(loss, micro)

    @contextlib.contextmanager
    def _updating(self) -> Iterator[None]:
        """Update parameters in the backward that completes the gradients. All that an update needs is known by now."""
        totals = self.totals
        with self.at(Phase.CLIP):
            self.snapshot.record_step_writes()
            self._applies = self.nonfinite.allows_update(self.state.progress.step, totals.loss, 0.0, totals.count)
        if not self._applies:
            yield
            return

        # What a separate step would have set between the backward and the update.
        self.set_rates()
        self._dtype = self.norm_dtype(totals)
        self._factor = count_factor(totals.count, self.context.samples, self.state.device, self.factor_dtype)

        # The hooks update each parameter, until the backward has ended.
        with contextlib.ExitStack() as hooks:
            for parameter in self.parameters:
                if parameter.requires_grad:
                    hooks.enter_context(parameter.register_post_accumulate_grad_hook(self._update))
            try:
                yield
            except RuntimeError as error:
                if "modified by an inplace operation" not in str(error):
                    raise
                reason = str(error).splitlines()[0]
                raise UserError(
                    "optimizer.in_backward=true: the backward needs a parameter again after its gradient is "
                    "complete, such as one that is also used under detach(), or that shares memory with another "
                    f"({reason}); use optimizer.in_backward=false"
                ) from error

    def _update(self, parameter: Tensor) -> None:
        """Apply a parameter's update, note its gradient's norm, and free the gradient."""
        if id(parameter) in self._norms:
            raise TrainingStopped(
                f"step {self.context.step_number}: optimizer.in_backward=true, but the gradient of a parameter of "
                f"shape {list(parameter.shape)} came in several parts, as with torch's checkpoint(use_reentrant=True); "
                "use optimizer.in_backward=false"
            )
        self._commit_has_begun = True
        with self.at(Phase.UPDATE_IN_BACKWARD):
            assert parameter.grad is not None
            self._norms[id(parameter)] = norms_of([parameter.grad], self._dtype)[0]
            if id(parameter) in self._groups:
                if self._factor is not None:
                    scale_gradients([parameter.grad], self._factor)
                with SampleDraws.suspended():  # what an optimizer draws does not belong to samples
                    step_parameter(self.state.optimizer, parameter, self._groups[id(parameter)])
                # torch's fused kernels do not bump the version (2.13): a graph that saved the old values would not
                # notice.
                torch.autograd.graph.increment_version(parameter)
            parameter.grad = None

    def clip(self, totals: Totals) -> Tensor:
        """Update parameters that had gradients only in earlier micro-batches. Return the norm. Raises TrainingStopped
        for non-finite values: the parameters are affected too, so nothing is saved.
        """
        if not self._applies:
            return gradient_norm(self.gradients())
        with self.at(Phase.UPDATE_IN_BACKWARD):
            # The last backward has not reached these.
            for parameter in self.parameters:
                if parameter.grad is not None:
                    self._update(parameter)

            # The norm of all gradients is that of their norms. In the parameters' order: the sum rounds the same.
            norms = [self._norms[id(p)] for p in self.parameters if id(p) in self._norms]
            norm = torch.zeros(())
            if norms:
                norm = torch.linalg.vector_norm(torch.stack(norms))
            if self._factor is not None:
                norm = norm * self._factor
            self.nonfinite.allows_update(self.state.progress.step, totals.loss, norm, totals.count)
            return norm

    def commit(self, totals: Totals, norm: Tensor) -> bool:
        """Count the step: the parameters have been updated in the backward."""
        if self._applies:
            self.nonfinite.record_outcome(True, self.state.progress.step)
        else:
            self.skip_step()
            self._commit_has_begun = True  # until `finish_update`: progress changes
        self.is_first = False
        return self._applies
