"""`train.check_loss`: whether the task's loss and metrics are sums over samples, so that a batch can be cut.

A mean would be divided by the count again, making gradients that many times too small; a loss that compares the samples
of its batch depends on the micro-batch. Neither shows in a curve. The results for the first four samples are therefore
compared with those for their two halves, without gradients: before the first step in evaluation and in training mode
(with BatchNorm in evaluation mode), and in evaluation mode once more at a later step, since some terms do not show at
the start (a gate that is initialised with zeros is uniform). Each sample draws the same random numbers.

So that rounding hides nothing, model and task are copied in fp64 if they are small; what cannot run in fp64 runs in
fp32 without autocast, or as it is trained. Rounding is then measured: results change as much when the halves change
places or one is repeated. (That also changes small terms of pairs and of unbiased variances, which are not noticed
there below 0.1% of the loss; a load balance, an entropy of the mean or a centring are.)

Costs three forwards in each mode, more if they do not add up, and fetching eight to ten samples. A stream's samples are
read once and kept for training. What cannot be compared is skipped silently:

- a task that draws otherwise than by sample (`train.draws=device`, a generator of its own, NumPy)
- in training mode, a forward that changes the model's or the task's state, such as running statistics
- a loss that is not finite
- a batch whose halves hold other values (then only a mean is reported)
- a task or model that fails here: the first step reports the error
"""

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from trainapp.assembly.parts import Parts
from trainapp.assembly.trials import Observed, Samples, Sums, Trials, in_double, without_tf32
from trainapp.config.schema import Config
from trainapp.data.stream_reader import is_stream
from trainapp.errors import TrainingStopped, UserError
from trainapp.losses.losses import CheckedTask, compares_samples, is_built_in
from trainapp.memory.device import uncompiled
from trainapp.parallel.ranks import Ranks, SingleRank
from trainapp.rng import Drawing, Ledger
from trainapp.snapshot import Snapshot
from trainapp.stateful import Stateful, held_tensors
from trainapp.torch_private import has_values
from trainapp.training.engine import Engine, training_draws
from trainapp.training.evaluate import EVALUATION
from trainapp.training.session import Session
from trainapp.units import listed

MOST_DOUBLED = 64 * 2**20  # bytes of a model that is copied in fp64
# Tolerances, relative to the result. LEAST: what always counts as rounding, fp32's own. ROUNDING: in units of a coarser
# dtype's epsilon. FINE, COARSE: the most that may count as rounding if it is measured, COARSE with matmuls in less than
# fp32 precision, and for metrics.
LEAST, ROUNDING, FINE, COARSE = 1.2e-7, 8, 1e-3, 2e-2
IN_DOUBLE = 1e-12  # epsilons below it are fp64's
SHUFFLED = "draws of randperm.generator_out"  # the topic in a ledger of a permutation of the batch: it mixes samples
FLOOR = 0.1  # per count: a loss whose summands cancel out has their rounding errors
_IF_MEANT = "If it is intended, set train.check_loss=false"
log = logging.getLogger(__name__)


class Comparison(NamedTuple):
    """The task's results by batch, see `Samples`: of `ab`, `a` and `b`, and of others if these do not add up.

    epsilon: relative rounding error of the coarsest dtype in the computation; 0 until it is known.
    """

    samples: Samples
    results: Mapping[str, Sums]
    epsilon: float = 0.0

    @property
    def most(self) -> float:
        """The largest relative difference that may count as rounding."""
        return FINE if self.epsilon < 1e-6 else COARSE

    def loss_adds_up(self) -> bool:
        """Whether the halves' losses add up to the whole's, up to rounding."""
        loss = {name: sums.loss for name, sums in self.results.items()}
        scale = size_of(loss) + FLOOR * abs(self.results["ab"].divisor)
        tolerance = LEAST * scale
        if self.epsilon > IN_DOUBLE:
            expected = {"ba": loss["ab"], "aa": 2 * loss["a"], "bb": 2 * loss["b"]}
            noise = [abs(loss[name] - same) for name, same in expected.items() if name in loss]
            measured = 4 * max(noise, default=math.inf)
            tolerance = min(max(measured, ROUNDING * self.epsilon * scale), self.most * scale)
        return abs(loss["ab"] - loss["a"] - loss["b"]) <= tolerance

    def of_metrics(self) -> dict[str, dict[str, float]]:
        """The values of each metric that `ab` and its halves have, by batch."""
        names = [name for name in self.results["ab"].metrics if all(name in r.metrics for r in self.results.values())]
        return {name: {batch: sums.metrics[name] for batch, sums in self.results.items()} for name in names}

    def all_add_up(self) -> bool:
        """Whether there is nothing to report."""
        return self.loss_adds_up() and all(map(metric_adds_up, self.of_metrics().values()))


def size_of(values: Mapping[str, float]) -> float:
    """The scale of some results."""
    return (abs(values["ab"]) + abs(values["a"]) + abs(values["b"])) / 2


def metric_adds_up(values: Mapping[str, float]) -> bool:
    """Whether the halves' values of a metric add up to the whole's. One that is not a number says nothing."""
    return not abs(values["ab"] - values["a"] - values["b"]) > COARSE * size_of(values)


class Mode(NamedTuple):
    """How a task is called. work: the name in the ledger of what it draws."""

    task: CheckedTask
    work: str
    training: bool


def modes_of(parts: Parts, model: nn.Module) -> list[Mode]:
    """The tasks in training and in evaluation, except for those that are known to be sums or to compare samples."""
    task, updates = parts.components.task, parts.components.updates
    trained = {training_draws(name): own for name, own in (updates or {"": task}).items()}
    modes = [Mode(task, EVALUATION, False), *(Mode(own, work, False) for work, own in trained.items() if updates)]
    modes += [Mode(own, work, True) for work, own in trained.items()]
    # Of trainapp's models, samples do not interact.
    is_own = type(model).__module__.startswith("trainapp.models.")
    known = [own for own in (*trained.values(), task) if compares_samples(own) or (is_own and is_built_in(own))]
    return [mode for mode in modes if mode.task not in known]


def require_sum(config: Config, parts: Parts, model: nn.Module, ranks: Ranks, ledger: Ledger) -> None:
    """Raises UserError for a loss, count or metric that does not add up, and errors of reading a stream. Collective.
    Call before the model is compiled or sharded. Restores everything a Snapshot covers; modules end up on the device.
    """
    was_checked = parts.resumes and is_stream(parts.components.train_data)  # which is not read from its start again
    modes = modes_of(parts, model)
    if was_checked or not modes:
        return
    problem = None
    # With parallel.fsdp.meta_init there are no values yet.
    if all(map(has_values, model.parameters())) and parts.first_samples(config.train.seed) is not None:
        stateful = Stateful(model=model, **{f"{mode.work} task": mode.task.unchecked for mode in modes})
        for module in (model, *stateful.modules.values()):
            module.to(parts.device)  # modules of a task are moved later anyway
        # Errors are raised again by the first step.
        with contextlib.suppress(Exception), Snapshot.of(stateful).undone():
            for mode in modes:
                with contextlib.suppress(Exception):
                    problem = problem or problem_of(_ways(mode.task, config, parts, model), mode, ledger, SingleRank())
        if parts.device.type == "cuda":
            torch.cuda.empty_cache()
    if problem := _of_any_rank(problem, ranks):
        raise UserError(problem)


def recheck(parts: Parts, session: Session) -> None:
    """Compare once more, between two steps, unless forwards write parameters, which an evaluation of shards does not
    undo. Raises TrainingStopped. Collective.
    """
    config, engine, problem = session.config, session.engine, None
    if any(session.ranks.all_gather_object(engine.snapshot.written)):
        return
    with contextlib.nullcontext() if engine.strategy.forward_is_collective else contextlib.suppress(Exception):
        for mode in modes_of(parts, engine.state.model):
            if not mode.training:
                ways = _ways(mode.task, config, parts, engine.state.model, engine)
                problem = problem or problem_of(ways, mode, engine.ledger, session.eval_ranks)
    if engine.strategy.forward_is_collective:
        engine.strategy.finish_accumulation()
    if problem := _of_any_rank(problem, session.ranks):
        newest = session.checkpointer.newest_name()
        raise TrainingStopped(
            f"after step {session.state.progress.step}, {problem}. What has been trained so far depends on the "
            f"micro-batch; the newest checkpoint is {newest or 'none'}"
        )


def _of_any_rank(problem: str | None, ranks: Ranks) -> str | None:
    return next(filter(None, ranks.all_gather_object(problem)), None)  # a rank may have run out of memory here


def _ways(
    task: CheckedTask, config: Config, parts: Parts, model: nn.Module, engine: Engine | None = None
) -> list[Callable[[], Trials]]:
    """How the task may be called, the most precise way first. engine: the model's, once it is built."""
    if parts.samples is None:
        return []
    metrics = frozenset(parts.components.hooks["metrics"])
    arguments: Any = (task, model, parts.samples, parts.device, config.train.seed, metrics)
    new: Callable[..., Trials] = functools.partial(Trials, *arguments)
    if engine is not None:
        new = functools.partial(new, snapshot=engine.snapshot)  # without a second copy of the parameters
    as_trained = functools.partial(new, around=lambda: parts.numerics.autocast)
    if engine and engine.strategy.forward_is_collective:
        return [functools.partial(as_trained, compute=functools.partial(engine.strategy.evaluate, task))]
    ways: list[Callable[[], Trials]] = [functools.partial(new, around=without_tf32), as_trained]
    if sum(tensor.nbytes for tensor in held_tensors([model, task.unchecked])) <= MOST_DOUBLED:
        ways.insert(0, functools.partial(in_double, *arguments))
    return ways


def problem_of(ways: Sequence[Callable[[], Trials]], mode: Mode, ledger: Ledger, ranks: Ranks) -> str | None:
    """The message about the task; None if its results add up or cannot be compared. Tries one way after another, and
    raises the error of the last. ledger: of what forwards draw. ranks: those that call the model together.
    """
    for number, way in enumerate(ways, start=1):
        try:
            with uncompiled():
                trial = way()
                compared = _compared(trial, mode, ledger, ranks)
        except Exception as error:
            if number == len(ways):
                raise
            log.debug("train.check_loss: trying another precision: %s", error)
            continue
        if trial.lost:
            log.warning("the check of the loss has written %s, frozen and in place", listed(trial.lost))
        return None if compared is None else _verdict(compared, mode.task.setting, mode.training)
    return None


def _compared(trial: Trials, mode: Mode, ledger: Ledger, ranks: Ranks) -> Comparison | None:
    """The results to compare; None if they cannot be compared. Raises errors of the task and the model."""
    places = ledger.places.get(mode.work)
    known = Ledger({} if places is None else {mode.work: places})

    def result(name: str, observed: Observed | None = None) -> Sums:
        positions = range(len(name) * trial.samples.number // 2)
        alike = Drawing((0,), positions, known, mode.work, alike=True)  # each sample draws the same
        return trial(name, mode.training, alike, observed)

    results = {name: result(name) for name in ("ab", "a", "b")}
    compared = Comparison(trial.samples, results)
    if ranks.all_reduce_min(int(compared.all_add_up())):
        return compared
    again = result("ab", observed := Observed())
    if observed.epsilon > IN_DOUBLE:
        results |= {name: result(name) for name in trial.samples.batches if name not in results}
    is_finite = all(math.isfinite(value) for sums in results.values() for value in (sums.loss, sums.divisor))
    is_frozen = places is not None and known.draws and known.depends.keys() <= {SHUFFLED}
    is_random = (observed.draws and not is_frozen) or again.drawn
    is_random = is_random or not math.isclose(again.loss, results["ab"].loss, rel_tol=1e-5)
    if is_random or not is_finite or (mode.training and observed.writes):
        return None
    return compared._replace(epsilon=observed.epsilon)


def _verdict(compared: Comparison, setting: str, training: bool = False) -> str | None:
    """The message; None if the results add up."""
    samples, whole, a, b = compared.samples, *(compared.results[name] for name in ("ab", "a", "b"))
    numbers = (
        f"for {samples.number} samples it returns {whole.loss:.9g} with a count of {whole.divisor:g}, and for their "
        f"halves {a.loss:.9g} with {a.divisor:g} and {b.loss:.9g} with {b.divisor:g}"
    )
    losses = {name: sums.loss for name, sums in compared.results.items()}
    is_small = size_of(losses) <= 1e-6 * min(1.0, abs(whole.divisor))
    if not is_small and _is_mean(losses, compared, compared.most):
        return (
            f"{setting}: the loss is a mean, but a sum is required: {numbers}. It would be divided by the count "
            "twice, and uneven micro-batches weighted wrongly: return the sum of the samples' (or tokens') losses and "
            f"their number, such as the mean times its number of summands. {_IF_MEANT}"
        )
    if samples.same and not compared.loss_adds_up():
        return (
            f"{setting}: the loss is not a sum over samples{' in training mode' * training}: {numbers}. It would "
            "depend on the micro-batch, and so on free memory. Do shapes broadcast, such as [B, 1] with [B]? If it "
            "compares or mixes the samples of its batch, or has a term of the whole batch such as a mixture's load "
            "balance, declare `whole_batch = True` on the task: its batch is then never cut (or give it embed and "
            "loss_of_embeddings: docs/extending.md). If the model normalises over the batch in evaluation mode, let it "
            f"use running statistics there. {_IF_MEANT}"
        )
    if samples.same and not math.isclose(whole.divisor, a.divisor + b.divisor, rel_tol=compared.most):
        return (
            f"{setting}: the count does not add up: {numbers}. Micro-batches would be weighted wrongly: return the "
            f"number of samples or tokens that the loss sums over, or the sum of their weights. {_IF_MEANT}"
        )
    return _verdict_on_metrics(compared, setting)


def _verdict_on_metrics(compared: Comparison, setting: str) -> str | None:
    for name, values in compared.of_metrics().items():
        if metric_adds_up(values):
            continue
        numbers = (
            f"for {compared.samples.number} samples it is {values['ab']:.6g}, and for their halves {values['a']:.6g} "
            f"and {values['b']:.6g}"
        )
        if _is_mean(values, compared, COARSE):
            return (
                f"{setting}: the metric {name} is a mean, but a sum is required: {numbers}. It would be divided by the "
                f"count once more: return the sum over the samples, such as the mean times the count. {_IF_MEANT}"
            )
        if compared.samples.same:
            return (
                f"{setting}: the metric {name} is not a sum over samples: {numbers}. It would depend on the "
                f"micro-batch: configure it as metrics.{name} (docs/extending.md), which sees all samples. {_IF_MEANT}"
            )
    return None


def _is_mean(values: Mapping[str, float], compared: Comparison, tolerance: float) -> bool:
    """Whether the whole batch's value is the mean of its halves' and not their sum. The mean is weighted equally or by
    their counts; if both hold the same values, with any weights (such as tokens, while the count is of samples).
    """
    whole, a, b = (values[name] for name in ("ab", "a", "b"))
    if abs(whole - a - b) <= tolerance * size_of(values):
        return False
    weights = [(1.0, 1.0), (compared.results["a"].divisor, compared.results["b"].divisor)]
    means = [(x * a + y * b) / (x + y) for x, y in weights if x + y]
    if any(math.isclose(whole, mean, rel_tol=tolerance) for mean in means):
        return True
    margin = tolerance * abs(whole)
    low, high = sorted((a, b))
    return compared.samples.same and low * high > 0 and low - margin <= whole <= high + margin
