"""Compares a task's results for a batch with those for its halves, to the rounding of their computation."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from trainapp.assembly.probe import Sums
from trainapp.assembly.samples import Samples
from trainapp.units import listed

# Relative rounding errors (machine epsilons) tell the precision of a computation: fp64 has 2e-16, fp32 1.2e-7, fp16
# 1e-3 and bf16 8e-3. These bounds lie in the gaps.
MAX_FP64_EPSILON = 1e-12
MAX_FP32_EPSILON = 1e-6

# Tolerances, relative to the size of the results.
FP32_ROUNDING = 1.2e-7  # fp32's epsilon: always counts as rounding, also in fp64, whose own is far below it
EPSILONS_OF_ROUNDING = 8  # in epsilons of the computation's dtype: a result is rounded a few times on its way
# The most that may count as rounding, however much was measured: otherwise a term of the whole batch that changes with
# the order of the samples would pass for it.
MAX_ROUNDING = 1e-3  # of computations in fp32 or fp64; the price: smaller terms of the whole batch go unnoticed
MAX_COARSE_ROUNDING = 2e-2  # with matmuls in less than fp32 precision: a few epsilons of bf16

# Rounding is measured by a few repetitions, and another one may change the result more: allow so many times as much.
SAFETY_FACTOR = 4
# Added to the size of a loss, per count: summands of about 1 may cancel out in the sum, their rounding errors do not.
SIZE_PER_COUNT = 0.1
NEGLIGIBLE_LOSS = 1e-6  # per count, up to 1: about zero, so that sum and mean cannot be told apart

_IF_MEANT = "If it is intended, set train.check_loss=false"
_WHY = (
    "Either it is a mean over positions times the number of samples, or padded positions are in the sum, or the model "
    "sees padding without a mask: sum and count the real positions only, and pass the model a mask. If the model sees "
    "padding by design, such as convolutions over it, compare only runs with the same batch.micro_size and "
    "batch.eval_micro_size"
)
Values = Mapping[str, float]  # of one result, by batch: `ab`, `a`, `b` and perhaps others


class Comparison(NamedTuple):
    """The task's results for a batch, its two parts, and more batches if these do not add up."""

    samples: Samples
    results: Mapping[str, Sums]  # by batch, see `Samples`: of `ab`, `a` and `b`, and perhaps `ba`, `aa` and `bb`
    epsilon: float = 0.0  # of the coarsest dtype in the computation of the loss, relative; 0 until it is known
    epsilon_of_metrics: float = 0.0  # the same of the metrics
    rounded: tuple[Mapping[str, float], ...] = ()  # the metrics of `ab` computed with other rounding: `RandomRounding`
    rounded_losses: tuple[float, ...] = ()  # its losses; without them, swapped halves measure the rounding of the loss
    parts: str = "their halves"  # what `a` and `b` are, in words

    def compared(self, addition: str = "") -> str:
        """Return what has been compared, in words that continue "the loss".

        Args:
            addition: to "over 4 samples".
        """
        whole = self.results["ab"]
        if not self.samples.is_joined:
            return f"is no mean of {self.samples.number} samples"
        also_compared = "do count and metrics" if whole.metrics else "does its count"
        text = f"adds up over {self.samples.number} samples{addition}, as {also_compared}"
        if whole.metrics_error:
            return f"{text} (metrics: {whole.metrics_error})"
        skipped = [name for name in whole.metrics if not self._has_numbers(name)]
        if skipped:
            text += f" (not {listed(skipped)}: not finite or not in all batches)"
        return text

    def problem(self, setting: str, training: bool) -> str | None:
        """Return the message about the task; None if the results add up.

        Args:
            setting: the task's.
            training: whether it was called in training mode.
        """
        whole = self.results["ab"]
        losses = self._losses()
        max_rounding = _max_rounding(self.epsilon)
        is_zero = size_of(losses) <= NEGLIGIBLE_LOSS * min(1.0, abs(whole.divisor))
        if not is_zero and self._is_mean(losses, max_rounding):
            return (
                f"{setting}: the loss is a mean, but a sum is required: {self._numbers()}. It would be divided by the "
                "count twice, and uneven micro-batches weighted wrongly: return the sum of the samples' (or tokens') "
                f"losses and their number, such as the mean times its number of summands. {_IF_MEANT}"
            )
        if self.samples.is_joined and not self._loss_adds_up(losses, max_rounding):
            mode = " in training mode" if training else ""
            return (
                f"{setting}: the loss is not a sum over samples{mode}: {self._numbers()}. It "
                "would depend on the micro-batch, and so on free memory. Do shapes broadcast, such as [B, 1] with [B]? "
                "Are samples weighted, by their class, say? Then the count is the sum of their weights. If it "
                "compares or mixes the samples of its batch, or has a term of the whole batch such as a "
                "mixture's load balance, sum it over samples (a balance per sequence), or declare `whole_batch = True` "
                "on the task: its batch is then never cut (or give it embed and loss_of_embeddings: docs/extending.md)."
                " If the model normalises over the batch in evaluation mode, let it use running statistics there. "
                f"{_IF_MEANT}"
            )
        count_of_parts = self.results["a"].divisor + self.results["b"].divisor
        if self.samples.is_joined and not math.isclose(whole.divisor, count_of_parts, rel_tol=max_rounding):
            return (
                f"{setting}: the count does not add up: {self._numbers()}. Micro-batches would be weighted wrongly: "
                "return the number of samples or tokens that the loss sums over, or the sum of their weights. "
                f"{_IF_MEANT}"
            )
        return self._problem_of_metrics(setting)

    def _numbers(self) -> str:
        whole = self.results["ab"]
        a = self.results["a"]
        b = self.results["b"]
        whole_text = f"{whole.loss:.9g} with a count of {whole.divisor:g}"
        parts_text = f"{a.loss:.9g} with {a.divisor:g} and {b.loss:.9g} with {b.divisor:g}"
        return f"for {self.samples.number} samples it returns {whole_text}, and for {self.parts} {parts_text}"

    def _problem_of_metrics(self, setting: str) -> str | None:
        if not self.samples.is_joined and self.samples.cut.reason:
            return None  # masks at random differ between the batches: a sum of few may look like a mean
        for name in self.failing_metrics():
            values = self._metric_values(name)
            is_mean = self._is_mean(values, MAX_COARSE_ROUNDING)
            if is_mean or self.samples.is_joined:
                kind = "a mean" if is_mean else "not a sum over samples"
                return (
                    f"{setting}: the metric {name} is {kind}, but a sum is required: for {self.samples.number} "
                    f"samples it is {values['ab']:.9g}, and for {self.parts} "
                    f"{values['a']:.9g} and {values['b']:.9g}. It would depend on the micro-batch: return the sum of "
                    "the samples' own values (of a mean over samples, that times the count), or configure it as "
                    f"metrics.{name}, which sees all samples (docs/extending.md). {_IF_MEANT}"
                )
        return None

    def difference(self) -> "Difference | None":
        """Return what of the whole batch is not the sum of its halves', the count first; None if everything is."""
        # The count, exactly where its dtype allows it: one that includes padding differs by few of many.
        counts = {name: sums.divisor for name, sums in self.results.items()}
        count_of_halves = counts["a"] + counts["b"]
        max_rounding = _max_rounding(self.epsilon)
        are_integers = all(map(float.is_integer, counts.values()))
        are_exact = are_integers and max_rounding == MAX_ROUNDING  # integers of 16 bits are rounded
        if not math.isclose(counts["ab"], count_of_halves, rel_tol=0.0 if are_exact else max_rounding):
            counts_padding = are_integers and counts["ab"] > count_of_halves
            return Difference("count", counts, self.samples, counts_padding)

        losses = self._losses()
        if not self._loss_adds_up(losses, max_rounding):
            return Difference("loss", losses, self.samples)
        failing_metrics = self.failing_metrics()
        if failing_metrics:
            name = failing_metrics[0]
            return Difference(f"metric {name}", self._metric_values(name), self.samples)
        return None

    def failing_metrics(self) -> list[str]:
        """Return the metrics whose values for the halves do not add up to the whole's."""
        failing = []
        for name in self.results["ab"].metrics:
            if not self._has_numbers(name):
                continue
            deviation = abs(excess(self._metric_values(name)))
            if deviation > self._metric_tolerance(name):
                failing.append(name)
        return failing

    def _losses(self) -> dict[str, float]:
        return {batch: sums.loss for batch, sums in self.results.items()}

    def _metric_values(self, name: str) -> dict[str, float]:
        return {batch: sums.metrics[name] for batch, sums in self.results.items() if name in sums.metrics}

    def _has_numbers(self, name: str) -> bool:
        """Return whether a metric has values to compare. One that is not finite says nothing."""
        values = self._metric_values(name)
        return {"ab", "a", "b"} <= values.keys() and all(map(math.isfinite, values.values()))

    def _metric_tolerance(self, name: str) -> float:
        """Return the largest excess of a metric that may be rounding."""
        values = self._metric_values(name)
        size = size_of(values)
        if not self.samples.is_joined:
            return MAX_COARSE_ROUNDING * size
        tolerance = EPSILONS_OF_ROUNDING * FP32_ROUNDING * size

        # What swapping the halves has changed.
        if self.epsilon_of_metrics > MAX_FP64_EPSILON:
            measured = SAFETY_FACTOR * _swap_noise(values)
            tolerance = max(tolerance, min(measured, _max_rounding(self.epsilon_of_metrics) * size))

        # What other rounding has changed.
        changes = [abs(metrics[name] - values["ab"]) for metrics in self.rounded if name in metrics]
        by_rounding = SAFETY_FACTOR * max(changes, default=0.0)
        if self.epsilon_of_metrics > MAX_FP32_EPSILON:  # 16 bits, in which rounding changes everything
            is_count = all(map(float.is_integer, values.values()))
            flips = 1.0 if is_count else 0.0  # of right answers, one may flip
            by_rounding = min(by_rounding, max(MAX_COARSE_ROUNDING * size, flips))
        return max(tolerance, by_rounding)

    def _loss_adds_up(self, losses: Values, max_rounding: float) -> bool:
        """Return whether the halves' losses add up to the whole's, up to rounding.

        Args:
            losses: the losses.
            max_rounding: the most that may count as rounding, relative.
        """
        count = abs(self.results["ab"].divisor)
        size = size_of(losses) + SIZE_PER_COUNT * count
        deviation = abs(excess(losses))
        if self.epsilon <= MAX_FP64_EPSILON:
            return deviation <= FP32_ROUNDING * size

        # Measured by other rounding where there is any, by swapped halves where not: unknown if these are missing.
        if self.rounded_losses:
            largest_change = max(abs(loss - losses["ab"]) for loss in self.rounded_losses)
            least = EPSILONS_OF_ROUNDING * FP32_ROUNDING * size
        else:
            largest_change = _swap_noise(losses, default=math.inf)
            least = EPSILONS_OF_ROUNDING * self.epsilon * size
        tolerance = max(SAFETY_FACTOR * largest_change, least)
        return deviation <= min(tolerance, max_rounding * size)

    def _is_mean(self, values: Values, tolerance: float) -> bool:
        """Return whether the whole batch's value is the mean of its halves' and not their sum. The mean is weighted
        equally or by their counts; if both hold the same values, with any weights (such as tokens, while the count is
        of samples).

        Args:
            values: of a loss or a metric.
            tolerance: relative.
        """
        if abs(excess(values)) <= tolerance * size_of(values):
            return False
        whole = values["ab"]
        a = values["a"]
        b = values["b"]

        # Any weights: a mean lies between the two. A sum of two values of one sign does not.
        if self.samples.is_joined and a * b > 0:
            margin = tolerance * abs(whole)
            if min(a, b) - margin <= whole <= max(a, b) + margin:
                return True

        # Equal weights, or the counts.
        counts = (self.results["a"].divisor, self.results["b"].divisor)
        for weight_of_a, weight_of_b in ((1.0, 1.0), counts):
            total_weight = weight_of_a + weight_of_b
            if total_weight:
                mean = (weight_of_a * a + weight_of_b * b) / total_weight
                if math.isclose(whole, mean, rel_tol=tolerance):
                    return True
        return False


class Difference(NamedTuple):
    """What of a batch is not the sum of its halves' as training makes them."""

    name: str
    values: Values  # of `ab`, `a` and `b`
    samples: Samples
    counts_padding: bool = False  # whether it is a count of more positions than the halves have

    def text(self) -> str:
        """Return the difference in a few words."""
        whole = self.values["ab"]
        in_halves = self.values["a"] + self.values["b"]
        number = self.samples.number
        return f"does not add up: the {self.name} is {whole:.6g} for {number} samples, {in_halves:.6g} in halves"

    def refusal(self, setting: str) -> str:
        """Return the message about a count that includes padding.

        Args:
            setting: the task's.
        """
        return (
            f"{setting}: the count includes padding: {self._numbers()}. The loss would be divided by a number that "
            "depends on the micro-batch, and so on free memory: sum the losses of the real positions only, and return "
            f"their number, such as `mask.sum()` or `(targets != -100).sum()`. {_IF_MEANT}"
        )

    def warning(self, setting: str, training: bool) -> str:
        """Return the message about any other difference.

        Args:
            setting: the task's.
            training: whether it was called in training mode.
        """
        cause = "the padding" if self.samples.cut.is_padded else "which samples are collated together"
        mode = " in training mode" if training else ""
        return (
            f"{setting}: the {self.name} depends on {cause}{mode}: {self._numbers()}. So the result depends on the "
            f"micro-batch, and that of an evaluation on batch.eval_micro_size. {_WHY}"
        )

    def _numbers(self) -> str:
        verb = "padded" if self.samples.cut.is_padded else "collated"
        whole_text = f"for {self.samples.number} samples {verb} together it is {self.values['ab']:.9g}"
        return f"{whole_text}, and for their halves {self.values['a']:.9g} and {self.values['b']:.9g}"


def size_of(values: Values) -> float:
    """Return the size of some results, to which tolerances are relative."""
    return (abs(values["ab"]) + abs(values["a"]) + abs(values["b"])) / 2


def excess(values: Values) -> float:
    """Return by how much the whole batch's value is larger than the sum of its halves'."""
    return values["ab"] - values["a"] - values["b"]


def _max_rounding(epsilon: float) -> float:
    """Return the most that may count as rounding in a computation with this epsilon, if it is measured; relative."""
    return MAX_ROUNDING if epsilon < MAX_FP32_EPSILON else MAX_COARSE_ROUNDING


def _swap_noise(values: Values, default: float = 0.0) -> float:
    """Return the largest change where batches of the same samples should have the same result."""
    expected_values = {"ba": values["ab"], "aa": 2 * values["a"], "bb": 2 * values["b"]}
    changes = []
    for batch, expected in expected_values.items():
        if batch in values:
            changes.append(abs(values[batch] - expected))
    return max(changes, default=default)
