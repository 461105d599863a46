"""The techniques in a plan: the savings of each and of combinations, and the best plan."""

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Sequence

from trainapp.assembly.resolved_targets import choose_device, resolve_targets
from trainapp.config.command_line import size_overrides
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.planning.measured import MeasuredEstimator
from trainapp.planning.planner import Facts, Planner, with_modes
from trainapp.planning.process import MemoryPlan
from trainapp.planning.recorder import Breakdown
from trainapp.planning.simulated_ranks import planned_world_size
from trainapp.techniques.catalogue import RESULTS, TECHNIQUES, Technique, overrides_of, with_techniques

MOST_STACKS = 5  # number of combinations tried
MOST_SEARCHES = 3  # number of variants whose largest micro-batch is searched
MOST_MEASURED = 4  # number of variants run with plan.measure
LEAST_SAVING = 0.01  # smallest relative saving for adding a technique to a combination
PATIENCE = 60.0  # seconds after which no further technique is run for real
log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class Variant:
    """The configuration with some techniques, and its memory at the planned size: savings do not add up."""

    techniques: tuple[Technique, ...]
    planner: Planner
    found: Breakdown

    @property
    def harm(self) -> int:
        """How much the training's result changes: an index of RESULTS."""
        return max((RESULTS.index(technique.result) for technique in self.techniques), default=0)

    @property
    def result(self) -> str:
        """How the training's result changes."""
        return RESULTS[self.harm]

    def entry(self, is_searched: bool) -> Facts:
        """The variant's entry in plan.json."""
        return {
            "names": [technique.setting for technique in self.techniques],
            "overrides": " ".join(overrides_of(self.techniques)),
            "peak_bytes": self.found.total,
            "largest_micro_size": self.planner.largest if is_searched else None,
            "result": self.result,
        }


def ranked(planner: Planner, plan: MemoryPlan) -> tuple[list[Facts], Facts | None]:
    """`techniques` and `best` of plan.json. Raises UserError for mistakes in the configuration."""
    size = plan.micro_size or 1
    own = Variant((), planner, planner.peak(size))
    end = time.monotonic() + (PATIENCE if planner.estimator.method == "measured" else math.inf)

    def tried(techniques: Sequence[Technique]) -> Variant | None:
        """The variant; None if the configuration is refused, or its memory unknown."""
        if time.monotonic() > end:
            return None
        try:
            changed = Planner(with_modes(_with(planner.config, techniques), planner.estimator), planner.estimator)
            changed.smallest = planner.smallest  # of the same model
            return Variant(tuple(techniques), changed, changed.peak(size))
        except UserError as error:
            log.debug("not with this model: %s", error)
        except Exception:
            log.debug("no estimate of %s", [technique.setting for technique in techniques], exc_info=True)
        return None

    shown = list(own.found.techniques)
    if planner.config.parallel.strategy == "single":
        shown = [one for one in shown if not any(name.startswith("parallel.") for name in one.changes)]
    alone = sorted(filter(None, (tried([one]) for one in shown)), key=lambda one: (one.harm, one.found.total))
    stacks = _stacked(own, [one for one in alone if one.result != "other"], tried)
    variants = sorted([*alone, *stacks], key=lambda one: (one.harm, one.found.total, len(one.techniques)))
    least = (1 - LEAST_SAVING) * own.found.total
    searched = [one for one in variants if one.found.total < least and one.result != "other"][:MOST_SEARCHES]
    by_harm = sorted(variants, key=lambda one: (one.harm, len(one.techniques), one.found.total))
    return [one.entry(one in searched) for one in variants], _best([own, *by_harm])


def _with(config: Config, techniques: Sequence[Technique]) -> Config:
    changed = with_techniques(config, techniques)
    settings = changed.activation_checkpointing
    if settings.mode != config.activation_checkpointing.mode:  # otherwise the modes chosen by `auto` would apply
        changed = dataclasses.replace(changed, activation_checkpointing=dataclasses.replace(settings, modes=None))
    return changed


def _stacked(
    own: Variant, alone: Sequence[Variant], tried: Callable[[Sequence[Technique]], Variant | None]
) -> list[Variant]:
    """Combinations: one technique after the other, in the order of `alone`, while each lowers the peak; a technique
    replaces those that set the same settings.
    """
    stack, made, count = own, list[Variant](), 0
    for variant in alone:
        technique = variant.techniques[0]
        others = [one for one in stack.techniques if not one.changes.keys() <= technique.changes.keys()]
        if others and count == MOST_STACKS:
            break
        count += bool(others)
        found = tried([*others, technique]) if others else variant
        if found is not None and found.found.total < (1 - LEAST_SAVING) * stack.found.total:
            stack = found
            made += [found] if others else []
    return made


def _best(variants: Sequence[Variant]) -> Facts:
    """`best` of plan.json: the first variant that fits, otherwise the one with the lowest peak."""
    for variant in variants:
        planner = variant.planner
        if planner.fits(planner.smallest):
            size = planner.largest
            break
    else:
        variant = min(variants, key=lambda variant: variant.found.total)
        planner = variant.planner
        size = planner.smallest
    peak = planner.peak(size).total
    return {
        "overrides": " ".join([*overrides_of(variant.techniques), *size_overrides(planner.config, size)]),
        "peak_bytes": peak,
        "missing_bytes": max(0, math.ceil(peak * (1 + planner.estimator.spare)) - planner.limit),
        "micro_size": size,
        "result": variant.result,
    }


def measured(config: Config, facts: Facts) -> Facts:
    """With `plan.measure`: adds `measured_bytes` and `step_seconds` to the plan and its first techniques, whose steps
    run for real in this process.
    """
    estimator = MeasuredEstimator(
        resolve_targets(config), planned_world_size(config), choose_device(config.train.device)
    )
    settings = dataclasses.replace(config.activation_checkpointing, modes=facts["modes"])
    config = dataclasses.replace(config, activation_checkpointing=settings)
    known = {technique.setting: technique for technique in TECHNIQUES}
    least = (1 - LEAST_SAVING) * facts["peak_bytes"]
    saving = [entry for entry in facts["techniques"] if entry["peak_bytes"] < least and entry["result"] != "other"]
    for entry in (facts, *saving[:MOST_MEASURED]):
        own = _with(config, [known[name] for name in entry.get("names", [])])
        try:
            entry["measured_bytes"] = estimator.peak(own, facts["micro_size"]).total
            entry["step_seconds"] = round(estimator.seconds(own, facts["micro_size"]), 4)
        except (RuntimeError, MemoryError, UserError) as error:
            log.debug("not measured", exc_info=True)
            facts["notes"].append(f"not measured: {entry.get('overrides', 'the plan')} ({error})")
    return facts
