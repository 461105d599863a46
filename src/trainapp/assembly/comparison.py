"""Compares a task's results for a batch with those for its halves, to the rounding of their computation."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from trainapp.assembly.trials import Samples, Sums
from trainapp.units import listed

# Tolerances, relative to the result. LEAST: what always counts as rounding, fp32's own. ROUNDING: in units of a coarser
# dtype's epsilon. FINE, COARSE: the most that may count as rounding if it is measured, COARSE with matmuls in less than
# fp32 precision.
LEAST, ROUNDING, FINE, COARSE = 1.2e-7, 8, 1e-3, 2e-2
IN_DOUBLE = 1e-12  # epsilons below it are fp64's
FLOOR = 0.1  # per count: a loss whose summands cancel out has their rounding errors
_IF_MEANT = "If it is intended, set train.check_loss=false"
_WHY = (
    "Either it is a mean over positions times the number of samples, or padded positions are in the sum, or the model "
    "sees padding without a mask: sum and count the real positions only, and pass the model a mask. If the model sees "
    "padding by design, such as convolutions over it, compare only runs with the same batch.micro_size"
)


class Comparison(NamedTuple):
    """The task's results by batch, see `Samples`: of `ab`, `a` and `b`, and of others if these do not add up.

    epsilon, epsilon_of_metrics: relative rounding error of the coarsest dtype in the computation of the loss, and of
    the metrics; 0 until they are known. rounded: the metrics of `ab` computed with other rounding, see `Rounding`.
    rounded_losses: its losses; without them, swapped halves measure the rounding of the loss. parts: what `a` and `b`
    are, in words.
    """

    samples: Samples
    results: Mapping[str, Sums]
    epsilon: float = 0.0
    epsilon_of_metrics: float = 0.0
    rounded: tuple[Mapping[str, float], ...] = ()
    rounded_losses: tuple[float, ...] = ()
    parts: str = "their halves"

    def compared(self, addition: str = "") -> str:
        """What has been compared, in words that continue "the loss". addition: to "over 4 samples"."""
        whole = self.results["ab"]
        if not self.samples.same:
            return f"is no mean of {self.samples.number} samples"
        others = "do count and metrics" if whole.metrics else "does its count"
        text = f"adds up over {self.samples.number} samples{addition}, as {others}"
        if whole.metrics_error:
            text += f" (metrics: {whole.metrics_error})"
        elif skipped := [name for name in whole.metrics if not self._has_numbers(name)]:
            text += f" (not {listed(skipped)}: not finite or not in all batches)"
        return text

    def problem(self, setting: str, training: bool) -> str | None:
        """The message; None if the results add up."""
        samples, whole, a, b = self.samples, *(self.results[name] for name in ("ab", "a", "b"))
        losses = {name: sums.loss for name, sums in self.results.items()}
        most = self._most(self.epsilon)
        numbers = (
            f"for {samples.number} samples it returns {whole.loss:.9g} with a count of {whole.divisor:g}, and for "
            f"{self.parts} {a.loss:.9g} with {a.divisor:g} and {b.loss:.9g} with {b.divisor:g}"
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
                f"{setting}: the loss is not a sum over samples{' in training mode' * training}: {numbers}. It "
                "would depend on the micro-batch, and so on free memory. Do shapes broadcast, such as [B, 1] with [B]? "
                "Are samples weighted, by their class, say? Then the count is the sum of their weights. If it "
                "compares or mixes the samples of its batch, or has a term of the whole batch such as a "
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
        if not self.samples.same and self.samples.cut.reason:
            return None  # masks at random differ between the batches: a sum of few may look like a mean
        for name in self.failing_metrics():
            values = self._values(name)
            is_mean = self._is_mean(values, COARSE)
            if is_mean or self.samples.same:
                return (
                    f"{setting}: the metric {name} is {'a mean' if is_mean else 'not a sum over samples'}, but a sum "
                    f"is required: for {self.samples.number} samples it is {values['ab']:.9g}, and for {self.parts} "
                    f"{values['a']:.9g} and {values['b']:.9g}. It would depend on the micro-batch: return the sum of "
                    "the samples' own values (of a mean over samples, that times the count), or configure it as "
                    f"metrics.{name}, which sees all samples (docs/extending.md). {_IF_MEANT}"
                )
        return None

    def difference(self) -> "Difference | None":
        """What of the whole batch is not the sum of its halves', the count first; None if everything is."""
        losses = {name: sums.loss for name, sums in self.results.items()}
        counts = {name: sums.divisor for name, sums in self.results.items()}
        most = self._most(self.epsilon)
        whole, halves = counts["ab"], counts["a"] + counts["b"]
        are_integers = all(map(float.is_integer, counts.values()))
        tolerance = 0.0 if are_integers and most == FINE else most  # integers of 16 bits are rounded
        if not math.isclose(whole, halves, rel_tol=tolerance):
            return Difference("count", counts, self.samples, counts_padding=are_integers and whole > halves)
        if not self._adds_up(losses, most):
            return Difference("loss", losses, self.samples)
        for name in self.failing_metrics():
            return Difference(f"metric {name}", self._values(name), self.samples)
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
        if self.epsilon > IN_DOUBLE and self.rounded_losses:
            measured = 4 * max(abs(loss - losses["ab"]) for loss in self.rounded_losses)
            tolerance = min(max(measured, ROUNDING * LEAST * scale), most * scale)
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


class Difference(NamedTuple):
    """What of a batch is not the sum of its halves' as training makes them. values: of `ab`, `a` and `b`.

    counts_padding: whether it is a count of more positions than the halves have.
    """

    name: str
    values: Mapping[str, float]
    samples: Samples
    counts_padding: bool = False

    def text(self) -> str:
        """In a few words."""
        whole, a, b = (self.values[name] for name in ("ab", "a", "b"))
        return (
            f"does not add up: the {self.name} is {whole:.6g} for {self.samples.number} samples, {a + b:.6g} in halves"
        )

    def refusal(self, setting: str) -> str:
        """The message about a count that includes padding. setting: the task's."""
        return (
            f"{setting}: the count includes padding: {self._numbers()}. The loss would be divided by a number that "
            "depends on the micro-batch, and so on free memory: sum the losses of the real positions only, and return "
            f"their number, such as `mask.sum()` or `(targets != -100).sum()`. {_IF_MEANT}"
        )

    def warning(self, setting: str, training: bool) -> str:
        """The message about any other difference."""
        cause = "the padding" if self.samples.cut.is_padded else "which samples are collated together"
        return (
            f"{setting}: the {self.name} depends on {cause}{' in training mode' * training}: {self._numbers()}. So the "
            f"result depends on the micro-batch. {_WHY}"
        )

    def _numbers(self) -> str:
        whole, a, b = (self.values[name] for name in ("ab", "a", "b"))
        verb = "padded" if self.samples.cut.is_padded else "collated"
        return (
            f"for {self.samples.number} samples {verb} together it is {whole:.9g}, and for their halves {a:.9g} and "
            f"{b:.9g}"
        )


def size_of(values: Mapping[str, float]) -> float:
    """The scale of some results."""
    return (abs(values["ab"]) + abs(values["a"]) + abs(values["b"])) / 2


def excess(values: Mapping[str, float]) -> float:
    """By how much the whole batch's value is larger than the sum of its halves'."""
    return values["ab"] - values["a"] - values["b"]
