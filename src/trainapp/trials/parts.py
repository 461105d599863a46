"""Compares a task's results for a batch with those for its parts, in one mode and in one precision.

A batch of four samples is split in up to four ways (`trials.samples` makes the batches), each of which shows what the
others may hide:

1. in halves whose tensors, joined, are the batch: for sums, the results of the halves add up;
2. into the first sample and the other three, and into the first three and the last: shares of a batch that are rounded,
   and weights that are alike in both halves, do not add up then;
3. as training makes micro-batches, of samples that are padded differently together than in halves, if there are any.

Most tasks add up at once, which takes seven calls, or nine. Only what does not is looked into, with more calls: whether
a difference means anything (`_obstacle`), and by how much rounding may explain it (`Rounding`).
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from trainapp.draws.record import GLOBALS, ITERATORS, DrawRecord, TopicKind
from trainapp.draws.sample_draws import SampleDraws
from trainapp.errors import summary_of
from trainapp.losses.losses import is_built_in
from trainapp.trials import messages
from trainapp.trials.comparison import MAX_FP64_EPSILON, MAX_FP64_ROUNDING, Comparison, Rounding, SplitResults
from trainapp.trials.messages import AddsUp, DependsOnSplit, Finding, Inexactness, IsNoMean, Refused
from trainapp.trials.modes import Mode
from trainapp.trials.obstacles import Obstacle, Reason
from trainapp.trials.operations import Observer, RandomRounding, Summands
from trainapp.trials.probe import Sums, TaskProbe
from trainapp.trials.samples import HalvedBatch, TrialBatch, UnequalParts
from trainapp.units import listed, plural

SHUFFLED = TopicKind.DRAWS.topic("randperm.generator_out")  # a permutation of the batch: it mixes samples
_SAY_NOTHING_OF_DRAWS = {SHUFFLED, GLOBALS, ITERATORS}  # topics of a record
# Computations with other rounding. Each decides by chance which of two equal numbers is the larger one, so that all of
# them decide alike, and hide that an argmax may flip, once in 128 times.
REPEATS = 8
REPRODUCIBLE = 1e-5  # the most by which two calls with equal numbers may differ, relative: atomic additions in fp32


class TaskFindings(NamedTuple):
    """What the comparisons of a batch with its parts say of a task."""

    loss: Finding
    # Of the batch and its halves as training makes them; None if there is nothing to say, or if `loss` says it.
    padding: Finding | None = None
    divided_metrics: str = ""  # the warning about metrics of samples that are divided by a count of something else


def compare_with_parts(
    probe: TaskProbe, mode: Mode, draw_record: DrawRecord, looks_for_divided_metrics: bool = True
) -> TaskFindings:
    """Compare a task's results for a batch with those for its parts. Raises errors of the task and the model.

    Args:
        probe: calls the task.
        mode: how it is called.
        draw_record: of what forwards draw. Draws of Python's and NumPy's generators are noted in it.
        looks_for_divided_metrics: whether to look for metrics of samples that are divided by a count of something else.
    """
    # The whole batch and its halves: every comparison below needs these.
    call = ModeCalls(probe, mode, draw_record)
    samples = probe.samples
    halves = SplitResults(call(samples.whole), call(samples.first_half), call(samples.second_half))
    if any(sums.drew_outside_torch for sums in halves):
        draw_record.depends["python"] = (
            "the forward draws from Python's or NumPy's generator: the numbers depend on how the batch is split"
        )

    loss = _compare_halves(call, halves)
    if isinstance(loss, Refused):
        return TaskFindings(loss)
    divided_metrics = ""
    if looks_for_divided_metrics and not isinstance(loss, Obstacle):
        divided_metrics = _divided_metrics(call, halves)

    padding = _compare_as_trained(call, halves, loss)
    if samples.is_joined:
        return TaskFindings(loss, padding, divided_metrics)

    # Of a batch that is not its halves joined, the comparison as trained says more, if it could be made.
    if padding is not None and not isinstance(padding, Obstacle):
        return TaskFindings(padding, None, divided_metrics)
    if not isinstance(loss, Obstacle):
        obstacle = padding or Obstacle(Reason.NEVER_JOINED)
        # That a sum over embeddings is no mean says nothing about them.
        loss = obstacle if mode.compares_embeddings else IsNoMean(samples.number, obstacle)
    return TaskFindings(loss, None, divided_metrics)


def draws_alike(mode: Mode, draw_record: DrawRecord) -> bool:
    """Return whether all samples draw the same in a mode's calls, as the shapes do not tell whose draws are whose."""
    layouts = draw_record.layouts.get(mode.work)
    if layouts is None:
        return True
    return any(layout.rows > 1 or layout.varies for layout in layouts.values())


class ModeCalls:
    """Calls of a task in one mode with a probe's batches, with draws as in training."""

    def __init__(self, probe: TaskProbe, mode: Mode, draw_record: DrawRecord):
        self.probe = probe
        self.mode = mode
        self._layouts = draw_record.layouts.get(mode.work)
        self._record = DrawRecord()
        self._draws_alike = draws_alike(mode, draw_record)
        if self._layouts is not None:
            self._record.layouts[mode.work] = self._layouts

    def __call__(
        self,
        batch: TrialBatch,
        dispatch_mode: Observer | RandomRounding | None = None,
        backward: Callable[[Tensor], None] | None = None,
    ) -> Sums:
        sample_draws = SampleDraws((0,), batch.positions, self._record, self.mode.work, alike=self._draws_alike)
        return self.probe(batch, self.mode.training, sample_draws, dispatch_mode, backward)

    @property
    def knows_draws(self) -> bool:
        """Whether it is known which draws are whose. Ask after a call."""
        return self._layouts is not None and self._record.draws and self._record.depends.keys() <= _SAY_NOTHING_OF_DRAWS

    def with_other_rounding(self, batch: TrialBatch) -> list[Sums]:
        """Return the results for a batch, computed with other rounding."""
        device = self.probe.device
        return [self(batch, RandomRounding(device, seed)) for seed in range(REPEATS)]


# --- 1. in halves


def _compare_halves(call: ModeCalls, halves: SplitResults) -> Finding:
    """Compare a batch with its halves, and then with unequal parts.

    Args:
        call: calls the task.
        halves: the results of the whole batch and its halves.
    """
    samples = call.probe.samples
    has_chance = samples.as_trained.obstacle is not None
    comparison = Comparison(samples.number, halves, samples.is_joined, has_chance)

    # Most tasks add up to the last bits of fp64. Then only unequal parts are left to try.
    if comparison.defect() is None:
        refused = _refused_for_small_difference(call, comparison)
        if refused is not None:
            return refused
        unequal = _compare_unequal_parts(call, halves.whole)
        if isinstance(unequal, Refused):
            return unequal
        return replace(_adds_up(comparison, without_unequal_parts=unequal), inexactness=_inexactness(call, comparison))

    # It does not add up: look whether that means anything, and how far rounding may explain it.
    observer = Observer()
    repeated = call(samples.whole, observer)
    reordered = {}
    if observer.epsilon > MAX_FP64_EPSILON:
        reordered = {order: call(batch) for order, batch in samples.reordered.items()}
    obstacle = _obstacle(call, [*halves, *reordered.values()], repeated, observer)
    if obstacle is not None:
        return obstacle

    rounding = Rounding(observer.epsilon_of_loss, observer.epsilon, reordered)
    comparison = replace(comparison, rounding=rounding, computes_gradients=observer.computes_gradients)
    if comparison.failing_metrics():
        rerounded = [sums.metrics for sums in call.with_other_rounding(samples.whole)]
        comparison = replace(comparison, rounding=replace(rounding, rerounded_metrics=rerounded))
    refused = _refused_if_defective(comparison, call.mode)
    return refused or replace(_adds_up(comparison), inexactness=_inexactness(call, comparison))


def _refused_for_small_difference(call: ModeCalls, comparison: Comparison) -> Refused | None:
    """Return the refusal of a task whose loss is so small that its parts seem to add up; None if rounding explains by
    how much they do not, or if the difference says nothing.
    """
    if not comparison.is_joined or not comparison.is_small_difference:
        return None
    samples = call.probe.samples
    measured, obstacle = _with_measured_rounding(call, samples.whole, comparison, comparison.results)
    if obstacle is not None:
        return None
    reordered = {order: call(batch) for order, batch in samples.reordered.items()}
    measured = replace(measured, rounding=replace(measured.rounding, reordered=reordered))
    return _refused_if_defective(measured, call.mode)


def _adds_up(
    comparison: Comparison, are_collated_apart: bool = False, without_unequal_parts: Obstacle | None = None
) -> AddsUp:
    """Return the finding about results without a defect."""
    whole = comparison.results.whole
    return AddsUp(
        number=comparison.number,
        has_metrics=bool(whole.metrics),
        metrics_error=whole.metrics_error,
        skipped_metrics=tuple(comparison.skipped_metrics()),
        are_collated_apart=are_collated_apart,
        without_unequal_parts=without_unequal_parts,
    )


def _inexactness(call: ModeCalls, comparison: Comparison) -> Inexactness | None:
    """Return how exactly a loss adds up in fp64 that does so to less than fp64's rounding; None for any other."""
    deviation = comparison.loss_deviation
    in_fp64 = comparison.is_joined and call.probe.dtype is torch.float64
    if not in_fp64 or deviation <= MAX_FP64_ROUNDING:
        return None
    observer = Observer()
    call(call.probe.samples.whole, observer)
    # A part that computes in fp32, or a loss that is cast to it, as its digits tell.
    loss_is_fp32 = all(torch.tensor(loss, dtype=torch.float32).item() == loss for loss in comparison.losses)
    return Inexactness(deviation, is_rounding=loss_is_fp32 or observer.epsilon_of_arrays > MAX_FP64_EPSILON)


def _refused_if_defective(comparison: Comparison, mode: Mode) -> Refused | None:
    """Return the refusal of a task whose results do not add up; None if they do."""
    defect = comparison.defect()
    if defect is None:
        return None
    return Refused(messages.refusal(defect, comparison, mode))


# --- 2. into unequal parts


def _compare_unequal_parts(call: ModeCalls, whole: Sums) -> Refused | Obstacle | None:
    """Compare one sample and the others with all of them, where equal halves add up: weights and rounded shares may be
    alike in both halves. Return None if these add up, too.
    """
    samples = call.probe.samples
    measured: Comparison | None = None
    for cut in samples.unequal_cuts:
        # Compare without tolerance for rounding, which costs no more calls: mostly that suffices.
        results = _results_of_parts(call, whole, cut)
        if isinstance(results, Obstacle):
            return results
        comparison = Comparison(samples.number, results, parts=cut.description)
        if comparison.difference() is None:
            continue

        # They differ: look whether that means anything, and how far rounding may explain it.
        if measured is None:
            measured, obstacle = _with_measured_rounding(call, samples.whole, comparison, [whole])
            if obstacle is not None:
                return obstacle
        rounding = measured.rounding
        comparison = replace(comparison, rounding=rounding, computes_gradients=measured.computes_gradients)
        if comparison.difference() is None:
            continue
        refused = _refused_if_defective(comparison, call.mode)
        if refused is not None:
            return refused
    return None


def _results_of_parts(call: ModeCalls, whole: Sums, cut: UnequalParts) -> SplitResults | Obstacle:
    """Return the results with those of these parts; or why there are none."""
    results = [whole]
    for part in (cut.first, cut.second):
        try:
            results.append(call(part))
        except Exception as error:  # a model may not run so few samples: training makes no such micro-batch then
            number = plural(len(part.positions), "sample")
            return Obstacle(Reason.REFUSES_PART, f"{number} ({summary_of(error)})")
    if not all(math.isfinite(sums.loss) for sums in results):
        return Obstacle(Reason.NOT_FINITE_ALONE)
    return SplitResults(*results)


# --- 3. as training makes micro-batches


def _compare_as_trained(call: ModeCalls, halves: SplitResults, loss: Finding) -> Finding | None:
    """Compare a batch with its halves as training makes them, if they may differ from the batch; None if they do not.

    Args:
        call: calls the task.
        halves: the results of the whole batch and its halves.
        loss: the finding about joined halves. If these cannot be judged, others cannot, either.
    """
    samples = call.probe.samples
    batches = samples.as_trained.batches
    if batches is None:
        return samples.as_trained.obstacle
    if samples.is_joined and isinstance(loss, Obstacle):
        return loss
    try:
        return _compare_padding(call, halves, batches)
    except Exception as error:  # for the longest samples alone, such as their memory: training meets it
        return Obstacle(Reason.ERROR, summary_of(error))


def _compare_padding(call: ModeCalls, halves: SplitResults, batches: HalvedBatch) -> Finding:
    mode = call.mode
    samples = call.probe.samples
    # Some of the batches are those of `halves`: do not call the task with these again.
    sums_by_batch = {samples.whole: halves.whole, samples.first_half: halves.first, samples.second_half: halves.second}
    results = SplitResults(*(sums_by_batch.get(batch) or call(batch) for batch in batches))

    comparison = Comparison(samples.number, results)
    difference = comparison.difference()
    if difference is not None:  # perhaps by rounding: measure it, which takes more calls
        comparison, obstacle = _with_measured_rounding(call, batches.whole, comparison, results)
        if obstacle is not None:
            return obstacle
        difference = comparison.difference()

    if difference is None:
        return _adds_up(comparison, are_collated_apart=not samples.is_joined)
    if difference.is_larger_count and samples.as_trained.is_padded:
        return Refused(messages.refusal_of_padded_count(difference.values, samples, mode))
    message = messages.warning_of_difference(difference, samples, mode)
    return DependsOnSplit(samples.number, difference, message)


# --- what a difference may be due to


def _with_measured_rounding(
    call: ModeCalls, whole: TrialBatch, comparison: Comparison, results: Iterable[Sums]
) -> tuple[Comparison, Obstacle | None]:
    """Return the comparison with the rounding of its whole batch; and why it says nothing about the task, if so.

    Args:
        call: calls the task.
        whole: the whole batch.
        comparison: of results that differ.
        results: those that must be finite.
    """
    observer = Observer()
    repeated = call(whole, observer)
    obstacle = _obstacle(call, results, repeated, observer)
    if obstacle is not None:
        return comparison, obstacle
    rerounded = call.with_other_rounding(whole)
    rounding = Rounding(
        epsilon_of_loss=observer.epsilon_of_loss,
        epsilon_of_metrics=observer.epsilon,
        rerounded_losses=[sums.loss for sums in rerounded],
        rerounded_metrics=[sums.metrics for sums in rerounded],
    )
    return replace(comparison, rounding=rounding, computes_gradients=observer.computes_gradients), None


def _obstacle(call: ModeCalls, results: Iterable[Sums], repeated: Sums, observer: Observer) -> Obstacle | None:
    """Return why results that do not add up say nothing about the task; None if they do.

    Args:
        call: calls the task.
        results: what does not add up, the whole batch's first.
        repeated: the results of a second call for the whole batch.
        observer: of that call.
    """
    results = list(results)
    for sums in results:
        if not (math.isfinite(sums.loss) and math.isfinite(sums.divisor)):
            return Obstacle(Reason.NOT_FINITE)
    # A second call for the same samples would have other results: a difference may be due to that.
    if call.mode.training and observer.writes:
        return Obstacle(Reason.WRITES_STATE, listed(observer.writes, 1))
    if repeated.drew_outside_torch:
        return Obstacle(Reason.DRAWS_OUTSIDE_TORCH)
    if observer.draws and not call.knows_draws:
        return Obstacle(Reason.UNKNOWN_DRAWS)
    # Observed, torch may choose other kernels, such as for an encoder layer: in 16 bits their rounding shows.
    tolerance = max(REPRODUCIBLE, observer.epsilon_of_loss)
    if not math.isclose(repeated.loss, results[0].loss, rel_tol=tolerance):
        return Obstacle(Reason.NOT_REPRODUCIBLE)
    return None


# --- metrics that add up, but are divided by another count


def _divided_metrics(call: ModeCalls, halves: SplitResults) -> str:
    """Return the warning about metrics that sum one value per sample, while the count is of something else: tokens, or
    weights; "" if there are none. They add up all the same, so that no comparison of sums shows it.
    """
    samples = call.probe.samples
    names = set(halves.whole.metrics)
    if not all(math.isfinite(sums.divisor) for sums in halves):
        return ""
    has_weights = any(not _is_integer(sums.divisor) for sums in halves)
    is_of_samples = halves.whole.divisor <= samples.number  # of those that are not ignored, say
    if not names or (is_of_samples and not has_weights) or is_built_in(call.mode.task):
        return ""

    # Two batches, as the number of summands may be that of one batch's samples by chance.
    for batch in (samples.whole, samples.first_half):
        observer = Observer()
        call(batch, observer)
        per_sample = set()
        for name in names:
            summands = observer.summands_of_metrics.get(name, Summands())
            may_have_weights = has_weights and not summands.are_integers  # those by whose sum it is divided
            if summands.number == len(batch.positions) and not may_have_weights:
                per_sample.add(name)
        names = per_sample
        if not names:
            return ""
    return messages.warning_of_divided_metrics(sorted(names), halves.whole.divisor, samples, call.mode)


def _is_integer(count: float) -> bool:
    """Return whether a count is a whole number, up to fp32's rounding."""
    return math.isclose(count, round(count), rel_tol=REPRODUCIBLE)
