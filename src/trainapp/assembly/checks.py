"""`train.check_loss`: whether the task's loss and metrics are sums over samples, so that a batch can be cut.

A mean would be divided by the count again, making gradients that many times too small; a loss that compares the samples
of its batch depends on the micro-batch. Neither shows in a curve. The results for the first four samples are therefore
compared with those for their two halves before the first step in evaluation and in training mode (with BatchNorm in
evaluation mode): without gradients, unless the task itself needs some, as for a gradient penalty.

To keep rounding from hiding a difference, a small model and its task are copied to fp64; what cannot run in fp64 runs
in fp32 without autocast, or as it is trained. Rounding is then measured: the change when the halves swap places or one
is repeated. (That changes small terms of pairs and unbiased variances, too: those below 0.1% of the loss go unnoticed.)
The copies are compared once more with noise on their parameters: a layer that begins at zero hides what is before it.

Metrics are checked as strictly, since an objective may be one: in fp64, to near rounding. One that does not add up is
recomputed with every number changed by rounding: an argmax may flip, and summands of both signs cancel out. A metric
that sums one value per sample adds up also where the count is in tokens: two observed calls show what was summed, and a
warning names it.

Where a batch is more than its halves joined, mostly because it is padded, it is also compared with its halves as
training makes them (`assembly.samples`). A count that includes padding is refused. A loss or metric that depends on the
padding may be meant (convolutions over padded audio): it is noted, and warned of before the first step.

Costs six forwards in each mode, three of a large model, two thirds more of padded batches, and more if they do not add
up. A stream's samples are read once, and kept for training. What was compared, and what could not be and why, is in
`Resources.checks` by mode.
"""

import functools
import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from trainapp.assembly.comparison import MAX_FP64_EPSILON, Comparison
from trainapp.assembly.modes import NO_CHECK_NEEDED, Mode, modes_of, needs_no_check, reason_without_values
from trainapp.assembly.precisions import FP64, ProbeResult, first_working_result, note_globals, precisions_to_try
from trainapp.assembly.probe import Observer, RandomRounding, Sums, TaskProbe
from trainapp.assembly.resources import Resources
from trainapp.assembly.samples import UNEVEN
from trainapp.config.schema import Config
from trainapp.data.stream_reader import is_stream
from trainapp.draws.record import GLOBALS, PADDING, DrawRecord, topic_of
from trainapp.draws.sample_draws import SampleDraws
from trainapp.errors import UserError, summary_of
from trainapp.losses.losses import has_embeddings, is_built_in, needs_whole_batch
from trainapp.parallel.ranks import Ranks
from trainapp.units import listed

log = logging.getLogger(__name__)
SHUFFLED = topic_of("randperm.generator_out")  # a permutation of the batch: it mixes samples
# Standard deviation of what is added to the parameters of copies. Initial weights are about as large: layers that begin
# at zero then count, while the others still compute something like themselves.
NOISE = 0.1
REPEATS = 8  # computations with other rounding; of two numbers that are close, the larger one changes in some of them
SWAPPED = ("ba", "aa", "bb")  # batches of the same samples, which measure rounding
REPRODUCIBLE = 1e-5  # the most by which two calls with equal numbers may differ, relative: atomic additions in fp32

Results = dict[str, Sums]  # by the roles in a comparison: `ab` is the whole batch, `a` and `b` are its parts


class Outcome(NamedTuple):
    """The outcome of a comparison."""

    problem: str | None  # the message about the task, None without one
    text: str  # what was compared, or why not
    is_compared: bool = True
    dependence: str = ""  # the message about what depends on the micro-batch
    divisor: str = ""  # the warning about metrics of samples that are divided by a count of something else
    # For a batch and its halves as training makes them, see `Samples.cut`; None where `text` tells it, or where there
    # is nothing to tell.
    cut: "Outcome | None" = None


def require_sum(config: Config, resources: Resources, model: nn.Module, ranks: Ranks, draw_record: DrawRecord) -> None:
    """Raise UserError for a loss, count or metric that does not add up, and errors of reading a stream. Collective.

    Call before the model is compiled or sharded. Restores everything a Snapshot covers; modules end up on the device.
    """
    # Skip modes whose check is not needed or not possible. Reading samples is only worth its time for the others.
    compared_modes = []
    for mode in modes_of(resources):
        reason = _reason_to_skip(config, resources, model, mode)
        if reason:
            resources.note_check(mode.check_name("loss"), reason)
        else:
            compared_modes.append(mode)
    if compared_modes:
        resources.first_samples(config.train.seed)

    # Every rank has its own outcome: one may have run out of memory here. A problem of any of them ends all.
    divisors: list[str] = []
    for mode in compared_modes:
        outcome = _compare_mode(config, resources, model, mode, draw_record)
        outcomes: list[Outcome] = ranks.all_gather_object(outcome)
        _note_outcomes(outcomes, mode.check_name("loss"), mode, resources, draw_record)
        divisors.extend(outcome.divisor for outcome in outcomes if outcome.divisor)
        cut_outcomes = [outcome.cut for outcome in outcomes if outcome.cut is not None]
        if cut_outcomes:
            _note_outcomes(cut_outcomes, mode.check_name("padding"), mode, resources, draw_record)

    for text in dict.fromkeys(divisors):  # without repetitions: ranks and modes often agree
        log.warning("%s", text)
    if resources.device.type == "cuda":
        torch.cuda.empty_cache()


def _reason_to_skip(config: Config, resources: Resources, model: nn.Module, mode: Mode) -> str:
    """Return why a mode is not compared, the same on all ranks; "" if it is."""
    if needs_no_check(mode, model):
        return NO_CHECK_NEEDED
    if not config.train.check_loss:
        return "not compared: train.check_loss=false"
    if has_embeddings(mode.task):
        return "not compared: an embedding loss compares the samples of the whole step"
    if needs_whole_batch(mode.task):
        return "not compared: the task declares whole_batch, its batch is never cut"
    if resources.resumes and is_stream(resources.targets.train_data):
        return "not compared: a resumed run does not read its stream from the start"
    reason = reason_without_values(model)
    return f"not compared: {reason}" if reason else ""


def _note_outcomes(
    outcomes: Sequence[Outcome], name: str, mode: Mode, resources: Resources, draw_record: DrawRecord
) -> None:
    """Record the ranks' outcomes of a check, and what depends on the micro-batch once per task. Raises UserError for a
    problem of any of them.
    """
    for outcome in outcomes:
        if outcome.problem is not None:
            raise UserError(outcome.problem)
        if outcome.dependence:
            draw_record.depends.setdefault(f"{PADDING}{mode.task.setting}", outcome.dependence)
    distinct_texts = dict.fromkeys(outcome.text for outcome in outcomes)
    resources.note_check(name, "; ".join(distinct_texts))


# --- the precisions of a comparison


def _compare_mode(
    config: Config, resources: Resources, model: nn.Module, mode: Mode, draw_record: DrawRecord
) -> Outcome:
    """Compare the first samples in the first precision that works, and in fp64 once more with noise on the copies."""
    if resources.samples is None:
        return _not_compared(resources.samples_error)

    # Without noise, in the most precise way that works.
    compare = functools.partial(compare_batches, mode=mode, draw_record=draw_record)
    try:
        factories = precisions_to_try(mode.task, config, resources, model)
        result = first_working_result(factories, compare, mode.is_trained)
        note_globals(result, draw_record)
    except Exception as error:  # the first step raises it again
        return _not_compared(summary_of(error))
    plain = result.value
    outcome = _with_precision(plain, result)
    if outcome.problem is not None or result.precision != FP64:
        return outcome

    # With noise: what a layer that begins at zero has hidden shows now.
    try:
        fp64_only = precisions_to_try(mode.task, config, resources, model, noise=NOISE)[:1]
        compare_again = functools.partial(compare, checks_divisors=False)  # noise does not change what is summed
        noisy = first_working_result(fp64_only, compare_again, mode.is_trained).value
    except Exception as error:
        return outcome._replace(text=f"{outcome.text}; with noise: {summary_of(error)}")
    cut = outcome.cut
    if cut is not None and plain.cut is not None and noisy.cut is not None:
        cut = _with_noise(cut, noisy.cut, plain.cut.text)
    return _with_noise(outcome, noisy, plain.text)._replace(cut=cut)


def _not_compared(reason: str) -> Outcome:
    return Outcome(None, f"not compared: {reason}", is_compared=False)


def _with_precision(outcome: Outcome, result: ProbeResult[Outcome]) -> Outcome:
    """Return the outcome with its precision in the text, and the reasons why there was none higher."""
    text = outcome.text
    if outcome.is_compared:
        text += f", in {result.precision}"
    for precision, reason in result.failures.items():
        text += f"; not in {precision}: {reason}"
    cut = outcome.cut
    if cut is not None and cut.is_compared:
        cut = cut._replace(text=f"{cut.text}, in {result.precision}")
    return outcome._replace(text=text, cut=cut)


def _with_noise(outcome: Outcome, noisy: Outcome, plain_text: str) -> Outcome:
    """Return the outcome together with that of the same comparison with noise on the parameters.

    Args:
        outcome: without noise.
        noisy: with noise.
        plain_text: the outcome's text without its precision.
    """
    if outcome.problem is not None or outcome.dependence:
        return outcome

    # The same words with noise: say so once, rather than repeat them.
    if noisy.text == plain_text:
        text = outcome.text
        if outcome.is_compared:
            text += ", with noise too"
        return outcome._replace(problem=noisy.problem, text=text)

    dependence = ""
    if noisy.dependence:
        dependence = f"{noisy.dependence}. Seen with noise on the parameters"
    text = f"{outcome.text}; with noise: {noisy.text}"
    return outcome._replace(problem=noisy.problem, text=text, dependence=dependence)


# --- the comparisons of a probe


class ModeCalls:
    """Calls of a task in one mode with a probe's batches, by their names, with draws as in training."""

    def __init__(self, probe: TaskProbe, mode: Mode, draw_record: DrawRecord):
        self.probe = probe
        self.mode = mode
        self._layouts = draw_record.layouts.get(mode.work)
        self._record = DrawRecord()
        self._draws_alike = True  # each sample draws the same, as the shapes do not tell whose draws are whose
        if self._layouts is not None:
            self._record.layouts[mode.work] = self._layouts
            self._draws_alike = any(layout.rows > 1 or layout.varies for layout in self._layouts.values())

    def __call__(self, batch_name: str, dispatch_mode: Observer | RandomRounding | None = None) -> Sums:
        positions = self.probe.samples.positions(batch_name)
        sample_draws = SampleDraws((0,), positions, self._record, self.mode.work, alike=self._draws_alike)
        return self.probe(batch_name, self.mode.training, sample_draws, dispatch_mode)

    @property
    def knows_draws(self) -> bool:
        """Whether it is known which draws are whose. Ask after a call."""
        return self._layouts is not None and self._record.draws and self._record.depends.keys() <= {SHUFFLED, GLOBALS}

    def with_other_rounding(self, batch_name: str) -> list[Sums]:
        """Return the results for a batch, computed with other rounding."""
        device = self.probe.device
        return [self(batch_name, RandomRounding(device, seed)) for seed in range(REPEATS)]


def compare_batches(probe: TaskProbe, mode: Mode, draw_record: DrawRecord, checks_divisors: bool = True) -> Outcome:
    """Compare a task's results for a batch with those for its halves. Raises errors of the task and the model.

    Args:
        probe: calls the task.
        mode: how it is called.
        draw_record: of what forwards draw. Draws of Python's and NumPy's generators are noted in it.
        checks_divisors: whether to look for metrics of samples that are divided by a count of something else.
    """
    # The whole batch and its halves: every comparison below needs these.
    call = ModeCalls(probe, mode, draw_record)
    samples = probe.samples
    results = {name: call(name) for name in ("ab", "a", "b")}
    if any(sums.drew_outside_torch for sums in results.values()):
        draw_record.depends["python"] = (
            "the forward draws from Python's or NumPy's generator: the numbers depend on the cut"
        )

    outcome = _compare_joined(call, results)
    if checks_divisors and outcome.problem is None and outcome.is_compared:
        outcome = outcome._replace(divisor=_metrics_of_samples(call, results))
    if outcome.problem is not None:
        return outcome

    # Of halves that are not just the batch's parts, training's own comparison says more, if it could be made.
    cut = _compare_cut_if_any(call, results, outcome)
    if samples.is_joined:
        return outcome._replace(cut=cut)
    if cut is not None and cut.is_compared:
        return cut
    reason = "not compared: a batch is not its halves joined" if cut is None else cut.text
    return outcome._replace(text=f"{outcome.text}; no more is {reason.removeprefix('not ')}")


def _compare_joined(call: ModeCalls, results: Results) -> Outcome:
    """Compare a batch with its halves joined."""
    mode = call.mode
    samples = call.probe.samples

    # Most tasks add up to the last bits of fp64. Then only unequal parts are left to try.
    comparison = Comparison(samples, results)
    if comparison.problem(mode.task.setting, mode.training) is None:
        text = comparison.compared()
        problem, reason = _compare_unequal_parts(call, results["ab"])
        if reason:
            text += f"; in halves alone: {reason}"
        return Outcome(problem, text)

    # It does not add up: look whether that means anything, and how far rounding may explain it.
    observer = Observer()
    repeated = call("ab", observer)
    if observer.epsilon > MAX_FP64_EPSILON:
        swapped = {name: call(name) for name in SWAPPED if name in samples.batches}
        results = {**results, **swapped}
    reason = _reason_not_to_judge(call, results, repeated, observer)
    if reason:
        return _not_compared(reason)

    comparison = Comparison(samples, results, observer.epsilon_of_loss, observer.epsilon)
    if comparison.failing_metrics():
        rounded = call.with_other_rounding("ab")
        comparison = comparison._replace(rounded=tuple(sums.metrics for sums in rounded))
    return Outcome(comparison.problem(mode.task.setting, mode.training), comparison.compared())


def _metrics_of_samples(call: ModeCalls, results: Results) -> str:
    """Return the warning about metrics that sum one value per sample, while the count is of something else, such as
    tokens; "" if there are none. They add up all the same, so that no comparison of sums shows it.
    """
    task = call.mode.task

    # Two batches, as the number of summands may be that of one batch's samples by chance.
    names = set(results["ab"].metrics)
    for batch_name in ("ab", "a"):
        number = len(call.probe.samples.positions(batch_name))
        count = results[batch_name].divisor
        may_count_tokens = count > number and count.is_integer()  # others are sums of weights
        if not names or not may_count_tokens or is_built_in(task):
            return ""
        observer = Observer()
        call(batch_name, observer)
        names = {name for name in names if observer.summands_of_metrics.get(name) == number}
    if not names:
        return ""
    return (
        f"{task.setting}: the metric {listed(sorted(names))} sums one value per sample, but is divided by the count, "
        f"which is {results['ab'].divisor:g} for {call.probe.samples.number} samples. If its mean over samples is "
        "meant, return a tuple of this sum and its own count, such as (exact.sum(), len(exact))"
    )


def _compare_unequal_parts(call: ModeCalls, whole: Sums) -> tuple[str | None, str]:
    """Compare one sample and the others with all of them, where equal halves add up: weights and rounded shares may be
    alike in both halves.

    Returns:
        The message about the task, None without a problem; and why nothing was compared, empty if it was.
    """
    samples = call.probe.samples
    if UNEVEN[0] not in samples.batches:
        return None, ""

    # Compare without tolerance for rounding, which costs no more calls: mostly that suffices.
    try:
        first, all_but_first = (call(name) for name in UNEVEN)
    except Exception as error:  # a model may not run a single sample: training makes none then
        return None, summary_of(error)
    if not (math.isfinite(first.loss) and math.isfinite(all_but_first.loss)):
        return None, "the loss of a single sample is not finite"
    results = {"ab": whole, "a": first, "b": all_but_first}
    comparison = Comparison(samples, results, parts="the first and the others")
    if comparison.difference() is None:
        return None, ""

    # They differ: look whether that means anything, and how far rounding may explain it.
    observer = Observer()
    repeated = call("ab", observer)
    reason = _reason_not_to_judge(call, {"ab": whole}, repeated, observer)
    if reason:
        return None, reason
    comparison = _with_rounding(comparison, observer, call.with_other_rounding("ab"))
    if comparison.difference() is None:
        return None, ""
    return comparison.problem(call.mode.task.setting, call.mode.training), ""


def _compare_cut_if_any(call: ModeCalls, results: Results, outcome: Outcome) -> Outcome | None:
    """Compare a batch with its halves as training makes them, if they may differ from the batch; None if they do not.

    Args:
        call: calls the task.
        results: of `ab`, `a` and `b`.
        outcome: of the comparison of joined halves. If these cannot be judged, others cannot, either.
    """
    samples = call.probe.samples
    if not samples.cut.names:
        return _not_compared(samples.cut.reason) if samples.cut.reason else None
    if samples.is_joined and not outcome.is_compared:
        return outcome
    try:
        return _compare_cut(call, results)
    except Exception as error:  # for the longest samples alone, such as their memory: training meets it
        return _not_compared(summary_of(error))


def _compare_cut(call: ModeCalls, results: Results) -> Outcome:
    mode = call.mode
    samples = call.probe.samples
    cut_results: Results = {}
    for role, name in zip(("ab", "a", "b"), samples.cut.names, strict=True):
        cut_results[role] = results[name] if name in results else call(name)

    comparison = Comparison(samples._replace(is_joined=True), cut_results)
    difference = comparison.difference()
    if difference is not None:  # perhaps by rounding: measure it, which takes more calls
        whole_name = samples.cut.names[0]
        observer = Observer()
        repeated = call(whole_name, observer)
        reason = _reason_not_to_judge(call, cut_results, repeated, observer)
        if reason:
            return _not_compared(reason)
        comparison = _with_rounding(comparison, observer, call.with_other_rounding(whole_name))
        difference = comparison.difference()

    if difference is None:
        how = "" if samples.is_joined else " collated in halves"
        return Outcome(None, comparison.compared(how))
    if difference.counts_padding and samples.cut.is_padded:
        return Outcome(difference.refusal(mode.task.setting), difference.text())
    return Outcome(None, difference.text(), dependence=difference.warning(mode.task.setting, mode.training))


def _with_rounding(comparison: Comparison, observer: Observer, rounded: Sequence[Sums]) -> Comparison:
    """Return the comparison with what rounding may change.

    Args:
        comparison: without it.
        observer: of a call with the whole batch.
        rounded: the whole batch's results with other rounding.
    """
    return comparison._replace(
        epsilon=observer.epsilon_of_loss,
        epsilon_of_metrics=observer.epsilon,
        rounded=tuple(sums.metrics for sums in rounded),
        rounded_losses=tuple(sums.loss for sums in rounded),
    )


def _reason_not_to_judge(call: ModeCalls, results: Results, repeated: Sums, observer: Observer) -> str:
    """Return why results that do not add up say nothing about the task; "" if they do.

    Args:
        call: calls the task.
        results: what does not add up.
        repeated: the results of a second call for all samples.
        observer: of that call.
    """
    for sums in results.values():
        if not (math.isfinite(sums.loss) and math.isfinite(sums.divisor)):
            return "the loss or its count is not finite"
    # A second call for the same samples would have other results: a difference may be due to that.
    if call.mode.training and observer.writes:
        return f"the forward writes state ({listed(observer.writes, 1)})"
    if repeated.drew_outside_torch:
        return "draws from Python's or NumPy's generator"
    if observer.draws and not call.knows_draws:
        return "draws whose samples are not known"
    # Observed, torch may choose other kernels, such as for an encoder layer: in 16 bits their rounding shows.
    tolerance = max(REPRODUCIBLE, observer.epsilon_of_loss)
    if not math.isclose(repeated.loss, results["ab"].loss, rel_tol=tolerance):
        return "two calls with the same samples differ"
    return ""
