"""The messages of the loss check: what refuses a task, what warns of it, and what the recipe says was compared."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainapp.trials.comparison import Comparison, Defect, DefectKind, Difference, SplitValues
from trainapp.trials.modes import Mode
from trainapp.trials.obstacles import Obstacle
from trainapp.trials.samples import Samples
from trainapp.units import listed

SMALL_DEVIATION = 1e-2  # relative: below it, a solver that stops at a tolerance may be the cause
_IF_MEANT = "If it is intended, set train.check_loss=false"

# --- what was compared, for the recipe


@dataclass(frozen=True)
class Inexactness:
    """How exactly a loss in fp64 adds up, if it does so to less than fp64's rounding. `str` continues "adds up"."""

    deviation: float = field(compare=False)  # relative: of the same loss, another one with noise on the parameters
    is_rounding: bool  # whether a part of the loss computes in less than fp64

    def __str__(self) -> str:
        reason = "what a sample gets depends a little on the others, as with an adaptive solver"
        if self.is_rounding:
            reason = f"a part computes in less than fp64, whose rounding may hide that {reason}"
        return f"to {self.deviation:.0e} only ({reason})"

    def message(self, mode: Mode, number: int) -> str:
        """Return what depends on the micro-batch, for the record.

        Args:
            mode: the task, and how it was called.
            number: of samples.
        """
        return (
            f"{mode.task.setting}: {_subject(mode)} of {number} samples is that of their halves to "
            f"{self.deviation:.0e} only, in fp64: "
            "what a sample gets depends a little on the others in its micro-batch, as with an adaptive solver whose "
            "tolerance is over the batch; one with fixed steps is exact"
        )


@dataclass(frozen=True)
class AddsUp:
    """Loss, count and metrics of a batch that add up. `str` continues "the loss"."""

    number: int  # of samples
    has_metrics: bool
    metrics_error: str  # why metrics could not be read; "" if they could
    skipped_metrics: tuple[str, ...]  # those that could not be compared
    are_collated_apart: bool  # whether the halves are known as training makes them alone
    without_unequal_parts: Obstacle | None = None  # why only equal halves were compared
    inexactness: Inexactness | None = None

    def __str__(self) -> str:
        also_compared = "do count and metrics" if self.has_metrics else "does its count"
        return self._with_details(f"adds up over {self.number} samples{self._collated}, as {also_compared}")

    def of_embeddings(self) -> str:
        """Return what continues "the embeddings"."""
        return self._with_details(f"are the same for {self.number} samples{self._collated} as for parts of them")

    @property
    def _collated(self) -> str:
        return " collated in halves" if self.are_collated_apart else ""

    def _with_details(self, text: str) -> str:
        if self.inexactness is not None:
            text += f", {self.inexactness}"
        if self.metrics_error:
            text += f" (metrics: {self.metrics_error})"
        elif self.skipped_metrics:
            text += f" (not {listed(self.skipped_metrics)}: not finite or not in all batches)"
        if self.without_unequal_parts is not None:
            text += f"; compared in halves alone: {self.without_unequal_parts}"
        return text


@dataclass(frozen=True)
class IsNoMean:
    """All that can be said of a batch that is not its halves joined. `str` continues "the loss"."""

    number: int  # of samples
    obstacle: Obstacle  # why nothing else is compared

    def __str__(self) -> str:
        return f"is no mean of {self.number} samples; no more is compared: {self.obstacle}"


@dataclass(frozen=True)
class DependsOnSplit:
    """A difference that may be meant, so that it refuses no task. `str` continues "the loss"."""

    number: int  # of samples
    difference: Difference
    message: str  # the warning

    def __str__(self) -> str:
        name = self.difference.name
        whole, first, second = self.difference.values
        in_halves = first + second
        return f"does not add up: the {name} is {whole:.6g} for {self.number} samples, {in_halves:.6g} in halves"

    def of_embeddings(self) -> str:
        """Return what continues "the embeddings"."""
        return f"are not the same for {self.number} samples as in halves ({_deviation_text(self.difference.values)})"


# --- what refuses the task


@dataclass(frozen=True)
class Refused:
    """A task that cannot be trained as it is."""

    message: str  # to the user


Finding = AddsUp | IsNoMean | DependsOnSplit | Refused | Obstacle  # what a comparison says of a task


def in_words(finding: AddsUp | IsNoMean | DependsOnSplit, mode: Mode) -> str:
    """Return what was compared, in words that continue "the loss", or "the embeddings" of an embedding loss."""
    if isinstance(finding, IsNoMean) or not mode.compares_embeddings:
        return str(finding)
    return finding.of_embeddings()


def refusal(defect: Defect, comparison: Comparison, mode: Mode) -> str:
    """Return the message about a task whose results are no sums over samples.

    Args:
        defect: what is wrong.
        comparison: has the numbers.
        mode: the task, and how it was called.
    """
    setting = mode.task.setting
    if mode.compares_embeddings:
        return _refusal_of_embeddings(comparison, mode)
    numbers = _loss_numbers(comparison)
    match defect.kind:
        case DefectKind.MEAN:
            return (
                f"{setting}: the loss is a mean, but a sum is required: {numbers}. It would be divided by the "
                "count twice, and uneven micro-batches weighted wrongly: return the sum of the samples' (or tokens') "
                f"losses and their number, such as the mean times its number of summands. {_IF_MEANT}"
            )
        case DefectKind.NOT_A_SUM:
            return (
                f"{setting}: the loss is not a sum over samples{_mode_text(mode)}: {numbers}. It "
                "would depend on the micro-batch, and so on free memory. Do shapes broadcast, such as [B, 1] with [B]? "
                "Are samples weighted, by their class, say? Then the count is the sum of their weights. If it "
                "compares or mixes the samples of its batch, or has a term of the whole batch such as a "
                "mixture's load balance, sum it over samples (a balance per sequence), or declare `whole_batch = True` "
                "on the task: its batch is then never split (or give it embed and loss_of_embeddings: "
                "docs/extending.md). If the model normalises over the batch in evaluation mode, let it use running "
                f"statistics there. {_hint_about_gradients(comparison)}{_hint_about_solvers(comparison)}{_IF_MEANT}"
            )
        case DefectKind.COUNT:
            return (
                f"{setting}: the count does not add up: {numbers}. Micro-batches would be weighted wrongly: "
                "return the number of samples or tokens that the loss sums over, or the sum of their weights. "
                f"{_IF_MEANT}"
            )
        case DefectKind.METRIC_MEAN:
            return _refusal_of_metric(defect.metric, "a mean", comparison, setting)
        case DefectKind.METRIC_NOT_A_SUM:
            return _refusal_of_metric(defect.metric, "not a sum over samples", comparison, setting)


def _hint_about_gradients(comparison: Comparison) -> str:
    if not comparison.computes_gradients:
        return ""
    return (
        "The task computes gradients itself (torch.autograd.grad or backward()): those of a batch's loss, as for SAM, "
        "an attack or a penalty, are no sum over samples if they are divided by the count or by a norm over the batch. "
    )


def _refusal_of_embeddings(comparison: Comparison, mode: Mode) -> str:
    return (
        f"{mode.task.setting}: its embed mixes samples{_mode_text(mode)}: the embeddings of {comparison.number} "
        f"samples are not those of {comparison.parts} ({_deviation_text(comparison.losses)}), but a row of an "
        "embedding must not depend on the other samples. They are embedded in micro-batches: the loss would depend on "
        "the micro-batch, and so on free memory, on the number of ranks and on batch.eval_micro_size. Normalise over "
        "the batch in loss_of_embeddings, which sees all samples of the step, not in embed or the model's forward; "
        "let BatchNorm use running statistics in evaluation mode (track_running_stats=True); or replace embed by a "
        "loss with `whole_batch = True`, whose batch is never split (docs/extending.md). "
        f"{_hint_about_solvers(comparison)}{_IF_MEANT}"
    )


def _deviation_text(values: SplitValues) -> str:
    return f"a sum over them differs by {abs(values.excess) / (values.size or 1.0):.1e}"


def _subject(mode: Mode) -> str:
    return "a sum over the embeddings" if mode.compares_embeddings else "the loss"


def _hint_about_solvers(comparison: Comparison) -> str:
    if comparison.loss_deviation >= SMALL_DEVIATION:
        return ""
    return (
        "An adaptive solver whose tolerance is over the batch (torchdiffeq's dopri5) does this, too: one with fixed "
        "steps does not, nor one that solves for each sample. "
    )


def _loss_numbers(comparison: Comparison) -> str:
    whole, first, second = comparison.losses
    counts = comparison.counts
    whole_text = f"{whole:.9g} with a count of {counts.whole:g}"
    parts_text = f"{first:.9g} with {counts.first:g} and {second:.9g} with {counts.second:g}"
    return f"for {comparison.number} samples it returns {whole_text}, and for {comparison.parts} {parts_text}"


def _refusal_of_metric(name: str, kind: str, comparison: Comparison, setting: str) -> str:
    values = comparison.metric_values(name)
    assert values is not None  # it was compared
    return (
        f"{setting}: the metric {name} is {kind}, but a sum is required: for {comparison.number} "
        f"samples it is {values.whole:.9g}, and for {comparison.parts} "
        f"{values.first:.9g} and {values.second:.9g}. It would depend on the micro-batch: return the sum of "
        "the samples' own values (of a mean over samples, that times the count), or configure it as "
        f"metrics.{name}, which sees all samples (docs/extending.md). {_IF_MEANT}"
    )


def refusal_of_padded_count(counts: SplitValues, samples: Samples, mode: Mode) -> str:
    """Return the message about a count that includes padding."""
    return (
        f"{mode.task.setting}: the count includes padding: {_split_numbers(counts, samples)}. The loss would be "
        "divided by a number that depends on the micro-batch, and so on free memory: sum the losses of the real "
        f"positions only, and return their number, such as `mask.sum()` or `(targets != -100).sum()`. {_IF_MEANT}"
    )


# --- what warns of it


def warning_of_difference(difference: Difference, samples: Samples, mode: Mode) -> str:
    """Return the message about results that depend on which samples are collated together."""
    cause = "the padding" if samples.as_trained.is_padded else "which samples are collated together"
    if mode.compares_embeddings:
        return (
            f"{mode.task.setting}: the embeddings depend on {cause}{_mode_text(mode)}: of {samples.number} samples "
            f"together they are not those of their halves ({_deviation_text(difference.values)}). So the result "
            "depends on the micro-batch, and that of an evaluation on batch.eval_micro_size: pass the model a mask, "
            "and leave padded positions out of what embed averages. If the model sees padding by design, such as "
            "convolutions over it, compare only runs with the same batch.micro_size and batch.eval_micro_size"
        )
    return (
        f"{mode.task.setting}: the {difference.name} depends on {cause}{_mode_text(mode)}: "
        f"{_split_numbers(difference.values, samples)}. So the result depends on the micro-batch, and that of an "
        "evaluation on batch.eval_micro_size. Either it is a mean over positions times the number of samples, or "
        "padded positions are in the sum, or the model sees padding without a mask: sum and count the real positions "
        "only, and pass the model a mask. If the model sees padding by design, such as convolutions over it, compare "
        "only runs with the same batch.micro_size and batch.eval_micro_size"
    )


def warning_instead_of_refusal(message: str, setting: str, when: str) -> str:
    """Return what is said of a task that would be refused, but whose run is under way.

    Args:
        message: of the refusal.
        setting: which names the task.
        when: it was seen, in words that begin a sentence.
    """
    finding = message.removeprefix(f"{setting}: ")
    return (
        f"{setting}: {when}, {finding}. The check before the first step did not show it: the run goes on, but from "
        "there on its result depends on the micro-batch"
    )


def _split_numbers(values: SplitValues, samples: Samples) -> str:
    verb = "padded" if samples.as_trained.is_padded else "collated"
    whole_text = f"for {samples.number} samples {verb} together it is {values.whole:.9g}"
    return f"{whole_text}, and for their halves {values.first:.9g} and {values.second:.9g}"


def _mode_text(mode: Mode) -> str:
    return " in training mode" if mode.training else ""


def warning_of_divided_metrics(names: Sequence[str], count: float, samples: Samples, mode: Mode) -> str:
    """Return the message about metrics that sum one value per sample, but are divided by a count of something else."""
    return (
        f"{mode.task.setting}: the metric {listed(names)} sums one value per sample, but is divided by the count, "
        f"which is {count:g} for {samples.number} samples. If its mean over samples is "
        "meant, return a tuple of this sum and its own count, such as (exact.sum(), len(exact))"
    )
