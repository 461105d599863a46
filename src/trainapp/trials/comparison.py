"""Compares a task's results for a batch with those for its two parts, to the rounding of their computation.

A sum over samples has `whole = first + second`, for the loss, the count and each metric. What differs by no more than
rounding adds up. How much that may be, `Comparison` decides, by three rules:

1. A result in fp64 may differ by the epsilon of fp32, since a task may cast to fp32 inside. What differs by more than
   fp64's rounding is said.
2. A coarser one may differ by a few epsilons of its own dtype, or by a multiple of what rounding was measured to change
   (`Rounding`): the same samples in another order, or computed with other rounding.
3. Never by more than a fixed share, however much was measured: a term of the whole batch, such as a mixture's load
   balance, changes with the order of the samples, too, and would pass for rounding.

It returns what is wrong as a value, `Defect` or `Difference`; `trials.messages` has the words.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from trainapp.trials.probe import Sums
from trainapp.trials.samples import Order

# Relative rounding errors (machine epsilons) tell the precision of a computation: fp64 has 2e-16, fp32 1.2e-7, fp16
# 1e-3 and bf16 8e-3. These bounds lie in the gaps.
MAX_FP64_EPSILON = 1e-12
MAX_FP32_EPSILON = 1e-6

# Tolerances, relative to the size of the results.
FP32_ROUNDING = 1.2e-7  # fp32's epsilon: always counts as rounding, also in fp64, whose own is far below it
EPSILONS_OF_ROUNDING = 8  # in epsilons of the computation's dtype: a result is rounded a few times on its way
# The most that is rounding where all of a computation is in fp64, whose epsilon is 2e-16. Between this and fp32's, what
# adds up is not refused, as a part may be in fp32 or a solver stop at a tolerance, but said.
MAX_FP64_ROUNDING = 1e-11
# The most that may count as rounding, however much was measured: otherwise a term of the whole batch that changes with
# the order of the samples would pass for it.
MAX_ROUNDING = 1e-3  # of computations in fp32 or fp64; the price: smaller terms of the whole batch go unnoticed
MAX_COARSE_ROUNDING = 2e-2  # with matmuls in less than fp32 precision: 2.6 epsilons of bf16, 20 of fp16

# Rounding is measured by a few repetitions, and another one may change the result more: allow so many times as much.
SAFETY_FACTOR = 4
# Added to the size of a loss, per count: summands of about 1 may cancel out in the sum, their rounding errors do not.
# Whether they do is measured where the loss does not add up to its own size alone, see `is_small_difference`.
SIZE_PER_COUNT = 0.1
NEGLIGIBLE_LOSS = 1e-6  # per count, up to 1: about zero, so that sum and mean cannot be told apart


class SplitValues(NamedTuple):
    """A number that a task returns for a batch, and those for the batch's two parts."""

    whole: float
    first: float
    second: float

    @property
    def excess(self) -> float:
        """By how much the whole batch's number is larger than the sum of its parts'."""
        return self.whole - self.first - self.second

    @property
    def size(self) -> float:
        """The size of the numbers, to which tolerances are relative."""
        return (abs(self.whole) + abs(self.first) + abs(self.second)) / 2


class SplitResults(NamedTuple):
    """A task's results for a batch, and for the batch's two parts."""

    whole: Sums
    first: Sums
    second: Sums


@dataclass(frozen=True)
class Rounding:
    """What is known of the rounding of the results."""

    # The relative rounding error of the coarsest dtype in the computation; 0 until it is known.
    epsilon_of_loss: float = 0.0
    epsilon_of_metrics: float = 0.0
    # Results for the same samples in another order.
    reordered: Mapping[Order, Sums] = field(default_factory=dict)
    # Losses and metrics of the whole batch computed with other rounding, see `RandomRounding`. Without losses, the
    # reordered batches measure the rounding of the loss.
    rerounded_losses: Sequence[float] = ()
    rerounded_metrics: Sequence[Mapping[str, float]] = ()


class DefectKind(Enum):
    """The ways in which a task's results fail to be sums over samples."""

    MEAN = auto()  # the loss is one
    NOT_A_SUM = auto()  # the loss
    COUNT = auto()
    METRIC_MEAN = auto()
    METRIC_NOT_A_SUM = auto()


class Defect(NamedTuple):
    """What is wrong with a task, which refuses it."""

    kind: DefectKind
    metric: str = ""  # its name, of a metric's defect


class Difference(NamedTuple):
    """What of a batch is not the sum of its parts'."""

    name: str  # "loss", "count", or "metric" and its name
    values: SplitValues
    is_larger_count: bool = False  # whether it is a count, in whole numbers, of more than the parts hold


@dataclass(frozen=True)
class Comparison:
    """The results of a task for a batch of `number` samples, and for the two parts that it is split into."""

    number: int
    results: SplitResults
    # Whether the whole batch is known to be its parts joined. In other batches, which may be padded
    # differently, only a mean can be detected.
    is_joined: bool = True
    has_chance: bool = False  # whether these others may differ from their parts by chance, such as in random masks
    parts: str = "their halves"  # in words
    computes_gradients: bool = False  # whether the task was seen to run a backward of its own
    rounding: Rounding = Rounding()

    # --- what is compared

    @property
    def losses(self) -> SplitValues:
        """The losses."""
        return SplitValues(*(sums.loss for sums in self.results))

    @property
    def counts(self) -> SplitValues:
        """The counts by which losses are divided."""
        return SplitValues(*(sums.divisor for sums in self.results))

    def metric_values(self, name: str) -> SplitValues | None:
        """Return the values of a metric; None if they cannot be compared: missing for a part, or not finite."""
        values = [sums.metrics.get(name, math.nan) for sums in self.results]
        reordered = [sums.metrics.get(name, 0.0) for sums in self.rounding.reordered.values()]
        return SplitValues(*values) if all(map(math.isfinite, values + reordered)) else None

    def skipped_metrics(self) -> list[str]:
        """Return the names of metrics that cannot be compared."""
        return [name for name in self.results.whole.metrics if self.metric_values(name) is None]

    # --- whether it adds up

    def defect(self) -> Defect | None:
        """Return what is wrong with the task; None if its results add up or, not joined, are no means."""
        losses = self.losses
        max_rounding = _max_rounding(self.rounding.epsilon_of_loss)
        is_zero = losses.size <= NEGLIGIBLE_LOSS * min(1.0, abs(self.counts.whole))
        if not is_zero and self._is_mean(losses, max_rounding):
            return Defect(DefectKind.MEAN)
        if self.is_joined:
            if not self._loss_adds_up(max_rounding):
                return Defect(DefectKind.NOT_A_SUM)
            counts = self.counts
            if not math.isclose(counts.whole, counts.first + counts.second, rel_tol=max_rounding):
                return Defect(DefectKind.COUNT)
        return self._defect_of_metrics()

    def _defect_of_metrics(self) -> Defect | None:
        if not self.is_joined and self.has_chance:
            return None  # masks at random differ between the batches: a sum of few may look like a mean
        for name, values in self.failing_metrics():
            if self._is_mean(values, MAX_COARSE_ROUNDING):
                return Defect(DefectKind.METRIC_MEAN, name)
            if self.is_joined:
                return Defect(DefectKind.METRIC_NOT_A_SUM, name)
        return None

    def difference(self) -> Difference | None:
        """Return what does not add up, the count first; None if everything does."""
        # The count, exactly where its dtype allows it: one that includes padding differs by few of many.
        counts = self.counts
        max_rounding = _max_rounding(self.rounding.epsilon_of_loss)
        are_integers = all(map(float.is_integer, counts))
        are_exact = are_integers and max_rounding == MAX_ROUNDING  # integers of 16 bits are rounded
        if not math.isclose(counts.whole, counts.first + counts.second, rel_tol=0.0 if are_exact else max_rounding):
            return Difference("count", counts, is_larger_count=are_integers and counts.excess > 0)

        if not self._loss_adds_up(max_rounding):
            return Difference("loss", self.losses)
        for name, values in self.failing_metrics():
            return Difference(f"metric {name}", values)
        return None

    def failing_metrics(self) -> list[tuple[str, SplitValues]]:
        """Return the metrics that do not add up, with their values."""
        failing = []
        for name in self.results.whole.metrics:
            values = self.metric_values(name)
            if values is not None and abs(values.excess) > self._metric_tolerance(name, values):
                failing.append((name, values))
        return failing

    def _is_mean(self, values: SplitValues, tolerance: float) -> bool:
        """Return whether the whole batch's value is the mean of its parts' and not their sum. The mean is weighted
        equally or by their counts; if both hold the same values, with any weights (such as tokens, while the count is
        of samples).

        Args:
            values: of a loss or a metric.
            tolerance: relative.
        """
        if abs(values.excess) <= tolerance * values.size:
            return False
        whole, first, second = values

        # Any weights: a mean lies between the two. A sum of two values of one sign does not.
        if self.is_joined and first * second > 0:
            margin = tolerance * abs(whole)
            if min(first, second) - margin <= whole <= max(first, second) + margin:
                return True

        # Equal weights, or the counts.
        counts = self.counts
        for first_weight, second_weight in ((1.0, 1.0), (counts.first, counts.second)):
            total_weight = first_weight + second_weight
            if total_weight:
                mean = (first_weight * first + second_weight * second) / total_weight
                if math.isclose(whole, mean, rel_tol=tolerance):
                    return True
        return False

    # --- how much may be rounding

    @property
    def loss_deviation(self) -> float:
        """By how much the loss differs from the sum of its parts', relative; 0 for the rounding of summands of about 1
        in fp64.
        """
        losses = self.losses
        if abs(losses.excess) <= self._rounding_in_fp64:
            return 0.0
        return abs(losses.excess) / losses.size

    @property
    def is_small_difference(self) -> bool:
        """Whether the loss adds up to the rounding of summands of about 1, but not to a share of its own size: either
        they cancel out, or each is small, as of samples that are learnt. Measured rounding tells (`_is_rounding`).
        """
        losses = self.losses
        difference = abs(losses.excess)
        is_small = difference <= MAX_ROUNDING * self._size_of_loss
        return is_small and difference > max(MAX_ROUNDING * losses.size, self._rounding_in_fp64)

    @property
    def _rounding_in_fp64(self) -> float:
        """The most that rounding in fp64 changes in a loss whose summands are about 1."""
        return MAX_FP64_EPSILON * SIZE_PER_COUNT * abs(self.counts.whole)

    def _is_rounding(self) -> bool:
        """Return whether a small difference is due to rounding, as far as that was measured."""
        rounding = self.rounding
        if not rounding.rerounded_losses or not self.is_small_difference:
            return True
        losses = self.losses
        reordered = {order: sums.loss for order, sums in rounding.reordered.items()}
        by_order = _change_by_order(losses, reordered)
        by_rounding = max(abs(loss - losses.whole) for loss in rounding.rerounded_losses)
        return abs(losses.excess) <= SAFETY_FACTOR * max(by_order, by_rounding)

    @property
    def _size_of_loss(self) -> float:
        return self.losses.size + SIZE_PER_COUNT * abs(self.counts.whole)

    def _loss_adds_up(self, max_rounding: float) -> bool:
        """Return whether the parts' losses add up to the whole's, up to rounding.

        Args:
            max_rounding: the most that may count as rounding, relative.
        """
        losses = self.losses
        rounding = self.rounding
        size = self._size_of_loss
        deviation = abs(losses.excess)
        if not self._is_rounding():
            return False
        if rounding.epsilon_of_loss <= MAX_FP64_EPSILON:
            return deviation <= FP32_ROUNDING * size

        # Measured by other rounding where there is any, by reordered batches where not: unknown if these are missing.
        if rounding.rerounded_losses:
            largest_change = max(abs(loss - losses.whole) for loss in rounding.rerounded_losses)
            least = EPSILONS_OF_ROUNDING * FP32_ROUNDING * size
        else:
            reordered = {order: sums.loss for order, sums in rounding.reordered.items()}
            largest_change = _change_by_order(losses, reordered, default=math.inf)
            least = EPSILONS_OF_ROUNDING * rounding.epsilon_of_loss * size
        tolerance = max(SAFETY_FACTOR * largest_change, least)
        return deviation <= min(tolerance, max_rounding * size)

    def _metric_tolerance(self, name: str, values: SplitValues) -> float:
        """Return the largest excess of a metric that may be rounding."""
        size = values.size
        rounding = self.rounding
        if not self.is_joined:
            return MAX_COARSE_ROUNDING * size
        tolerance = EPSILONS_OF_ROUNDING * FP32_ROUNDING * size

        # What another order has changed.
        if rounding.epsilon_of_metrics > MAX_FP64_EPSILON:
            reordered = {}
            for order, sums in rounding.reordered.items():
                if name in sums.metrics:
                    reordered[order] = sums.metrics[name]
            by_order = SAFETY_FACTOR * _change_by_order(values, reordered)
            tolerance = max(tolerance, min(by_order, _max_rounding(rounding.epsilon_of_metrics) * size))

        # What other rounding has changed.
        changes = [abs(metrics[name] - values.whole) for metrics in rounding.rerounded_metrics if name in metrics]
        by_rounding = SAFETY_FACTOR * max(changes, default=0.0)
        if rounding.epsilon_of_metrics > MAX_FP32_EPSILON:  # 16 bits, in which rounding changes everything
            is_count = all(map(float.is_integer, values))
            flips = 1.0 if is_count else 0.0  # of right answers, one may flip
            by_rounding = min(by_rounding, max(MAX_COARSE_ROUNDING * size, flips))
        return max(tolerance, by_rounding)


def _max_rounding(epsilon: float) -> float:
    """Return the most that may count as rounding in a computation with this epsilon, if it is measured; relative."""
    return MAX_ROUNDING if epsilon < MAX_FP32_EPSILON else MAX_COARSE_ROUNDING


def _change_by_order(values: SplitValues, reordered: Mapping[Order, float], default: float = 0.0) -> float:
    """Return the largest change where batches of the same samples should have the same result.

    Args:
        values: of the batch and its halves.
        reordered: of the halves in other orders, or in some of them.
        default: without any of these.
    """
    expected_values = {
        Order.SWAPPED: values.whole,
        Order.FIRST_HALF_TWICE: 2 * values.first,
        Order.SECOND_HALF_TWICE: 2 * values.second,
    }
    changes = [abs(value - expected_values[order]) for order, value in reordered.items()]
    return max(changes, default=default)
