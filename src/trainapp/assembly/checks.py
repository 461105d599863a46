"""`train.check_loss`: whether the task's loss and metrics are sums over samples, so that a batch can be cut.

A mean would be divided by the count again, making gradients that many times too small; a loss that compares the samples
of its batch depends on the micro-batch. Neither shows in a curve. The results for the first four samples are therefore
compared with those for their two halves, without gradients, before the first step in evaluation and in training mode
(with BatchNorm in evaluation mode).

So that little is hidden by rounding, model and task are copied in fp64 if they are small; what cannot run in fp64 runs
in fp32 without autocast, or as it is trained. Rounding is then measured: the change when the halves swap places or one
is repeated. (That changes small terms of pairs and unbiased variances, too: those below 0.1% of the loss go unnoticed.)
The copies are compared once more with noise on their parameters: a layer that begins at zero hides what is before it.

Costs six forwards in each mode, three of a large model, more if they do not add up. A stream's samples are read once,
and kept for training. docs/extending.md lists what cannot be compared and is skipped silently.
"""

import contextlib
import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from trainapp.assembly.parts import Parts
from trainapp.assembly.trials import Observed, Samples, Sums, Trials, first_that_works, ways_of
from trainapp.config.schema import Config
from trainapp.data.stream_reader import is_stream
from trainapp.errors import UserError
from trainapp.losses.losses import CheckedTask, compares_samples, is_built_in
from trainapp.parallel.ranks import Ranks
from trainapp.rng import Drawing, Ledger, topic_of
from trainapp.torch_private import has_values
from trainapp.training.engine import training_draws
from trainapp.training.evaluate import EVALUATION

# Tolerances, relative to the result. LEAST: what always counts as rounding, fp32's own. ROUNDING: in units of a coarser
# dtype's epsilon. FINE, COARSE: the most that may count as rounding if it is measured, COARSE with matmuls in less than
# fp32 precision, and for metrics.
LEAST, ROUNDING, FINE, COARSE = 1.2e-7, 8, 1e-3, 2e-2
IN_DOUBLE = 1e-12  # epsilons below it are fp64's
SHUFFLED = topic_of("randperm.generator_out")  # a permutation of the batch: it mixes samples
FLOOR = 0.1  # per count: a loss whose summands cancel out has their rounding errors
NOISE = 0.1  # standard deviation of what is added to parameters
_IF_MEANT = "If it is intended, set train.check_loss=false"


class Mode(NamedTuple):
    """How a task is called. work: the name in the ledger of what it draws."""

    task: CheckedTask
    work: str
    training: bool


def modes_of(parts: Parts, model: nn.Module) -> list[Mode]:
    """The tasks in evaluation and in training, except for trainapp's own with its models, whose samples never interact
    and whose draws have the samples first.
    """
    task, updates = parts.components.task, parts.components.updates
    trained = {training_draws(name): own for name, own in (updates or {"": task}).items()}
    modes = [Mode(task, EVALUATION, False), *(Mode(own, work, False) for work, own in trained.items() if updates)]
    modes += [Mode(own, work, True) for work, own in trained.items()]
    is_own = type(model).__module__.startswith("trainapp.models.")
    return [mode for mode in modes if not (is_own and is_built_in(mode.task))]


def require_sum(config: Config, parts: Parts, model: nn.Module, ranks: Ranks, ledger: Ledger) -> None:
    """Raises UserError for a loss, count or metric that does not add up, and errors of reading a stream. Collective.
    Call before the model is compiled or sharded. Restores everything a Snapshot covers; modules end up on the device.
    """
    was_checked = parts.resumes and is_stream(parts.components.train_data)  # which is not reread from its start
    modes = [] if was_checked else [mode for mode in modes_of(parts, model) if not compares_samples(mode.task)]
    if modes and all(map(has_values, model.parameters())):  # with parallel.fsdp.meta_init there are no values yet
        parts.first_samples(config.train.seed)
    for mode in modes:
        problem = None
        with contextlib.suppress(Exception):  # the first step raises it again
            ways = functools.partial(ways_of, mode.task, config, parts, model)
            check = functools.partial(problem_of, mode=mode, ledger=ledger)
            problem = first_that_works(ways(), check) or first_that_works(ways(noise=NOISE)[:-2], check)
        for found in filter(None, ranks.all_gather_object(problem)):  # a rank may have run out of memory here
            raise UserError(found)
    if parts.device.type == "cuda":
        torch.cuda.empty_cache()


def problem_of(trial: Trials, mode: Mode, ledger: Ledger) -> str | None:
    """The message about the task; None if its results add up or cannot be compared. Raises errors of the task and the
    model. ledger: of what forwards draw.
    """
    places = ledger.places.get(mode.work)
    known = Ledger({} if places is None else {mode.work: places})

    # If the shapes do not tell whose draws are whose, each sample draws the same.
    alike = places is None or any(own.rows > 1 or own.varies for own in places.values())

    def result(name: str, observed: Observed | None = None) -> Sums:
        drawing = Drawing((0,), trial.samples.positions(name), known, mode.work, alike=alike)
        return trial(name, mode.training, drawing, observed)

    results = {name: result(name) for name in ("ab", "a", "b")}
    if any(sums.drawn for sums in results.values()):
        ledger.depends["python"] = "the forward draws from Python's or NumPy's generator: the numbers depend on the cut"
    if Comparison(trial.samples, results).problem(mode) is None:
        return None
    again = result("ab", observed := Observed())
    if observed.epsilon > IN_DOUBLE:
        results |= {name: result(name) for name in trial.samples.batches if name not in results}
    is_finite = all(math.isfinite(value) for sums in results.values() for value in (sums.loss, sums.divisor))
    is_known = places is not None and known.draws and known.depends.keys() <= {SHUFFLED}
    is_random = (observed.draws and not is_known) or again.drawn
    is_random = is_random or not math.isclose(again.loss, results["ab"].loss, rel_tol=1e-5)
    if is_random or not is_finite or (mode.training and observed.writes):
        return None
    return Comparison(trial.samples, results, observed.epsilon).problem(mode)


class Comparison(NamedTuple):
    """The task's results by batch, see `Samples`: of `ab`, `a` and `b`, and of others if these do not add up.

    epsilon: relative rounding error of the coarsest dtype in the computation; 0 until it is known.
    """

    samples: Samples
    results: Mapping[str, Sums]
    epsilon: float = 0.0

    def problem(self, mode: Mode) -> str | None:
        """The message; None if the results add up."""
        samples, whole, a, b = self.samples, *(self.results[name] for name in ("ab", "a", "b"))
        losses, setting = {name: sums.loss for name, sums in self.results.items()}, mode.task.setting
        most = FINE if self.epsilon < 1e-6 else COARSE
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
        """A value that is not a number says nothing."""
        for name in self.results["ab"].metrics:
            values = {batch: sums.metrics[name] for batch, sums in self.results.items() if name in sums.metrics}
            if not {"a", "b"} <= values.keys() or not abs(excess(values)) > COARSE * size_of(values):
                continue
            is_mean = self._is_mean(values, COARSE)
            if is_mean or self.samples.same:
                return (
                    f"{setting}: the metric {name} is {'a mean' if is_mean else 'not a sum over samples'}, but a sum "
                    f"is required: for {self.samples.number} samples it is {values['ab']:.6g}, and for their halves "
                    f"{values['a']:.6g} and {values['b']:.6g}. It would depend on the micro-batch: return the sum over "
                    "the samples (a mean times the count), or configure it as "
                    f"metrics.{name}, which sees all samples (docs/extending.md). {_IF_MEANT}"
                )
        return None

    def _adds_up(self, losses: Mapping[str, float], most: float) -> bool:
        """Whether the halves' losses add up to the whole's, up to rounding, of `most` at most."""
        scale = size_of(losses) + FLOOR * abs(self.results["ab"].divisor)
        tolerance = LEAST * scale
        if self.epsilon > IN_DOUBLE:
            expected = {"ba": losses["ab"], "aa": 2 * losses["a"], "bb": 2 * losses["b"]}
            noise = [abs(losses[name] - same) for name, same in expected.items() if name in losses]
            measured = 4 * max(noise, default=math.inf)
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
