"""`train.check_loss`: whether the task's loss and metrics are sums over samples, so that a batch can be split.

A mean would be divided by the count again, making gradients that many times too small; a loss that compares the samples
of its batch depends on the micro-batch. Neither shows in a curve.

When: once, whenever a run's model is built, before it is compiled or sharded and before the first step; of a resumed
run, in the state of its checkpoint, since a loss may change with the stage of training. On every rank, each with its
own samples.

What is called: the task of evaluations and those of the updates, each in the modes in which a run calls it
(`trials.modes`), with the first four samples of training (`trials.samples`). A stream's are read once, and kept for
training. Without gradients, unless they are compared or the task itself needs some, as for a gradient penalty; with
BatchNorm in evaluation mode. A call leaves no trace (`trials.probe`).

Of an embedding loss, which sees the whole step, the embeddings of the samples are compared in its place: a row of them
must not depend on the other samples, or the loss depends on how a step is split (`trials.probe.sum_over_embeddings`).

What is compared: loss, count and metrics of the batch with those of its parts (`trials.parts`), to rounding
(`trials.comparison`). Metrics as strictly as the loss, since an objective may be one. In training mode and in fp64 also
the gradients (`trials.gradients`): those that do not add up, though the loss does, are named, not refused.

In which precision: to keep rounding from hiding a difference, a small model and its task are copied to fp64; what
cannot run in fp64 runs in fp32 without autocast, or as it is trained (`trials.precisions`). The copies are compared
once more with noise on their parameters: a layer that begins at zero hides what is before it.

What follows: a task whose results do not add up is refused, or, where a run continues from a checkpoint of its own,
noted as in `trials.later_steps`. So is a count that includes padding. Any other dependence on the padding may be meant
(convolutions over padded audio): it is noted in the record of draws, and warned of before the first step. The recipe
says what was compared, by mode, and what could not be and why.

It costs at most 35 forwards of at most four samples with two modes, and three backwards, 43 where batches are padded,
half of it for a large model, and more only where results do not add up.
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from trainapp.draws.record import DrawRecord, TopicKind
from trainapp.errors import UserError, summary_of
from trainapp.losses.losses import needs_no_check, needs_whole_batch
from trainapp.parallel.ranks import Ranks
from trainapp.trials.gradients import GradientFinding, compare_gradients, note_accumulation_hooks
from trainapp.trials.messages import AddsUp, DependsOnSplit, Finding, Refused, in_words, warning_instead_of_refusal
from trainapp.trials.modes import NO_CHECK_NEEDED, Mode, TrialSetup, has_all_values
from trainapp.trials.obstacles import Obstacle, Reason
from trainapp.trials.parts import ModeCalls, TaskFindings, compare_with_parts, draws_alike
from trainapp.trials.precisions import FP64, first_working_result, note_traces, precisions_to_try
from trainapp.trials.probe import TaskProbe
from trainapp.trials.samples import Samples

log = logging.getLogger(__name__)
# Standard deviation of what is added to the parameters of copies. Initial weights are about as large: layers that begin
# at zero then count, while the others still compute something like themselves.
NOISE = 0.1


class Outcome(NamedTuple):
    """The outcome of a check on a rank."""

    text: str  # what was compared, or why not, in words that continue "the loss"
    refusal: str | None = None  # the message about the task, if it cannot be trained
    # The messages about what depends on the micro-batch, by the kind of their topics.
    dependence: Mapping[TopicKind, str] = {}

    def depending(self, kind: TopicKind, message: str) -> "Outcome":
        """Return the outcome with one more message about what depends on the micro-batch."""
        return self._replace(dependence={**self.dependence, kind: message})

    def followed_by(self, text: str) -> "Outcome":
        """Return the outcome with more text."""
        return self._replace(text=f"{self.text}{text}")


class ModeOutcome(NamedTuple):
    """The outcomes of the checks of a mode on a rank."""

    loss: Outcome
    padding: Outcome | None = None  # see `TaskFindings`
    divided_metrics: str = ""
    has_compared_gradients: bool = False


class NoisyFindings(NamedTuple):
    """What copies with noise on their parameters say of a task."""

    sums: TaskFindings
    # Of gradients that do not add up, or why they were not compared. With noise only: without it, equal weights leave a
    # maximum to rounding, and with it the gradients.
    gradients: GradientFinding | Obstacle | None
    has_compared_gradients: bool


def require_sum(setup: TrialSetup, ranks: Ranks, draw_record: DrawRecord) -> dict[str, str]:
    """Raise UserError for a loss, count or metric that does not add up, and errors of reading a stream. Collective.

    Call before the model is compiled or sharded. Restores everything a Snapshot covers; modules end up on the device.

    Returns:
        By the name of the check, what was compared, or why not.
    """
    texts: dict[str, str] = {}

    # Skip modes whose check is not needed or not possible. Reading samples is only worth its time for the others.
    compared_modes = []
    for mode in setup.modes:
        if needs_no_check(mode.task, setup.model):
            texts[mode.check_name("loss")] = NO_CHECK_NEEDED
            continue
        reason = _reason_to_skip(setup, mode)
        if mode.compares_embeddings:
            texts[mode.check_name("loss")] = _not_compared(Obstacle(reason or Reason.EMBEDDINGS))
        if reason is None:
            compared_modes.append(mode)
        else:
            texts[_check_name(mode)] = _not_compared(Obstacle(reason))

    # Every rank has its own outcome: one may have run out of memory here. A problem of any of them ends all.
    warnings: list[str] = []
    uncompared_gradients = [mode for mode in setup.modes if mode.training and mode not in compared_modes]
    for mode in compared_modes:
        outcomes: list[ModeOutcome] = ranks.all_gather_object(_check_mode(setup, mode, draw_record))
        of_loss = [outcome.loss for outcome in outcomes]
        of_padding = [outcome.padding for outcome in outcomes if outcome.padding is not None]
        if setup.continues:
            of_loss = [_noted_refusal(outcome, mode) for outcome in of_loss]
            of_padding = [_noted_refusal(outcome, mode) for outcome in of_padding]
        texts[_check_name(mode)] = _merged_text(of_loss, mode, draw_record)
        warnings.extend(outcome.divided_metrics for outcome in outcomes if outcome.divided_metrics)
        if mode.training and not all(outcome.has_compared_gradients for outcome in outcomes):
            uncompared_gradients.append(mode)
        if of_padding:
            texts[_check_name(mode, padded=True)] = _merged_text(of_padding, mode, draw_record)

    if uncompared_gradients:
        note_accumulation_hooks(setup.model, draw_record)
    for text in dict.fromkeys(warnings):  # without repetitions: ranks and modes often agree
        log.warning("%s", text)
    if setup.device.type == "cuda":
        torch.cuda.empty_cache()
    return texts


def compares_any(setup: TrialSetup) -> bool:
    """Return whether `require_sum` compares any mode, the same on all ranks."""
    for mode in setup.modes:
        if not needs_no_check(mode.task, setup.model) and _reason_to_skip(setup, mode) is None:
            return True
    return False


def _check_name(mode: Mode, padded: bool = False) -> str:
    """Return the name in the recipe of what a mode compares."""
    if mode.compares_embeddings:
        return mode.check_name("padded_embeddings" if padded else "embeddings")
    return mode.check_name("padding" if padded else "loss")


def _reason_to_skip(setup: TrialSetup, mode: Mode) -> Reason | None:
    """Return why a mode is not compared, the same on all ranks; None if it is."""
    if not setup.settings.check_loss:
        return Reason.SWITCHED_OFF
    if needs_whole_batch(mode.task):
        return Reason.WHOLE_BATCH
    if setup.resumes and setup.samples.is_of_stream:
        return Reason.RESUMED_STREAM
    if not has_all_values(setup.model):
        return Reason.NO_VALUES
    return None


# --- a mode, on a rank


def _check_mode(setup: TrialSetup, mode: Mode, draw_record: DrawRecord) -> ModeOutcome:
    """Compare the first samples in the first precision that works, and in fp64 once more with noise on the copies."""
    samples = setup.samples.fetch()
    if isinstance(samples, Obstacle):
        return ModeOutcome(Outcome(_not_compared(samples)))

    # Without noise, in the most precise way that works.
    compare = functools.partial(compare_with_parts, mode=mode, draw_record=draw_record)
    try:
        result = first_working_result(precisions_to_try(setup, samples, mode.task), compare, mode.is_trained)
        note_traces(result, draw_record)
    except Exception as error:  # the first step raises it again
        return ModeOutcome(Outcome(_not_compared(Obstacle(Reason.ERROR, summary_of(error)))))
    plain = result.value

    loss = _outcome(plain.loss, result.precision, mode)
    padding = None if plain.padding is None else _outcome(plain.padding, result.precision, mode)
    reasons = [f"; not in {precision}: {reason}" for precision, reason in result.failures.items()]
    loss = loss.followed_by("".join(reasons))
    outcome = ModeOutcome(loss, padding, plain.divided_metrics)
    if result.precision != FP64 or loss.refusal is not None:
        return outcome

    # With noise: what a layer that begins at zero has hidden shows now. With gradients, of a loss that adds up.
    try:
        noisy = _compare_with_noise(setup, samples, mode, draw_record)
    except Exception as error:
        return outcome._replace(loss=loss.followed_by(f"; with noise: {summary_of(error)}"))
    loss = _with_noise(loss, plain.loss, noisy.sums.loss, mode)
    if noisy.gradients is not None:
        loss = _with_gradients(loss, noisy.gradients, mode, samples.number)
    if padding is not None and plain.padding is not None and noisy.sums.padding is not None:
        padding = _with_noise(padding, plain.padding, noisy.sums.padding, mode)
    return outcome._replace(loss=loss, padding=padding, has_compared_gradients=noisy.has_compared_gradients)


def _compare_with_noise(setup: TrialSetup, samples: Samples, mode: Mode, draw_record: DrawRecord) -> NoisyFindings:
    """Return the findings about copies in fp64 with noise on their parameters, which does not change what is summed."""

    def compare(probe: TaskProbe) -> NoisyFindings:
        findings = compare_with_parts(probe, mode, draw_record, looks_for_divided_metrics=False)
        gradients = None
        has_compared = False
        if mode.training and isinstance(findings.loss, AddsUp):
            loss_is_exact = findings.loss.inexactness is None
            gradients = compare_gradients(ModeCalls(probe, mode, draw_record), loss_is_exact)
            has_compared = samples.is_joined and not isinstance(gradients, Obstacle)
        return NoisyFindings(findings, gradients, has_compared)

    fp64_only = precisions_to_try(setup, samples, mode.task, noise=NOISE)[:1]
    return first_working_result(fp64_only, compare, mode.is_trained).value


# --- findings in words


def _outcome(finding: Finding, precision: str, mode: Mode) -> Outcome:
    """Return the outcome of a comparison in this precision."""
    match finding:
        case Refused(message):
            return Outcome("", refusal=message)
        case Obstacle():
            return Outcome(_not_compared(finding))
        case DependsOnSplit():
            text = f"{in_words(finding, mode)}, in {precision}"
            return Outcome(text, dependence={TopicKind.PADDING: finding.message})
        case _:
            return _with_inexactness(Outcome(f"{in_words(finding, mode)}, in {precision}"), finding, mode)


def _with_inexactness(outcome: Outcome, finding: Finding, mode: Mode) -> Outcome:
    """Return the outcome with what is said of a loss that adds up less exactly than rounding explains."""
    if not isinstance(finding, AddsUp) or finding.inexactness is None or finding.inexactness.is_rounding:
        return outcome
    return outcome.depending(TopicKind.SUM, finding.inexactness.message(mode, finding.number))


def _with_gradients(outcome: Outcome, finding: GradientFinding | Obstacle, mode: Mode, number: int) -> Outcome:
    """Return the outcome of a loss that adds up with what was found about its gradients."""
    if isinstance(finding, Obstacle):
        return outcome.followed_by(f"; its gradients are {_not_compared(finding)}")
    message = finding.message(mode, number)
    return outcome.followed_by(f"; {finding}").depending(TopicKind.GRADIENTS, message)


def _with_noise(outcome: Outcome, plain: Finding, noisy: Finding, mode: Mode) -> Outcome:
    """Return the outcome together with that of the same comparison with noise on the parameters.

    Args:
        outcome: without noise.
        plain: the finding without noise.
        noisy: the one with noise.
        mode: the task, and how it was called.
    """
    if isinstance(plain, (Refused, DependsOnSplit)):
        return outcome

    # The same with noise: say so once, rather than repeat it.
    if noisy == plain:
        return outcome if isinstance(plain, Obstacle) else outcome.followed_by(", with noise too")

    match noisy:
        case Refused(message):
            return outcome._replace(refusal=message)
        case Obstacle():
            return outcome.followed_by(f"; with noise: {_not_compared(noisy)}")
        case DependsOnSplit():
            outcome = outcome.depending(TopicKind.PADDING, f"{noisy.message}. Seen with noise on the parameters")
        case _:
            outcome = _with_inexactness(outcome, noisy, mode)
    return outcome.followed_by(f"; with noise: {in_words(noisy, mode)}")


def _not_compared(obstacle: Obstacle) -> str:
    return f"not compared: {obstacle}"


# --- the outcomes of all ranks


def _merged_text(outcomes: Sequence[Outcome], mode: Mode, draw_record: DrawRecord) -> str:
    """Return what the ranks say of a check, and note once per task what depends on the micro-batch. Raises UserError
    for a task that any of them refuses.
    """
    for outcome in outcomes:
        if outcome.refusal is not None:
            raise UserError(outcome.refusal)
        for kind, message in outcome.dependence.items():
            draw_record.note(kind.topic(mode.task.setting), message)
    texts = [outcome.text for outcome in outcomes]
    if TopicKind.DRAWS.topic(mode.work) in draw_record.depends and draws_alike(mode, draw_record):
        texts = [_if_draws_are_alike(text) for text in texts]
    return "; ".join(dict.fromkeys(texts))


def _noted_refusal(outcome: Outcome, mode: Mode) -> Outcome:
    """Return the outcome for a run that continues: what would refuse the task is noted, as in a later step."""
    if outcome.refusal is None:
        return outcome
    setting = mode.task.setting
    text = warning_instead_of_refusal(outcome.refusal, setting, "in the state of the run's checkpoint")
    noted = Outcome("is no sum any more, in the state of the run's checkpoint", dependence=outcome.dependence)
    return noted.depending(TopicKind.LATER_SUM, text)


def _if_draws_are_alike(text: str) -> str:
    """Return what adds up with its condition. With each sample's own draws it does not: so says the check of draws."""
    if not text.startswith(("adds up ", "are the same ")):
        return text
    return text.replace(" samples", " samples that all draw the same", 1)
