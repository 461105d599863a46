"""The techniques of a configuration in its plan: what each and their combinations save, and the best plan."""

import dataclasses
import logging
import math
import shlex
import time
from collections.abc import Sequence

from trainapp.assembly.components import choose_device, load_components
from trainapp.config.command_line import size_overrides
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.planning.measured import Measured
from trainapp.planning.planner import Facts, Planner
from trainapp.planning.process import Plan
from trainapp.planning.recorder import Breakdown
from trainapp.planning.simulated_ranks import world_of
from trainapp.techniques.catalogue import TECHNIQUES
from trainapp.techniques.technique import RESULTS, Technique, overrides_of, result_of, with_techniques

MOST_STACKS = 5  # combinations that are tried
MOST_SEARCHES = 3  # of the list, whose largest micro-batch is searched
MOST_MEASURED = 4  # with plan.measure
LEAST_SAVING = 0.01  # of the peak, for one more technique of a combination
PATIENCE = 60.0  # seconds, after which no further technique is run for real
log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class Variant:
    """The configuration with some techniques, and what it needs with the planned sizes."""

    techniques: tuple[Technique, ...]
    planner: Planner
    found: Breakdown

    @property
    def order(self) -> tuple[int, int, int]:
        """By least harm to the training's result, then by peak."""
        return RESULTS.index(result_of(self.techniques)), self.found.total, len(self.techniques)


class Ranking:
    """Tries the techniques of one plan, alone and stacked, at its sizes; savings do not add up."""

    def __init__(self, planner: Planner, size: int, eval_size: int, patience: float = math.inf):
        self.planner, self.size, self.eval_size = planner, size, eval_size
        self.own = Variant((), planner, planner.peak(size, eval_size))
        self._end = time.monotonic() + patience

    def of(self, techniques: Sequence[Technique]) -> Variant | None:
        """The configuration with these; None where it is refused, or its memory is not known."""
        if time.monotonic() > self._end:
            return None
        planner = self.planner.variant(with_techniques(self.planner.config, techniques))
        try:
            return Variant(tuple(techniques), planner, planner.peak(self.size, self.eval_size))
        except UserError as error:
            log.debug("not with this model: %s", error)
        except Exception:
            log.debug("no estimate of %s", [technique.setting for technique in techniques], exc_info=True)
        return None

    def alone(self) -> list[Variant]:
        """Each technique that applies and whose effect an estimate shows."""
        several = self.planner.config.parallel.strategy != "single"
        shown = (
            technique
            for technique in self.own.found.techniques
            if technique.shows_in_a_trace and (several or not technique.is_of_several_ranks)
        )
        return sorted(filter(None, (self.of([technique]) for technique in shown)), key=lambda variant: variant.order)

    def stacked(self, alone: Sequence[Variant]) -> list[Variant]:
        """One technique after the other, in the order of `alone`, as long as each lowers the peak; in place of those
        that set the same.
        """
        stack, made, tried = self.own, list[Variant](), 0
        for variant in alone:
            technique = variant.techniques[0]
            others = [one for one in stack.techniques if not one.changes.keys() <= technique.changes.keys()]
            if others and tried == MOST_STACKS:
                break
            tried += bool(others)
            found = self.of([*others, technique]) if others else variant
            if found is not None and found.found.total < (1 - LEAST_SAVING) * stack.found.total:
                stack = found
                made += [found] if others else []
        return made

    def best(self, variants: Sequence[Variant]) -> Facts:
        """The first that fits, from no technique on, by least harm; where none does, the one with the lowest peak."""
        for variant in (self.own, *variants):
            planner = variant.planner
            if planner.fits(planner.peak(planner.smallest, 0)) and (not self._evaluates or planner.largest_eval):
                return self._with_sizes(variant, planner.largest, self._eval_size_of(planner))
        lowest = min((self.own, *variants), key=lambda variant: variant.found.total)
        return self._with_sizes(lowest, lowest.planner.smallest, 1 if self._evaluates else 0)

    @property
    def _evaluates(self) -> bool:
        return bool(self.planner.workload.eval_samples)

    def _eval_size_of(self, planner: Planner) -> int:
        if not self._evaluates:
            return 0
        given = self.eval_size
        return given if given and planner.fits(planner.peak(0, given)) else planner.largest_eval

    def _with_sizes(self, variant: Variant, size: int, eval_size: int) -> Facts:
        found = variant.planner.peak(size, eval_size)
        needed = math.ceil(found.total * (1 + self.planner.estimator.spare))
        sizes = size_overrides(self.planner.config, size)
        sizes += [f"batch.eval_micro_size={eval_size}"] if eval_size else []
        return {
            "overrides": " ".join([*self._pasted(variant).split(), *sizes]),
            "peak_bytes": found.total,
            "missing_bytes": max(0, needed - self.planner.limit),
            "micro_size": size,
            "eval_micro_size": eval_size or None,
            "result": result_of(variant.techniques),
        }

    def entry(self, variant: Variant, is_searched: bool) -> Facts:
        """The variant in plan.json."""
        return {
            "names": [technique.setting for technique in variant.techniques],
            "overrides": self._pasted(variant),
            "peak_bytes": variant.found.total,
            "largest_micro_size": variant.planner.largest if is_searched else None,
            "result": result_of(variant.techniques),
        }

    def _pasted(self, variant: Variant) -> str:
        return shlex.join(overrides_of(variant.techniques)) if variant.techniques else ""


def ranked(planner: Planner, plan: Plan) -> tuple[list[Facts], Facts | None]:
    """`techniques` and `best` of plan.json. Raises UserError for mistakes in the configuration."""
    # An evaluation whose size is chosen by the limit always comes near it, which would hide what a technique saves.
    is_fixed = planner.config.batch.eval_micro_size != "auto"
    patience = PATIENCE if planner.estimator.method == "measured" else math.inf
    ranking = Ranking(planner, plan.micro_size or 1, (plan.eval_micro_size or 0) if is_fixed else 0, patience)
    alone = ranking.alone()
    stacks = ranking.stacked([variant for variant in alone if result_of(variant.techniques) != "other"])
    variants = sorted([*alone, *stacks], key=lambda variant: variant.order)
    least = (1 - LEAST_SAVING) * ranking.own.found.total
    searched = [v for v in variants if v.found.total < least and result_of(v.techniques) != "other"][:MOST_SEARCHES]
    by_harm = sorted(variants, key=lambda v: (v.order[0], len(v.techniques), v.found.total))
    return [ranking.entry(variant, variant in searched) for variant in variants], ranking.best(by_harm)


def measured(config: Config, facts: Facts) -> Facts:
    """With `plan.measure`: the facts with `measured_bytes` and `step_seconds`, of the plan and of its first techniques,
    whose steps are run for real in this process.
    """
    here = dataclasses.replace(config, plan=dataclasses.replace(config.plan, device=None))
    estimator = Measured(load_components(here), world_of(here), choose_device(here.train.device))
    known = {technique.setting: technique for technique in TECHNIQUES}
    entries = [dict(entry) for entry in facts["techniques"]]
    least = (1 - LEAST_SAVING) * facts["peak_bytes"]
    chosen = [entry for entry in entries if entry["peak_bytes"] < least and entry["result"] != "other"][:MOST_MEASURED]
    found = facts | {"techniques": entries, "notes": list(facts["notes"])}
    for entry in (found, *chosen):
        techniques = [known[name] for name in entry.get("names", [])]
        own = with_techniques(here, techniques)
        try:
            entry["measured_bytes"] = estimator.peak(own, facts["micro_size"], 0).total
            entry["step_seconds"] = round(estimator.seconds(own, facts["micro_size"]), 4)
        except (RuntimeError, MemoryError, UserError) as error:
            log.debug("not measured", exc_info=True)
            found["notes"].append(f"not measured: {entry.get('overrides', 'the plan')} ({error})")
    return found
