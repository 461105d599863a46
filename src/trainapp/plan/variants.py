"""A configuration with levers, alone and stacked, each combination traced as a whole: savings do not add up."""

import logging
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainapp.errors import UserError
from trainapp.memory.levers.lever import Lever, result_of, to_paste, with_levers
from trainapp.plan.certainty import NOT_TRACEABLE
from trainapp.plan.recorder import Peak
from trainapp.plan.sizes import Facts, Planner
from trainapp.plan.step_time import Speeds
from trainapp.plan.step_work import Work
from trainapp.train.components import choose_device

MOST_STACKS = 5  # combinations that are traced
LEAST_SAVING = 0.01  # of the peak
log = logging.getLogger(__name__)


@dataclass(eq=False)
class Variant:
    """The configuration with some levers, traced. peak: None where it cannot be traced.

    seconds: of a step with the micro-batch of `peak`; an estimate. least: if all samples were one micro-batch. Both
    are infinite where they are not known.
    certainty: of the peak. largest: the largest micro-batch that fits, 0 if none does; None where it has not been
    searched.
    """

    levers: tuple[Lever, ...]
    planner: Planner
    peak: Peak | None
    seconds: float
    least: float
    certainty: str
    largest: int | None = None

    @property
    def result(self) -> str:
        """What becomes of the training's result: see `Lever`."""
        return result_of(self.levers)

    @property
    def total(self) -> float:
        """The peak in bytes; infinite where it is not known."""
        return math.inf if self.peak is None else self.peak.total

    @property
    def overrides(self) -> str:
        """What to paste on the command line."""
        return shlex.join(to_paste(self.levers, self.planner.config.command))


class Measured(NamedTuple):
    """What was traced with some sizes: the highest peak that a run may have, how sure that is, a step's operations."""

    peak: Peak
    certainty: str
    work: Work


class Variants:
    """The variants of one configuration, each traced once, at the sizes of its plan. `own`: without a lever."""

    def __init__(self, planner: Planner, facts: Facts):
        self.planner, self.limit = planner, planner.limit
        self.size, self.largest_eval = facts["micro_size"], facts["largest_eval_micro_size"] or 0
        # An evaluation whose size is chosen by the limit always comes near it, which would hide what a lever saves.
        is_fixed = planner.config.batch.eval_micro_size != "auto"
        self.eval_size = facts["eval_micro_size"] or 0 if is_fixed else 0
        self.evaluates = bool(planner.eval_samples)
        self.speeds = Speeds(choose_device(planner.config.train.device))
        self._known: dict[frozenset[str], Variant | None] = {}
        self.planners: list[Planner] = []  # of all of them, also of those that are refused
        own = self.measured(planner, self.size, self.eval_size)
        times = _seconds(own.work, self.speeds)
        self.own = Variant((), planner, own.peak, *times, own.certainty, facts["largest_micro_size"])
        self.smallest = planner.smallest
        strategy = planner.config.parallel.strategy
        self.levers = [lever for lever in planner.at(self.size, 0).levers if _is_traced(lever, strategy)]

    def of(self, levers: Sequence[Lever]) -> Variant | None:
        """The configuration with these levers; None where it is refused."""
        names = frozenset(lever.setting for lever in levers)
        if names not in self._known:
            self._known[names] = self._traced(levers)
        return self._known[names]

    def _traced(self, levers: Sequence[Lever]) -> Variant | None:
        planner = self.planner.variant(with_levers(self.planner.config, levers))
        self.planners.append(planner)
        try:
            measured = self.measured(planner, self.size, self.eval_size)
        except UserError as error:
            log.debug("not with this model: %s", error)
            return None
        except Exception:
            log.debug("a lever could not be traced", exc_info=True)
            return Variant(tuple(levers), planner, None, math.inf, math.inf, NOT_TRACEABLE)
        peak, certainty, work = measured
        times = self.times(work)
        if work.cannot_run(self.speeds):
            return Variant(tuple(levers), planner, None, math.inf, math.inf, NOT_TRACEABLE)
        largest = planner.share if peak.total <= self.limit and self.size == planner.share else None
        return Variant(tuple(levers), planner, peak, *times, certainty, largest)

    def times(self, work: Work) -> tuple[float, float]:
        """`seconds` and `least` of a variant; infinite where operations of its dtype cannot be run to be timed."""
        try:
            return _seconds(work, self.speeds)
        except Exception:
            log.debug("a lever could not be timed", exc_info=True)
            return math.inf, math.inf

    def measured(self, planner: Planner, size: int, eval_size: int) -> Measured:
        """With these sizes; an `eval_size` of 0 leaves out evaluation."""
        work = planner.at(size, 0).work
        assert work is not None, "traced without counting its operations"
        found = planner.bounds(size, eval_size, is_low_asked=False)
        return Measured(found.high, found.certainty.name, work)

    def stacked(self, start: Variant, singles: Sequence[Variant]) -> list[Variant]:
        """From `start`, lever after lever, the one with the highest expected saving per time; each lowers the peak."""
        stack, traced, refused = start, [], set[frozenset[str]]()
        for _ in range(MOST_STACKS + 1):
            choices = [choice for single in singles if (choice := self._extended(stack, single, singles)) is not None]
            choices = [choice for choice in choices if frozenset(lever.setting for lever in choice[1]) not in refused]
            if not choices:
                break
            levers = max(choices, key=lambda choice: choice[0])[1]
            found = self.of(levers)
            if found is None or found.total >= stack.total:
                refused.add(frozenset(lever.setting for lever in levers))
                continue
            stack = found
            if len(levers) > 1:
                traced.append(found)
        return traced

    def _extended(
        self, stack: Variant, single: Variant, singles: Sequence[Variant]
    ) -> tuple[float, list[Lever]] | None:
        """The stack's levers with one more, in place of those that set nothing else; and the expected bytes per second
        of a step. None where it would save nothing.
        """
        lever = single.levers[0]
        levers = [*(other for other in stack.levers if not other.changes.keys() <= lever.changes.keys()), lever]
        parts = [other for other in singles if other.levers[0] in levers]
        if lever in stack.levers or any(math.isinf(part.seconds) for part in parts):
            return None
        peak = max(
            own * math.prod(part.peak.phases.get(phase, own) / own for part in parts if part.peak is not None)
            for phase, own in (self.own.peak.phases if self.own.peak else {}).items()
            if own
        )
        seconds = self.own.seconds * math.prod(part.seconds / self.own.seconds for part in parts)
        saving = stack.total - peak
        if saving < LEAST_SAVING * stack.total:
            return None
        return saving / max(seconds - stack.seconds, 0.01 * self.own.seconds), levers

    def saves(self, variant: Variant) -> bool:
        """Whether its peak is lower than without the levers."""
        return variant.total < (1 - LEAST_SAVING) * self.own.total


def _seconds(work: Work, speeds: Speeds) -> tuple[float, float]:
    return work.seconds(speeds), work.seconds(speeds, micro_batches=1)


def _is_traced(lever: Lever, strategy: str) -> bool:
    """Whether a trace of this strategy shows what the lever does."""
    return lever.shows_in_a_trace and (strategy != "single" or not lever.is_of_several_ranks)
