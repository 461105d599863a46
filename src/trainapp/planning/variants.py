"""A configuration with levers, alone and stacked, each combination traced as a whole: savings do not add up."""

import logging
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from trainapp.errors import UserError
from trainapp.planning.certainty import NOT_TRACEABLE
from trainapp.planning.sizes import Facts, Measured, Planner
from trainapp.planning.step_work import Work
from trainapp.techniques.lever import Lever, overrides_of, result_of, with_levers

MOST_STACKS = 5  # combinations that are traced
LEAST_SAVING = 0.01  # of the peak
log = logging.getLogger(__name__)


@dataclass(eq=False)
class Variant:
    """The configuration with some levers, traced. measured: None where it cannot be traced.

    seconds: of a step with the planned micro-batch; an estimate. least: if all samples were one micro-batch. Both
    are infinite where they are not known. largest: the largest micro-batch that fits, 0 if none does; None where it has
    not been searched.
    """

    levers: tuple[Lever, ...]
    planner: Planner
    measured: Measured | None = None
    seconds: float = math.inf
    least: float = math.inf
    largest: int | None = None

    @property
    def result(self) -> str:
        """What becomes of the training's result: see `Lever`."""
        return result_of(self.levers)

    @property
    def total(self) -> float:
        """The bytes that have to fit; infinite where they are not known."""
        return math.inf if self.measured is None else self.measured.total

    @property
    def certainty(self) -> str:
        """Of `total`."""
        return NOT_TRACEABLE if self.measured is None else self.measured.certainty

    @property
    def overrides(self) -> str:
        """What to paste on the command line."""
        return shlex.join(overrides_of(self.levers))


class Variants:
    """The variants of one configuration, each traced once, at the sizes of its plan. `own`: without a lever."""

    def __init__(self, planner: Planner, facts: Facts):
        self.planner, self.room = planner, planner.room
        self.size, self.largest_eval = facts["micro_size"], facts["largest_eval_micro_size"] or 0
        # An evaluation whose size is chosen by the limit always comes near it, which would hide what a lever saves.
        is_fixed = planner.config.batch.eval_micro_size != "auto"
        self.eval_size = facts["eval_micro_size"] or 0 if is_fixed else 0
        self.evaluates = bool(planner.workload.eval_samples)
        self._known: dict[frozenset[str], Variant | None] = {}
        self.planners: list[Planner] = []  # of all of them, also of those that are refused
        own = planner.measured(self.size, self.eval_size)
        self.own = Variant((), planner, own, *_seconds(own.work, planner), facts["largest_micro_size"])
        self.smallest = planner.smallest
        self.levers = [lever for lever in planner.levers(self.size) if planner.shows(lever)]

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
            measured = planner.measured(self.size, self.eval_size)
        except UserError as error:
            log.debug("not with this model: %s", error)
            return None
        except Exception:
            log.debug("a lever could not be traced", exc_info=True)
            return Variant(tuple(levers), planner)
        times = self.times(measured.work, planner)
        if measured.work.cannot_run(planner.speeds):
            return Variant(tuple(levers), planner)
        share = planner.workload.share
        largest = share if measured.total <= self.room and self.size == share else None
        return Variant(tuple(levers), planner, measured, *times, largest)

    def times(self, work: Work, planner: Planner) -> tuple[float, float]:
        """`seconds` and `least` of a variant; infinite where operations of its dtype cannot be run to be timed."""
        try:
            return _seconds(work, planner)
        except Exception:
            log.debug("a lever could not be timed", exc_info=True)
            return math.inf, math.inf

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
            own * math.prod(part.measured.phases.get(phase, own) / own for part in parts if part.measured is not None)
            for phase, own in (self.own.measured.phases if self.own.measured else {}).items()
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


def _seconds(work: Work, planner: Planner) -> tuple[float, float]:
    return work.seconds(planner.speeds), work.seconds(planner.speeds, micro_batches=1)
