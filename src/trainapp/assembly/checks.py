"""`train.check_loss`: whether the task's loss and metrics are sums over samples, so that a batch can be cut.

A mean would be divided by the count again, making gradients that many times too small; a loss that compares the samples
of its batch depends on the micro-batch. Neither shows in a curve. The results for the first four samples are therefore
compared with those for their two halves, without gradients, before the first step in evaluation and in training mode
(with BatchNorm in evaluation mode).

To keep rounding from hiding a difference, a small model and its task are copied to fp64; what cannot run in fp64 runs
in fp32 without autocast, or as it is trained. Rounding is then measured: the change when the halves swap places or one
is repeated. (That changes small terms of pairs and unbiased variances, too: those below 0.1% of the loss go unnoticed.)
The copies are compared once more with noise on their parameters: a layer that begins at zero hides what is before it.

Metrics are checked as strictly, since an objective may be one: in fp64, to near rounding. One that does not add up is
recomputed with every number changed by rounding: an argmax may flip, and summands of both signs cancel out.

Costs six forwards in each mode, three of a large model, more if they do not add up. A stream's samples are read once,
and kept for training. What was compared, and what could not be and why, is in `Parts.checks` by mode.
"""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from trainapp.assembly.parts import Parts
from trainapp.assembly.trials import (
    DOUBLE,
    Observed,
    Rounding,
    Samples,
    Sums,
    Trials,
    first_that_works,
    ways_of,
)
from trainapp.config.schema import Config
from trainapp.data.stream_reader import is_stream
from trainapp.errors import UserError, summary_of
from trainapp.losses.losses import CheckedTask, has_embeddings, is_built_in, needs_whole_batch
from trainapp.parallel.ranks import Ranks
from trainapp.rng import Drawing, Ledger, topic_of
from trainapp.torch_private import has_values
from trainapp.training.engine import training_draws
from trainapp.training.evaluate import EVALUATION
from trainapp.units import listed

# Tolerances, relative to the result. LEAST: what always counts as rounding, fp32's own. ROUNDING: in units of a coarser
# dtype's epsilon. FINE, COARSE: the most that may count as rounding if it is measured, COARSE with matmuls in less than
# fp32 precision.
LEAST, ROUNDING, FINE, COARSE = 1.2e-7, 8, 1e-3, 2e-2
IN_DOUBLE = 1e-12  # epsilons below it are fp64's
SHUFFLED = topic_of("randperm.generator_out")  # a permutation of the batch: it mixes samples
FLOOR = 0.1  # per count: a loss whose summands cancel out has their rounding errors
NOISE = 0.1  # standard deviation of what is added to parameters
REPEATS = 8  # computations with other rounding; of two numbers that are close, the larger one changes in some of them
NO_CHECK_NEEDED = "no check needed, since task and model are trainapp's own"
_IF_MEANT = "If it is intended, set train.check_loss=false"


class Mode(NamedTuple):
    """How a task is called. work: the name in the ledger of what it draws. update: the name of its update, if any."""

    task: CheckedTask
    work: str
    training: bool
    update: str = ""

    def check(self, subject: str) -> str:
        """The name of a check of its "loss" or "draws" in `Parts.checks`."""
        update = f" of update {self.update}" if self.update else ""
        return f"{subject}{update}{' in training' if self.training else ''}"


class Outcome(NamedTuple):
    """Of a comparison. problem: the message about the task, None without one. text: what was compared, or why not."""

    problem: str | None
    text: str
    is_compared: bool = True


def modes_of(parts: Parts) -> list[Mode]:
    """The tasks in evaluation and in training."""
    task, updates = parts.components.task, parts.components.updates
    modes = [Mode(task, EVALUATION, False)]
    modes += [Mode(own, training_draws(name), False, name) for name, own in updates.items()]
    modes += [Mode(own, training_draws(name), True, name) for name, own in (updates or {"": task}).items()]
    return modes


def is_known(mode: Mode, model: nn.Module) -> bool:
    """Whether task and model are trainapp's own: samples never interact, and draws have them first."""
    return type(model).__module__.startswith("trainapp.models.") and is_built_in(mode.task)


def without_values(model: nn.Module) -> str:
    """Why a model without values is not called; "" for others."""
    if all(map(has_values, model.parameters())):
        return ""
    return "parameters have no values yet (parallel.fsdp.meta_init)"


def require_sum(config: Config, parts: Parts, model: nn.Module, ranks: Ranks, ledger: Ledger) -> None:
    """Raises UserError for a loss, count or metric that does not add up, and errors of reading a stream. Collective.
    Call before the model is compiled or sharded. Restores everything a Snapshot covers; modules end up on the device.
    """
    compared = []
    for mode in modes_of(parts):
        if reason := _reason_to_skip(config, parts, model, mode):
            parts.note_check(mode.check("loss"), reason)
        else:
            compared.append(mode)
    if compared:
        parts.first_samples(config.train.seed)
    for mode in compared:
        outcome = _outcome(config, parts, model, mode, ledger)
        of_ranks: list[Outcome] = ranks.all_gather_object(outcome)  # a rank may have run out of memory here
        for of_rank in of_ranks:
            if of_rank.problem is not None:
                raise UserError(of_rank.problem)
        parts.note_check(mode.check("loss"), "; ".join(dict.fromkeys(of_rank.text for of_rank in of_ranks)))
    if parts.device.type == "cuda":
        torch.cuda.empty_cache()


def _reason_to_skip(config: Config, parts: Parts, model: nn.Module, mode: Mode) -> str:
    """Why a mode is not compared, the same on all ranks; "" if it is."""
    if is_known(mode, model):
        return NO_CHECK_NEEDED
    if not config.train.check_loss:
        return "not compared: train.check_loss=false"
    if has_embeddings(mode.task):
        return "not compared: an embedding loss compares the samples of the whole step"
    if needs_whole_batch(mode.task):
        return "not compared: the task declares whole_batch, its batch is never cut"
    if parts.resumes and is_stream(parts.components.train_data):
        return "not compared: a resumed run does not read its stream from the start"
    reason = without_values(model)
    return f"not compared: {reason}" if reason else ""


def _outcome(config: Config, parts: Parts, model: nn.Module, mode: Mode, ledger: Ledger) -> Outcome:
    """The comparison with the first samples, in the first precision that works, and with noise on copies in fp64."""
    if parts.samples is None:
        return _not_compared(parts.samples_error)
    ways = functools.partial(ways_of, mode.task, config, parts, model)
    check = functools.partial(outcome_of, mode=mode, ledger=ledger)
    try:
        tried = first_that_works(ways(), check)
    except Exception as error:  # the first step raises it again
        return _not_compared(summary_of(error))
    outcome = tried.result
    text = f"{outcome.text}, in {tried.precision}" if outcome.is_compared else outcome.text
    for precision, reason in tried.failures.items():
        text += f"; not in {precision}: {reason}"
    if outcome.problem is not None or tried.precision != DOUBLE:
        return outcome._replace(text=text)
    try:
        with_noise = first_that_works(ways(noise=NOISE)[:1], check).result
    except Exception as error:
        return Outcome(None, f"{text}; with noise: {summary_of(error)}")
    if with_noise.text == outcome.text:
        return Outcome(with_noise.problem, f"{text}, with noise too" if outcome.is_compared else text)
    return Outcome(with_noise.problem, f"{text}; with noise: {with_noise.text}")


def _not_compared(reason: str) -> Outcome:
    return Outcome(None, f"not compared: {reason}", is_compared=False)


def outcome_of(trial: Trials, mode: Mode, ledger: Ledger) -> Outcome:
    """The comparison of a task's results. Raises errors of the task and the model. ledger: of what forwards draw."""
    places = ledger.places.get(mode.work)
    known = Ledger({} if places is None else {mode.work: places})

    # If the shapes do not tell whose draws are whose, each sample draws the same.
    alike = places is None or any(own.rows > 1 or own.varies for own in places.values())

    def result(name: str, observed: Observed | Rounding | None = None) -> Sums:
        drawing = Drawing((0,), trial.samples.positions(name), known, mode.work, alike=alike)
        return trial(name, mode.training, drawing, observed)

    results = {name: result(name) for name in ("ab", "a", "b")}
    if any(sums.drawn for sums in results.values()):
        ledger.depends["python"] = "the forward draws from Python's or NumPy's generator: the numbers depend on the cut"
    comparison = Comparison(trial.samples, results)
    if comparison.problem(mode) is None:
        return Outcome(None, comparison.compared())

    again = result("ab", observed := Observed())
    if observed.epsilon > IN_DOUBLE:
        results |= {name: result(name) for name in trial.samples.batches if name not in results}
    is_learnt = places is not None and known.draws and known.depends.keys() <= {SHUFFLED}
    if reason := _reason_not_to_judge(mode, results, again, observed, is_learnt):
        return _not_compared(reason)
    comparison = Comparison(trial.samples, results, observed.epsilon_of_loss, observed.epsilon)
    if comparison.failing_metrics():
        rounded = [result("ab", Rounding(trial.device, seed)) for seed in range(REPEATS)]
        comparison = comparison._replace(rounded=tuple(sums.metrics for sums in rounded))
    return Outcome(comparison.problem(mode), comparison.compared())


def _reason_not_to_judge(
    mode: Mode, results: Mapping[str, Sums], again: Sums, observed: Observed, is_learnt: bool
) -> str:
    """Why results that do not add up say nothing about the task; "" if they do. again: the results of a second call for
    all samples. is_learnt: whether it is known which draws are whose.
    """
    if not all(math.isfinite(value) for sums in results.values() for value in (sums.loss, sums.divisor)):
        return "the loss or its count is not finite"
    if mode.training and observed.writes:
        return f"the forward writes state ({listed(observed.writes, 1)})"
    if again.drawn:
        return "draws from Python's or NumPy's generator"
    if observed.draws and not is_learnt:
        return "draws whose samples are not known"
    if not math.isclose(again.loss, results["ab"].loss, rel_tol=1e-5):
        return "two calls with the same samples differ"
    return ""


class Comparison(NamedTuple):
    """The task's results by batch, see `Samples`: of `ab`, `a` and `b`, and of others if these do not add up.

    epsilon, epsilon_of_metrics: relative rounding error of the coarsest dtype in the computation of the loss, and of
    the metrics; 0 until they are known. rounded: the metrics of `ab` computed with other rounding, see `Rounding`.
    """

    samples: Samples
    results: Mapping[str, Sums]
    epsilon: float = 0.0
    epsilon_of_metrics: float = 0.0
    rounded: tuple[Mapping[str, float], ...] = ()

    def compared(self) -> str:
        """What has been compared, in words that continue "the loss"."""
        whole = self.results["ab"]
        if not self.samples.same:
            return f"is no mean of {self.samples.number} samples; no more is compared: a batch is not its halves joined"
        others = "do count and metrics" if whole.metrics else "does its count"
        text = f"adds up over {self.samples.number} samples, as {others}"
        if whole.metrics_error:
            text += f" (metrics: {whole.metrics_error})"
        elif skipped := [name for name in whole.metrics if not self._has_numbers(name)]:
            text += f" (not {listed(skipped)}: not finite or not in all batches)"
        return text

    def problem(self, mode: Mode) -> str | None:
        """The message; None if the results add up."""
        samples, whole, a, b = self.samples, *(self.results[name] for name in ("ab", "a", "b"))
        losses, setting = {name: sums.loss for name, sums in self.results.items()}, mode.task.setting
        most = self._most(self.epsilon)
        numbers = (
            f"for {samples.number} samples it returns {whole.loss:.9g} with a count of {whole.divisor:g}, and for "
            f"their halves {a.loss:.9g} with {a.divisor:g} and {b.loss:.9g} with {b.divisor:g}"
        )
        is_small = size_of(losses) <= 1e-6 * min(1.0, abs(whole.divisor))
        if not is_small and self._is_mean(losses, most):
            return (
                f"{setting}: the loss is a mean, but a sum is required: {numbers}. It would be divided by the count "
                "twice, and uneven micro-batches weighted wrongly: return the sum of the samples' (or tokens') losses "
                f"and their number, such as the mean times its number of summands. {_IF_MEANT}"
            )
        if samples.same and not self._adds_up(losses, most):
            return (
                f"{setting}: the loss is not a sum over samples{' in training mode' * mode.training}: {numbers}. It "
                "would depend on the micro-batch, and so on free memory. Do shapes broadcast, such as [B, 1] with [B]? "
                "If it compares or mixes the samples of its batch, or has a term of the whole batch such as a "
                "mixture's load balance, sum it over samples (a balance per sequence), or declare `whole_batch = True` "
                "on the task: its batch is then never cut (or give it embed and loss_of_embeddings: docs/extending.md)."
                " If the model normalises over the batch in evaluation mode, let it use running statistics there. "
                f"{_IF_MEANT}"
            )
        if samples.same and not math.isclose(whole.divisor, a.divisor + b.divisor, rel_tol=most):
            return (
                f"{setting}: the count does not add up: {numbers}. Micro-batches would be weighted wrongly: return the "
                f"number of samples or tokens that the loss sums over, or the sum of their weights. {_IF_MEANT}"
            )
        return self._problem_of_metrics(setting)

    def _problem_of_metrics(self, setting: str) -> str | None:
        for name in self.failing_metrics():
            values = self._values(name)
            is_mean = self._is_mean(values, COARSE)
            if is_mean or self.samples.same:
                return (
                    f"{setting}: the metric {name} is {'a mean' if is_mean else 'not a sum over samples'}, but a sum "
                    f"is required: for {self.samples.number} samples it is {values['ab']:.9g}, and for their halves "
                    f"{values['a']:.9g} and {values['b']:.9g}. It would depend on the micro-batch: return the sum of "
                    "the samples' own values (of a mean over samples, that times the count), or configure it as "
                    f"metrics.{name}, which sees all samples (docs/extending.md). {_IF_MEANT}"
                )
        return None

    def failing_metrics(self) -> list[str]:
        """The metrics whose values for the halves do not add up to the whole's."""
        names = [name for name in self.results["ab"].metrics if self._has_numbers(name)]
        return [name for name in names if abs(excess(self._values(name))) > self._tolerance_of_metric(name)]

    def _values(self, name: str) -> dict[str, float]:
        return {batch: sums.metrics[name] for batch, sums in self.results.items() if name in sums.metrics}

    def _has_numbers(self, name: str) -> bool:
        """Whether there are values to compare. One that is not a number says nothing."""
        values = self._values(name)
        return {"ab", "a", "b"} <= values.keys() and all(map(math.isfinite, values.values()))

    def _tolerance_of_metric(self, name: str) -> float:
        """What may be rounding in a metric's sum. If it was computed with other rounding: four times what that changed;
        with 16 bits at most 2%, and one of a count, such as that of right answers.
        """
        values = self._values(name)
        scale = size_of(values)
        if not self.samples.same:
            return COARSE * scale
        tolerance = ROUNDING * LEAST * scale
        if self.epsilon_of_metrics > IN_DOUBLE:
            measured = min(4 * self._swap_noise(values), self._most(self.epsilon_of_metrics) * scale)
            tolerance = max(tolerance, measured)
        changes = [abs(metrics[name] - values["ab"]) for metrics in self.rounded if name in metrics]
        by_rounding = 4 * max(changes, default=0.0)
        if self.epsilon_of_metrics > 1e-6:  # 16 bits, in which rounding changes everything
            is_count = all(map(float.is_integer, values.values()))
            by_rounding = min(by_rounding, max(COARSE * scale, 1.0 if is_count else 0.0))
        return max(tolerance, by_rounding)

    @staticmethod
    def _most(epsilon: float) -> float:
        """The most that may count as rounding in a computation with this epsilon, if it is measured."""
        return FINE if epsilon < 1e-6 else COARSE

    @staticmethod
    def _swap_noise(values: Mapping[str, float], default: float = 0.0) -> float:
        """The largest change where batches of the same samples should have the same result."""
        expected = {"ba": values["ab"], "aa": 2 * values["a"], "bb": 2 * values["b"]}
        return max((abs(values[name] - same) for name, same in expected.items() if name in values), default=default)

    def _adds_up(self, losses: Mapping[str, float], most: float) -> bool:
        """Whether the halves' losses add up to the whole's, up to rounding, of `most` at most."""
        scale = size_of(losses) + FLOOR * abs(self.results["ab"].divisor)
        tolerance = LEAST * scale
        if self.epsilon > IN_DOUBLE:
            measured = 4 * self._swap_noise(losses, default=math.inf)
            tolerance = min(max(measured, ROUNDING * self.epsilon * scale), most * scale)
        return abs(excess(losses)) <= tolerance

    def _is_mean(self, values: Mapping[str, float], tolerance: float) -> bool:
        """Whether the whole batch's value is the mean of its halves' and not their sum. The mean is weighted equally or
        by their counts; if both hold the same values, with any weights (such as tokens, while the count is of samples).
        """
        if abs(excess(values)) <= tolerance * size_of(values):
            return False
        whole, a, b = (values[name] for name in ("ab", "a", "b"))
        weights = [(1.0, 1.0), (self.results["a"].divisor, self.results["b"].divisor)]
        means = [(x * a + y * b) / (x + y) for x, y in weights if x + y]
        margin = tolerance * abs(whole)
        low, high = sorted((a, b))
        is_between = self.samples.same and low * high > 0 and low - margin <= whole <= high + margin
        return is_between or any(math.isclose(whole, mean, rel_tol=tolerance) for mean in means)


def size_of(values: Mapping[str, float]) -> float:
    """The scale of some results."""
    return (abs(values["ab"]) + abs(values["a"]) + abs(values["b"])) / 2


def excess(values: Mapping[str, float]) -> float:
    """By how much the whole batch's value is larger than the sum of its halves'."""
    return values["ab"] - values["a"] - values["b"]
