"""The levers of a configuration in its plan: what each saves and costs, and the fastest combination that fits.

Levers are traced alone at one size first; then they are stacked, each time the one that is expected to save the most
per time; the largest micro-batch is searched for the few that may be the best plan.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trainapp.config.command_line import size_overrides
from trainapp.planning.sizes import Facts, Measured, Planner
from trainapp.planning.variants import Variant, Variants
from trainapp.techniques.lever import RESULTS

MOST_SEARCHES = 3  # variants whose largest micro-batch is searched: the first ones of the list, those of each choice


def ranked(planner: Planner, facts: Facts) -> Facts:
    """`levers`, `levers_eval_micro_size` and `best` of plan.json.

    planner: of the configuration, with its steps traced at the sizes in `facts`, its plan without levers. Raises
    UserError for mistakes in the configuration.
    """
    variants = Variants(planner, facts)
    ranking = Ranking(variants)
    singles = [single for lever in variants.levers if (single := variants.of([lever])) is not None]
    usable = [single for single in singles if single.result != "other"]
    stacks = variants.stacked(variants.own, usable)
    best = ranking.best([variants.own, *usable, *stacks])
    if best is None:  # only now what changes the training
        lowest = min([variants.own, *usable, *stacks], key=lambda variant: variant.total)
        stacks = list(dict.fromkeys([*stacks, *variants.stacked(lowest, singles)]))
        best = ranking.best([*singles, *stacks]) or ranking.closest([variants.own, *singles, *stacks])
    entries = sorted([*singles, *stacks], key=ranking.order)
    ranking.search([variant for variant in entries if variant.result != "other" and variants.saves(variant)])
    planner.traces += sum(own.traces for own in variants.planners)
    levers = [ranking.entry(variant) for variant in entries]
    return {"levers": levers, "levers_eval_micro_size": variants.eval_size or None, "best": best}


@dataclass(frozen=True)
class Fitting:
    """A variant with sizes, what they need, and the seconds of a step."""

    variant: Variant
    size: int
    eval_size: int
    measured: Measured
    seconds: float


class Ranking:
    """Orders the variants of one configuration, and finds the sizes that fit."""

    def __init__(self, variants: Variants):
        self.variants, self.own, self.room = variants, variants.own, variants.room
        self._keys = self.own.measured.bytes if self.own.measured else {}

    def order(self, variant: Variant) -> tuple[Any, ...]:
        """What fits, fastest first; what does not, lowest first; what saves nothing; what changes the training."""
        fits = variant.total <= self.room
        return (
            variant.result == "other",
            not self.variants.saves(variant),
            not fits,
            variant.seconds if fits else variant.total,
        )

    def entry(self, variant: Variant) -> Facts:
        """The variant in plan.json."""
        return {
            "overrides": variant.overrides,
            **(dict.fromkeys(self._keys) if variant.measured is None else variant.measured.bytes),
            "largest_micro_size": variant.largest,
            "relative_time": self._relative(variant.seconds),
            "certainty": variant.certainty,
            "result": variant.result,
        }

    def best(self, variants: Sequence[Variant]) -> Facts | None:
        """The fastest that fits; None if none does.

        Any lever counts only where nothing fits without it, or its gain is more than the error of the estimate; levers
        that round otherwise, in the same way, only compared with those that do not.
        """
        chosen: Fitting | None = None
        groups = [[variant for variant in variants if not variant.levers]]
        error = self.own.planner.error_of_time
        groups += [[v for v in variants if v.levers and v.result == result] for result in RESULTS]
        for group in groups:
            enough = math.inf if chosen is None else (1 - error) * chosen.seconds
            fittings = [self._fitting(variant) for variant in self._searched(group, enough)]
            fastest = min((f for f in fittings if f is not None), key=lambda f: f.seconds, default=None)
            if fastest is not None and (chosen is None or fastest.seconds < enough):
                chosen = fastest
        return None if chosen is None else self._plan(chosen)

    def _searched(self, variants: Iterable[Variant], enough: float) -> list[Variant]:
        """Those that fit and may take less than `enough` seconds, with their largest micro-batch."""
        fast = [v for v in variants if v.least < enough or math.isinf(enough)]
        candidates = sorted((v for v in fast if v.measured is not None), key=self.order)
        self.search(candidates)
        return [variant for variant in candidates if variant.largest]

    def search(self, variants: Iterable[Variant]) -> None:
        """Find the largest micro-batch of the first MOST_SEARCHES."""
        for variant in list(variants)[:MOST_SEARCHES]:
            if variant.largest is None and variant.measured is not None:
                variant.largest = variant.planner.largest().size

    def _fitting(self, variant: Variant) -> Fitting | None:
        """The variant with the largest sizes of training and evaluation that fit, and what they need."""
        planner, eval_size = variant.planner, 0
        if self.variants.evaluates:
            eval_size = self.variants.eval_size or self.variants.largest_eval
            if not eval_size or planner.needed_by_eval(eval_size) > self.room:
                eval_size = planner.largest_eval().size
            if not eval_size:
                return None
        fitting = self._with_sizes(variant, variant.largest or self.variants.smallest, eval_size)
        return fitting if fitting.measured.total <= self.room else None

    def _with_sizes(self, variant: Variant, size: int, eval_size: int) -> Fitting:
        measured = variant.planner.measured(size, eval_size)
        return Fitting(variant, size, eval_size, measured, self.variants.times(measured.work, variant.planner)[0])

    def closest(self, variants: Iterable[Variant]) -> Facts:
        """Where nothing fits: the lowest peak, with the smallest sizes or, where accumulation costs more than it saves,
        with the planned one.
        """
        lowest = min(variants, key=lambda variant: variant.total)
        eval_size = 1 if self.variants.evaluates else 0
        sizes = {self.variants.smallest, self.variants.size}
        fittings = [self._with_sizes(lowest, size, eval_size) for size in sizes]
        fitting = min(fittings, key=lambda fitting: fitting.measured.total)
        return self._plan(fitting) | {"missing_bytes": fitting.measured.total - self.room}

    def _relative(self, seconds: float) -> float | None:
        """To a step without levers; None where it is not known."""
        return round(seconds / self.own.seconds, 3) if math.isfinite(seconds) else None

    def _plan(self, fitting: Fitting) -> Facts:
        variant = fitting.variant
        settings = [
            *variant.overrides.split(),
            *size_overrides(self.variants.planner.config, fitting.size),
        ]
        if fitting.eval_size:
            settings.append(f"batch.eval_micro_size={fitting.eval_size}")
        return {
            "overrides": " ".join(settings),
            **fitting.measured.bytes,
            "missing_bytes": 0,
            "micro_size": fitting.size,
            "eval_micro_size": fitting.eval_size or None,
            "relative_time": self._relative(fitting.seconds),
            "certainty": fitting.measured.certainty,
            "result": variant.result,
        }
