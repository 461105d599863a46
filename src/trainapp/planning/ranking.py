"""The techniques in a plan: the savings of each and of combinations, and the best plan."""

import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Sequence

from trainapp.assembly.resolved_targets import choose_device, resolve_targets
from trainapp.config.claimed_settings import with_claimed_settings
from trainapp.config.command_line import size_overrides
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.memory.live_tensors import Category
from trainapp.planning.fitting import Planner, with_cheapest_modes
from trainapp.planning.measured import MeasuredEstimator
from trainapp.planning.process import Facts, MemoryPlan, OnReport
from trainapp.planning.recorder import Breakdown
from trainapp.planning.simulated_ranks import planned_world_size
from trainapp.techniques.catalogue import RESULTS, TECHNIQUES, Technique, overrides_of, with_techniques

MOST_COMBINATIONS = 9  # number of combinations tried
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
    breakdown: Breakdown  # at the planned size

    @property
    def peak(self) -> int:
        """The peak at the planned size, in bytes."""
        return self.breakdown.total

    @property
    def harm(self) -> int:
        """How much the training's result changes: an index of RESULTS."""
        harms = [RESULTS.index(technique.result) for technique in self.techniques]
        return max(harms, default=0)

    @property
    def rounds_weights(self) -> bool:
        """Whether the weights themselves are rounded, and not only what is computed from them."""
        return any(_rounds_weights(technique) for technique in self.techniques)

    @property
    def result(self) -> str:
        """How the training's result changes."""
        return RESULTS[self.harm]

    def facts(self, is_searched: bool) -> Facts:
        """Return the variant's entry in plan.json.

        Args:
            is_searched: whether its largest micro-batch is searched.
        """
        largest = None
        if is_searched:
            largest = self.planner.largest
        return {
            "names": [technique.setting for technique in self.techniques],
            "overrides": " ".join(overrides_of(self.techniques)),
            "peak_bytes": self.peak,
            "largest_micro_size": largest,
            "result": self.result,
        }


MakeVariant = Callable[[Sequence[Technique]], Variant | None]


def rank_techniques(
    planner: Planner, plan: MemoryPlan, report: OnReport = lambda part: None
) -> tuple[list[Facts], Facts | None]:
    """Return `techniques` and `best` of plan.json. Raises UserError for mistakes in the configuration.

    Args:
        planner: of the configuration.
        plan: its plan.
        report: is called with `technique`, the facts of each variant that was tried: `overrides`, `peak_bytes` (None if
            it does not apply), `tried` and `most`, the numbers of variants so far and at most; and with `search`, the
            overrides of a variant whose largest micro-batch is searched next.
    """
    size = plan.micro_size or 1
    unchanged = Variant((), planner, planner.peak(size))
    patience = PATIENCE if planner.estimator.method == "measured" else math.inf
    make_silently = functools.partial(_make_variant, planner, size, time.monotonic() + patience)
    applicable = _applicable_techniques(unchanged)
    make_variant = _Reported(make_silently, report, len(applicable) + MOST_COMBINATIONS)

    # Each technique by itself, least harm first, then the largest saving; then their combinations, in that order.
    single = []
    for technique in applicable:
        variant = make_variant([technique])
        if variant is not None:
            single.append(variant)
    single.sort(key=lambda variant: (variant.harm, variant.peak))
    combinable = [variant for variant in single if variant.result != "other"]
    combinations = _combine(unchanged, combinable, make_variant)
    variants = [*single, *combinations]
    variants.sort(key=lambda variant: (variant.harm, variant.peak, len(variant.techniques)))

    # The largest micro-batch only of the first: a search is several estimates.
    most = (1 - LEAST_SAVING) * unchanged.peak
    worthwhile = [variant for variant in variants if variant.peak < most and variant.result != "other"]
    searched = worthwhile[:MOST_SEARCHES]
    techniques = []
    for variant in variants:
        if variant in searched:
            report({"search": " ".join(overrides_of(variant.techniques))})
        techniques.append(variant.facts(is_searched=variant in searched))

    # The best plan changes as little as it can, so it looks at fewer techniques before lower peaks.
    return techniques, _best([unchanged, *sorted(variants, key=_change)])


def _change(variant: Variant) -> tuple[int, bool, int, int]:
    """Return how much a variant changes, to sort by."""
    return variant.harm, variant.rounds_weights, len(variant.techniques), variant.peak


class _Reported:
    """A function that makes variants, of which each is reported."""

    def __init__(self, make_variant: MakeVariant, report: OnReport, most: int):
        self._make_variant = make_variant
        self._report = report
        self._most = most
        self._tried = 0

    def __call__(self, techniques: Sequence[Technique]) -> Variant | None:
        variant = self._make_variant(techniques)
        self._tried += 1
        peak = None if variant is None else variant.peak
        overrides = " ".join(overrides_of(techniques))
        facts = {"overrides": overrides, "peak_bytes": peak, "tried": self._tried, "most": self._most}
        self._report({"technique": facts})
        return variant


def _applicable_techniques(unchanged: Variant) -> list[Technique]:
    """Return the techniques that a plan tries: of one process, none that needs several."""
    techniques = list(unchanged.breakdown.techniques)
    if unchanged.planner.config.parallel.strategy != "single":
        return techniques
    return [technique for technique in techniques if not _needs_ranks(technique)]


def _rounds_weights(technique: Technique) -> bool:
    return technique.result == "rounded" and Category.PARAMETERS in technique.relieves


def _needs_ranks(technique: Technique) -> bool:
    return any(name.startswith("parallel.") for name in technique.changes)


def _make_variant(planner: Planner, size: int, deadline: float, techniques: Sequence[Technique]) -> Variant | None:
    """Return a variant of the planner's configuration; None if the configuration is refused, its memory unknown, or the
    deadline (in time.monotonic()) has passed.
    """
    if time.monotonic() > deadline:
        return None
    try:
        config = _with(planner.config, techniques)
        config = with_cheapest_modes(config, planner.estimator)
        changed = Planner(config, planner.estimator)
        changed.smallest = planner.smallest  # of the same model
        return Variant(tuple(techniques), changed, changed.peak(size))
    except UserError as error:
        log.debug("not with this model: %s", error)
    except Exception:
        log.debug("no estimate of %s", [technique.setting for technique in techniques], exc_info=True)
    return None


def _with(config: Config, techniques: Sequence[Technique]) -> Config:
    """Return the configuration with these techniques."""
    changed = with_techniques(config, techniques)
    settings = changed.activation_checkpointing
    if settings.mode != config.activation_checkpointing.mode:  # otherwise the modes chosen by `auto` would apply
        settings = dataclasses.replace(settings, modes=None)
        changed = dataclasses.replace(changed, activation_checkpointing=settings)
    return changed


def _combine(unchanged: Variant, single: Sequence[Variant], make_variant: MakeVariant) -> list[Variant]:
    """Return combinations of techniques that lower the peak, at most MOST_COMBINATIONS.

    First those that keep the result; then these with one technique that rounds something else than weights, each in
    its turn; then the lowest of all with further ones. A technique replaces those that set the same settings.

    Args:
        unchanged: the configuration.
        single: its techniques, each by itself, in the order in which they are combined.
        make_variant: makes a variant of the configuration.
    """
    same = [variant for variant in single if variant.result == "same"]
    rounded = [variant for variant in single if variant.result == "rounded"]
    combinations = _Combinations(make_variant)

    lowest_same = unchanged
    for variant in same:
        lowest_same = combinations.add(lowest_same, variant)

    lowest = lowest_same
    for variant in rounded:
        if variant.rounds_weights:
            continue
        with_one = combinations.add(lowest_same, variant)
        if with_one is not lowest_same and _lowers(with_one, lowest):
            lowest = with_one

    rounded.sort(key=lambda variant: variant.rounds_weights)
    for variant in rounded:
        if variant.techniques[0] not in lowest.techniques:
            lowest = combinations.add(lowest, variant)
    return combinations.variants


class _Combinations:
    """The combinations that were tried, and lower the peak."""

    def __init__(self, make_variant: MakeVariant):
        self.variants: list[Variant] = []
        self._make_variant = make_variant
        self._tried: set[frozenset[str]] = set()  # the settings of each

    def add(self, base: Variant, single: Variant) -> Variant:
        """Return `base` with another technique, if that lowers its peak; otherwise `base`.

        Args:
            base: techniques that have lowered the peak so far.
            single: the technique by itself.
        """
        technique = single.techniques[0]
        compatible = []
        for earlier in base.techniques:
            is_replaced = earlier.changes.keys() <= technique.changes.keys()
            if not is_replaced:
                compatible.append(earlier)
        if not compatible:  # no combination: the technique by itself
            return single if _lowers(single, base) else base

        techniques = [*compatible, technique]
        settings = frozenset(part.setting for part in techniques)
        if settings in self._tried or len(self._tried) == MOST_COMBINATIONS:
            return base
        self._tried.add(settings)
        combination = self._make_variant(techniques)
        if combination is None or not _lowers(combination, base):
            return base
        self.variants.append(combination)
        return combination


def _lowers(variant: Variant, earlier: Variant) -> bool:
    """Return whether a variant's peak is lower than an earlier one's by at least LEAST_SAVING."""
    return variant.peak < (1 - LEAST_SAVING) * earlier.peak


def _best(variants: Sequence[Variant]) -> Facts:
    """Return `best` of plan.json: the first variant that fits, otherwise the one with the lowest peak."""
    # One after the other: whether one fits costs an estimate.
    best = next((variant for variant in variants if variant.planner.fits(variant.planner.smallest)), None)
    if best is not None:
        planner = best.planner
        size = planner.confirmed_largest
    else:
        best = min(variants, key=lambda variant: variant.peak)
        planner = best.planner
        size = planner.smallest

    peak = planner.full_peak(size).total
    needed_bytes = math.ceil(peak * (1 + planner.estimator.spare))
    overrides = [*overrides_of(best.techniques), *size_overrides(planner.config, size)]
    return {
        "overrides": " ".join(overrides),
        "peak_bytes": peak,
        "missing_bytes": max(0, needed_bytes - planner.limit),
        "micro_size": size,
        "result": best.result,
    }


def add_measurements(config: Config, facts: Facts) -> Facts:
    """Add `measured_bytes` and `step_seconds` to the plan and its first techniques, whose steps run for real in this
    process: for `plan.measure`. Return the plan.

    Args:
        config: the configuration.
        facts: the content of plan.json. What cannot be measured gets a note.
    """
    config = with_claimed_settings(config)
    device = choose_device(config.train.device)
    estimator = MeasuredEstimator(resolve_targets(config), planned_world_size(config), device)

    # With the modes that the plan has chosen.
    settings = dataclasses.replace(config.activation_checkpointing, modes=facts["modes"])
    config = dataclasses.replace(config, activation_checkpointing=settings)

    technique_of = {technique.setting: technique for technique in TECHNIQUES}

    # The plan itself, and the first techniques that save something.
    most = (1 - LEAST_SAVING) * facts["peak_bytes"]
    worthwhile = [entry for entry in facts["techniques"] if entry["peak_bytes"] < most and entry["result"] != "other"]
    for entry in (facts, *worthwhile[:MOST_MEASURED]):  # the plan itself has no `names`
        techniques = [technique_of[name] for name in entry.get("names", [])]
        changed = _with(config, techniques)
        try:
            entry["measured_bytes"] = estimator.peak(changed, facts["micro_size"]).total
            entry["step_seconds"] = round(estimator.seconds(changed, facts["micro_size"]), 4)
        except (RuntimeError, MemoryError, UserError) as error:
            log.debug("not measured", exc_info=True)
            subject = entry.get("overrides", "the plan")
            facts["notes"].append(f"not measured: {subject} ({error})")
    return facts
