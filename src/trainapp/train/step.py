"""The parts of an optimizer step: gradients of all micro-batches, clipping, the update."""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from trainapp import torch_direct
from trainapp.data.batch import MicroBatch
from trainapp.errors import TrainingStopped
from trainapp.losses.losses import evaluate_metrics, has_embeddings
from trainapp.models.inspect import has_batchnorm, instead_of_batchnorm
from trainapp.optim.nonfinite import gradient_norm, scale_gradients
from trainapp.parallel.strategy import locals_of
from trainapp.snapshot import MOVED_ON
from trainapp.train.allocations import require_all_allocated
from trainapp.train.cached_gradients import CachedGradients
from trainapp.train.gradient_check import checked_gradients, gradients_of, require_same_gradients
from trainapp.train.gradient_sources import GradientSource, SumOverSamples
from trainapp.train.phase import Phase
from trainapp.train.run import Run, Step
from trainapp.train.totals import Number, Totals
from trainapp.train.watching import watch_micro_batch

Around = Callable[[Totals], contextlib.AbstractContextManager[None]]


def _alone(totals: Totals) -> contextlib.AbstractContextManager[None]:
    """Nothing around a backward."""
    return contextlib.nullcontext()


def accumulate_gradients(run: Run, step: Step, around_last: Around = _alone) -> Totals:
    """The gradients of the step's loss, summed over its micro-batches. Returns the step's totals over all ranks.

    around_last: for the backward that completes them; given the totals of this rank.
    """
    source = _source(run, step)
    totals = source.totals
    with source.accumulating():
        for number, micro in enumerate(source.micro_batches()):
            samples = micro.samples * step.update.every  # that are trained for each of its own
            counting = run.utilisation.counting(step.update.name, samples, micro.real)
            watching = watch_micro_batch(run, run.sizes.train, micro.data, micro.samples if number else None)
            with run.strategy.micro_batch(micro.last), watching, counting:
                totals = backward(run, source, micro, totals, step.is_logged, around_last)
            if run.sizes.train.is_unproven:
                require_all_allocated(run, run.sizes.train, run.ranks)
            _enter(run, Phase.DATA)
    _enter(run, Phase.GRADIENTS)
    run.strategy.finish_accumulation()
    return totals.over(run.ranks)


def _source(run: Run, step: Step) -> GradientSource:
    return CachedGradients(run, step) if has_embeddings(run.training_task) else SumOverSamples(run, step)


def _enter(run: Run, phase: Phase) -> None:
    """A torn step stays torn until it is committed."""
    if not run.attempt.phase.is_torn:
        run.attempt.phase = phase


def backward(
    run: Run, source: GradientSource, micro: MicroBatch, totals: Totals, is_logged: bool, around_last: Around
) -> Totals:
    """Forward, loss and backward of one micro-batch: gradients accumulate in `p.grad`. Returns the totals with it.

    A dummy micro-batch (`real=False`) keeps this rank in step with the others and adds nothing.
    """
    precision = run.state.precision
    run.attempt.phase = Phase.FORWARD
    before = gradients_of(run.meter.parameters) if run.sizes.train.is_unproven else None
    with precision.autocast, run.offload.forward():
        loss, count, metrics = run.strategy.compute(source.task, micro.data)
    if before is not None:
        require_same_gradients(run.meter.parameters, before)
    run.attempt.phase = Phase.METRIC
    finished = evaluate_metrics(metrics, run.metrics.names) if is_logged else {}
    del metrics  # functions among them hold what they compute from, such as all logits: not through the backward
    totals = totals.plus(loss, count, finished, real=micro.real and source.adds_up)
    run.attempt.phase = Phase.BACKWARD
    is_first = not run.meter.samples and micro.last
    checked = checked_gradients(run.state.model, loss) if is_first else contextlib.nullcontext()
    with checked, around_last(totals) if micro.last else contextlib.nullcontext():
        torch_direct.backward(source.scaled(loss), source.weight if micro.real else source.weight * 0)
    return totals


def clip_gradients(run: Run, step: Step, totals: Totals) -> Tensor:
    """Unscale, divide by the true count, clip to `train.grad_clip`. Returns the gradient norm before clipping."""
    run.attempt.phase = Phase.UNSCALE
    run.state.precision.unscale(run.state.optimizer, run.strategy.all_reduce_found_inf)
    run.attempt.phase = Phase.CLIP
    gradients = locals_of(run.meter.gradients())
    dtype = torch.float64 if may_be_extreme(totals.count, step.samples) else run.state.precision.norm_dtype
    norm = run.strategy.grad_norm(gradient_norm(gradients, dtype))
    factor = count_factor(totals.count, step.samples, norm.device)
    if factor is not None:
        norm = norm * factor
    clipping = clip_factor(norm, run.config.train.grad_clip)
    if clipping is not None:
        factor = clipping if factor is None else clipping * factor
    if factor is not None and gradients:  # both in one pass over the gradients
        scale_gradients(gradients, factor.to(norm.device))
    return norm


def may_be_extreme(count: Number, samples: int) -> bool:
    """Whether gradients that are divided by `samples` instead of `count` may have squares beyond the range of fp32."""
    if isinstance(count, Tensor) and count.device.type != "cpu":  # reading the value would wait for the device
        return count.is_floating_point() and count.device.type != "mps"  # which has no fp64
    return not 1e-6 * samples <= float(count) <= 1e6 * samples


def count_factor(count: Number, samples: int, device: torch.device) -> Tensor | None:
    """The factor from gradients divided by `samples` to gradients divided by `count`; None if the two are equal, and
    for a count of 0: `update` leaves such a step out.
    """
    if not isinstance(count, Tensor) and count in (0, samples):
        return None
    ratio = samples / count
    if isinstance(ratio, Tensor) or device.type == "cpu":
        return torch.as_tensor(ratio, device=device)
    return torch.full((), ratio, device=device)  # `as_tensor` would copy it from the host and wait for the device


def clip_factor(norm: Tensor, limit: float | None) -> Tensor | None:
    """The factor that clips gradients of this norm to `limit`; None where they need no clipping."""
    if limit is None:
        return None
    # Reading a number is free only on the CPU; there it saves four tiny operations, or a pass over all gradients.
    if norm.device.type == "cpu" and norm.item() <= limit:
        return None
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def update(run: Run, step: Step, totals: Totals, norm: Tensor) -> bool:
    """Update the parameters and count the step; nothing else does. False if the step is skipped: for a value that is
    not finite, or because nothing in it counts.
    """
    state, progress = run.state, run.state.progress
    run.ranks.check_peers()  # the last moment at which a step can be aborted
    run.snapshot.note_step()
    applied = run.nonfinite.allows_update(progress.step, totals.loss, norm, totals.count, step.update.name)
    if applied:
        set_rates(run)
        run.attempt.phase = Phase.COMMIT
        applied = state.precision.step(state.optimizer)
        run.nonfinite.count(applied, progress.step, update=step.update.name)
    else:
        leave_out(run, step, totals)
    count_step(run, step, applied, totals)
    return applied


def set_rates(run: Run) -> None:
    """The learning rates of the coming update."""
    run.schedule.set_rates(run.state.optimizer.param_groups, run.state.progress.step)


def count_step(run: Run, step: Step, applied: bool, totals: Totals) -> None:
    """The update is committed: what follows is the next one's, or the next step's."""
    progress = run.state.progress
    if progress.finish_update(applied, run.state.every):
        run.meter.count(step.samples, totals.count)
        run.batches.advance(progress)
    run.attempt.phase = Phase.COMMITTED


def leave_out(run: Run, step: Step, totals: Totals) -> None:
    """Undo what the forward of a skipped step has written. Raises TrainingStopped where it cannot."""
    run.state.precision.reset_scaler()
    run.snapshot.restore(but=MOVED_ON)  # BatchNorm's statistics have seen non-finite values
    require_undone(run, step)
    if totals.count == 0:
        run.tracker.warn_once(
            f"step {step.number}: the loss's count is 0 over the whole step, so there is no update; such steps "
            "count as skipped, and their samples as trained",
            topic="nothing counts",
        )


def require_undone(run: Run, step: Step) -> None:
    """Raises TrainingStopped where the skipped step's forward has written parameters of which there was no copy."""
    lost = sorted({name for names in run.ranks.all_gather_object(run.snapshot.lost) for name in names})
    if lost:
        raise TrainingStopped(
            f"step {step.number}: train.nonfinite=skip cannot leave this step out, because its forward is the first to "
            f"write parameters in place ({', '.join(lost[:5])}), of which there is no copy yet; the last checkpoint is "
            f"{run.checkpointer.newest_name() or 'none'}. Make them buffers, which are always copied"
        )


def note_batchnorm(run: Run, step: Step) -> None:
    """Note once that BatchNorm depends on the micro-batch."""
    size = max(run.sizes.train.in_force.values(), default=run.sizes.train.size)
    if run.batches.accumulation(size, run.sizes.parts) > 1 and has_batchnorm(run.state.model):
        run.tracker.warn_once(
            f"step {step.number}: the model has BatchNorm, whose statistics are those of the micro-batch ({size}), not "
            f"of the global batch; {instead_of_batchnorm(run.config.model)} does not depend on it",
            topic="batchnorm",
        )


def drop_gradients(run: Run) -> None:
    """As `optimizer.zero_grad(set_to_none=True)`, without the 25 microseconds of its profiler record."""
    for parameter in run.meter.parameters:
        parameter.grad = None
