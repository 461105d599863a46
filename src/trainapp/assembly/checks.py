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
recomputed with every number changed by rounding: an argmax may flip, and summands of both signs cancel out.

Where a batch is more than its halves joined, mostly because it is padded, it is also compared with its halves as
training makes them (`assembly.padding`). A count that includes padding is refused. A loss or metric that depends on the
padding may be meant (convolutions over padded audio): it is noted, and warned of before the first step.

Costs six forwards in each mode, three of a large model, two thirds more of padded batches, and more if they do not add
up. A stream's samples are read once, and kept for training. What was compared, and what could not be and why, is in
`Resources.checks` by mode.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from trainapp.assembly.comparison import IN_DOUBLE, Comparison
from trainapp.assembly.resources import Resources
from trainapp.assembly.trials import (
    DOUBLE,
    UNEVEN,
    Observed,
    Rounding,
    Sums,
    TaskProbe,
    Tried,
    first_that_works,
    precisions_to_try,
)
from trainapp.config.schema import Config
from trainapp.data.stream_reader import is_stream
from trainapp.errors import UserError, summary_of
from trainapp.losses.losses import CheckedTask, has_embeddings, is_built_in, needs_whole_batch
from trainapp.parallel.ranks import Ranks
from trainapp.rng import PADDING, DrawRecord, SampleDraws, topic_of
from trainapp.torch_private import has_values
from trainapp.training.engine import training_draws
from trainapp.training.evaluate import EVALUATION
from trainapp.units import listed

SHUFFLED = topic_of("randperm.generator_out")  # a permutation of the batch: it mixes samples
NOISE = 0.1  # standard deviation of what is added to parameters
REPEATS = 8  # computations with other rounding; of two numbers that are close, the larger one changes in some of them
SWAPPED: tuple[str, ...] = ("ba", "aa", "bb")  # batches of the same samples, which measure rounding
NO_CHECK_NEEDED = "no check needed, since task and model are trainapp's own"


class Mode(NamedTuple):
    """How a task is called. work: names its draws in the record. update: the name of its update, if any."""

    task: CheckedTask
    work: str
    training: bool
    update: str = ""

    @property
    def is_trained(self) -> bool:
        """Whether a run calls the task with gradients."""
        return self.work != EVALUATION

    def check(self, subject: str) -> str:
        """The name of a check of its "loss", "padding" or "draws" in `Resources.checks`."""
        update = f" of update {self.update}" if self.update else ""
        return f"{subject}{update}{' in training' if self.training else ''}"


class Outcome(NamedTuple):
    """Of a comparison. problem: the message about the task, None without one. text: what was compared, or why not.
    dependence: the message about what depends on the micro-batch. cut: the outcome for a batch and its halves as
    training makes them, see `Samples.cut`; None where `text` tells it, or where there is nothing to tell.
    """

    problem: str | None
    text: str
    is_compared: bool = True
    dependence: str = ""
    cut: "Outcome | None" = None


def modes_of(resources: Resources) -> list[Mode]:
    """The tasks in evaluation and in training."""
    task, updates = resources.targets.task, resources.targets.updates
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


def require_sum(config: Config, resources: Resources, model: nn.Module, ranks: Ranks, draw_record: DrawRecord) -> None:
    """Raises UserError for a loss, count or metric that does not add up, and errors of reading a stream. Collective.
    Call before the model is compiled or sharded. Restores everything a Snapshot covers; modules end up on the device.
    """
    compared = []
    for mode in modes_of(resources):
        if reason := _reason_to_skip(config, resources, model, mode):
            resources.note_check(mode.check("loss"), reason)
        else:
            compared.append(mode)
    if compared:
        resources.first_samples(config.train.seed)
    for mode in compared:
        outcome = _outcome(config, resources, model, mode, draw_record)
        of_ranks: list[Outcome] = ranks.all_gather_object(outcome)  # a rank may have run out of memory here
        _note(of_ranks, mode.check("loss"), mode, resources, draw_record)
        if of_cut := [of_rank.cut for of_rank in of_ranks if of_rank.cut is not None]:
            _note(of_cut, mode.check("padding"), mode, resources, draw_record)
    if resources.device.type == "cuda":
        torch.cuda.empty_cache()


def _note(outcomes: Sequence[Outcome], name: str, mode: Mode, resources: Resources, draw_record: DrawRecord) -> None:
    """Record the ranks' outcomes of a check, what depends on the micro-batch once per task. Raises UserError for a
    problem of any of them.
    """
    for outcome in outcomes:
        if outcome.problem is not None:
            raise UserError(outcome.problem)
        if outcome.dependence:
            draw_record.depends.setdefault(f"{PADDING}{mode.task.setting}", outcome.dependence)
    resources.note_check(name, "; ".join(dict.fromkeys(outcome.text for outcome in outcomes)))


def _reason_to_skip(config: Config, resources: Resources, model: nn.Module, mode: Mode) -> str:
    """Why a mode is not compared, the same on all ranks; "" if it is."""
    if is_known(mode, model):
        return NO_CHECK_NEEDED
    if not config.train.check_loss:
        return "not compared: train.check_loss=false"
    if has_embeddings(mode.task):
        return "not compared: an embedding loss compares the samples of the whole step"
    if needs_whole_batch(mode.task):
        return "not compared: the task declares whole_batch, its batch is never cut"
    if resources.resumes and is_stream(resources.targets.train_data):
        return "not compared: a resumed run does not read its stream from the start"
    reason = without_values(model)
    return f"not compared: {reason}" if reason else ""


def _outcome(config: Config, resources: Resources, model: nn.Module, mode: Mode, draw_record: DrawRecord) -> Outcome:
    """The comparison with the first samples, in the first precision that works, and with noise on copies in fp64."""
    if resources.samples is None:
        return _not_compared(resources.samples_error)
    ways = functools.partial(precisions_to_try, mode.task, config, resources, model)
    check = functools.partial(outcome_of, mode=mode, draw_record=draw_record)
    try:
        tried = first_that_works(ways(), check, mode.is_trained)
    except Exception as error:  # the first step raises it again
        return _not_compared(summary_of(error))
    outcome = _in_precision(tried.result, tried)
    if outcome.problem is not None or tried.precision != DOUBLE:
        return outcome
    try:
        with_noise = first_that_works(ways(noise=NOISE)[:1], check, mode.is_trained).result
    except Exception as error:
        return outcome._replace(text=f"{outcome.text}; with noise: {summary_of(error)}")
    cut = outcome.cut
    if cut is not None and tried.result.cut is not None and with_noise.cut is not None:
        cut = _with_noise(cut, with_noise.cut, tried.result.cut.text)
    return _with_noise(outcome, with_noise, tried.result.text)._replace(cut=cut)


def _in_precision(outcome: Outcome, tried: Tried[Outcome]) -> Outcome:
    """The outcome with its precision in the text, and the reasons why there was none higher."""
    text = f"{outcome.text}, in {tried.precision}" if outcome.is_compared else outcome.text
    for precision, reason in tried.failures.items():
        text += f"; not in {precision}: {reason}"
    cut = outcome.cut
    if cut is not None and cut.is_compared:
        cut = cut._replace(text=f"{cut.text}, in {tried.precision}")
    return outcome._replace(text=text, cut=cut)


def _with_noise(outcome: Outcome, noisy: Outcome, plain_text: str) -> Outcome:
    """The outcome together with that of the same comparison with noise on the parameters. plain_text: the outcome's,
    without its precision.
    """
    if outcome.problem is not None or outcome.dependence:
        return outcome
    if noisy.text == plain_text:
        text = f"{outcome.text}, with noise too" if outcome.is_compared else outcome.text
        return outcome._replace(problem=noisy.problem, text=text)
    dependence = f"{noisy.dependence}. Seen with noise on the parameters" if noisy.dependence else ""
    text = f"{outcome.text}; with noise: {noisy.text}"
    return outcome._replace(problem=noisy.problem, text=text, dependence=dependence)


def _not_compared(reason: str) -> Outcome:
    return Outcome(None, f"not compared: {reason}", is_compared=False)


class Calls:
    """Calls of a task with a trial's batches, by their names, with draws as in training. Attributes: `is_learnt`,
    whether it is known which draws are whose.
    """

    def __init__(self, trial: TaskProbe, mode: Mode, draw_record: DrawRecord):
        places = draw_record.places.get(mode.work)
        self.trial, self.mode = trial, mode
        self._places = places
        self._known = DrawRecord({} if places is None else {mode.work: places})
        # If the shapes do not tell whose draws are whose, each sample draws the same.
        self._alike = places is None or any(place.rows > 1 or place.varies for place in places.values())

    def __call__(self, name: str, observed: Observed | Rounding | None = None) -> Sums:
        positions = self.trial.samples.positions(name)
        drawing = SampleDraws((0,), positions, self._known, self.mode.work, alike=self._alike)
        return self.trial(name, self.mode.training, drawing, observed)

    @property
    def is_learnt(self) -> bool:
        return self._places is not None and self._known.draws and self._known.depends.keys() <= {SHUFFLED}

    def rounded(self, name: str) -> list[Sums]:
        """The results for a batch, computed with other rounding."""
        return [self(name, Rounding(self.trial.device, seed)) for seed in range(REPEATS)]


def outcome_of(trial: TaskProbe, mode: Mode, draw_record: DrawRecord) -> Outcome:
    """Compare a task's results. Raises errors of the task and the model. draw_record: of what forwards draw."""
    call, samples = Calls(trial, mode, draw_record), trial.samples
    results = {name: call(name) for name in ("ab", "a", "b")}
    if any(sums.drawn for sums in results.values()):
        draw_record.depends["python"] = (
            "the forward draws from Python's or NumPy's generator: the numbers depend on the cut"
        )
    outcome = _outcome_of_sum(call, results)
    if outcome.problem is not None:
        return outcome
    if not samples.cut.names:
        cut = _not_compared(samples.cut.reason) if samples.cut.reason else None
    elif samples.same and not outcome.is_compared:
        cut = outcome
    else:
        try:
            cut = _outcome_of_cut(call, results)
        except Exception as error:  # for the longest samples alone, such as their memory: training meets it
            cut = _not_compared(summary_of(error))
    if samples.same:
        return outcome._replace(cut=cut)
    if cut is not None and cut.is_compared:
        return cut
    reason = "not compared: a batch is not its halves joined" if cut is None else cut.text
    return outcome._replace(text=f"{outcome.text}; no more is {reason.removeprefix('not ')}")


def _outcome_of_sum(call: Calls, results: Mapping[str, Sums]) -> Outcome:
    """The comparison of a batch with its halves joined. results: of `ab`, `a` and `b`."""
    mode, samples = call.mode, call.trial.samples
    comparison = Comparison(samples, results)
    if comparison.problem(mode.task.setting, mode.training) is None:
        problem, reason = _problem_of_unequal_parts(call, results["ab"])
        text = f"{comparison.compared()}; in halves alone: {reason}" if reason else comparison.compared()
        return Outcome(problem, text)

    again = call("ab", observed := Observed())
    if observed.epsilon > IN_DOUBLE:
        results = {**results, **{name: call(name) for name in SWAPPED if name in samples.batches}}
    if reason := _reason_not_to_judge(mode, results, again, observed, call.is_learnt):
        return _not_compared(reason)
    comparison = Comparison(samples, results, observed.epsilon_of_loss, observed.epsilon)
    if comparison.failing_metrics():
        comparison = comparison._replace(rounded=tuple(sums.metrics for sums in call.rounded("ab")))
    return Outcome(comparison.problem(mode.task.setting, mode.training), comparison.compared())


def _problem_of_unequal_parts(call: Calls, whole: Sums) -> tuple[str | None, str]:
    """Compare one sample and the others with all of them, where equal halves add up: weights and rounded shares may be
    alike in both halves.

    Returns:
        The message about the task, None without a problem; and why nothing was compared, empty if it was.
    """
    mode = call.mode
    samples = call.trial.samples
    if UNEVEN[0] not in samples.batches:
        return None, ""
    try:
        first, rest = (call(name) for name in UNEVEN)
    except Exception as error:  # a model may not run a single sample: training makes none then
        return None, summary_of(error)
    if not (math.isfinite(first.loss) and math.isfinite(rest.loss)):
        return None, "the loss of a single sample is not finite"
    comparison = Comparison(samples, {"ab": whole, "a": first, "b": rest}, parts="the first and the others")
    if comparison.difference() is None:
        return None, ""
    again = call("ab", observed := Observed())
    if reason := _reason_not_to_judge(mode, {"ab": whole}, again, observed, call.is_learnt):
        return None, reason
    comparison = _with_rounding(comparison, observed, call.rounded("ab"))
    if comparison.difference() is None:
        return None, ""
    return comparison.problem(mode.task.setting, mode.training), ""


def _outcome_of_cut(call: Calls, results: Mapping[str, Sums]) -> Outcome:
    """The comparison of a batch with its halves as training makes them. results: those that are known."""
    mode, samples = call.mode, call.trial.samples
    halves = dict(zip(("ab", "a", "b"), samples.cut.names, strict=True))
    of_cut = {half: results[name] if name in results else call(name) for half, name in halves.items()}
    comparison = Comparison(samples._replace(same=True), of_cut)
    difference = comparison.difference()
    if difference is not None:
        again = call(halves["ab"], observed := Observed())
        if reason := _reason_not_to_judge(mode, of_cut, again, observed, call.is_learnt):
            return _not_compared(reason)
        comparison = _with_rounding(comparison, observed, call.rounded(halves["ab"]))
        difference = comparison.difference()
    if difference is None:
        return Outcome(None, comparison.compared("" if samples.same else " collated in halves"))
    if difference.counts_padding and samples.cut.is_padded:
        return Outcome(difference.refusal(mode.task.setting), difference.text())
    return Outcome(None, difference.text(), dependence=difference.warning(mode.task.setting, mode.training))


def _with_rounding(comparison: Comparison, observed: Observed, rounded: Sequence[Sums]) -> Comparison:
    """Return the comparison with what rounding may change. rounded: the whole batch's results with other rounding."""
    return comparison._replace(
        epsilon=observed.epsilon_of_loss,
        epsilon_of_metrics=observed.epsilon,
        rounded=tuple(sums.metrics for sums in rounded),
        rounded_losses=tuple(sums.loss for sums in rounded),
    )


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
    # Observed, torch may choose other kernels, such as for an encoder layer: in 16 bits their rounding shows.
    if not math.isclose(again.loss, results["ab"].loss, rel_tol=max(1e-5, observed.epsilon_of_loss)):
        return "two calls with the same samples differ"
    return ""
