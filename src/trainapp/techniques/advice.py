"""The techniques to advise after memory ran out: those that relieve what filled it, best first."""

from collections import Counter
from dataclasses import dataclass

from trainapp.memory.live_tensors import Category
from trainapp.techniques.catalogue import RESULTS, Situation, Technique, available
from trainapp.techniques.savings import Shortage

MOST_ADVISED = 5  # number of techniques that are advised
MOST_FOR_CATEGORY = 3  # of them for one category of memory, unless the others have too few
LEAST_SHARE = 0.1  # of what is missing: a technique that saves less is not advised


@dataclass(frozen=True)
class Advice:
    """A technique, with its savings in bytes: upper bounds.

    Attributes:
        technique: the technique.
        saved_bytes: how many it saves of what filled memory.
        category: of memory in which it saves the most.
        sort_key: among all advice, lower is better: the more its category held the better, then the less the
            training's result changes, then the more it saves.
    """

    technique: Technique
    saved_bytes: int
    category: Category
    sort_key: tuple[int, int, int]


def advised(situation: Situation, shortage: Shortage) -> list[Advice]:
    """Return at most MOST_ADVISED techniques that apply and are not in force, best first.

    Args:
        situation: of the run.
        shortage: what filled memory.
    """
    least = max(1.0, LEAST_SHARE * shortage.missing)
    candidates = []
    for technique in available(situation):
        advice = _advice(technique, situation, shortage)
        if advice is not None and advice.saved_bytes >= least:
            candidates.append(advice)
    candidates.sort(key=lambda advice: advice.sort_key)
    return _of_several_categories(_without_alternatives(candidates))


def _advice(technique: Technique, situation: Situation, shortage: Shortage) -> Advice | None:
    """Return the advice to use a technique; None if it saves nothing of what filled memory."""
    savings = technique.savings(situation, shortage)
    if not savings:
        return None
    saved_bytes = int(sum(savings.values()))
    category = max(savings, key=lambda category: savings[category])
    filled = max(shortage.of(category), int(savings[category]))  # what was asked for is not held yet
    harm = RESULTS.index(technique.result)
    return Advice(technique, saved_bytes, category, sort_key=(-filled, harm, -saved_bytes))


def _without_alternatives(ranked: list[Advice]) -> list[Advice]:
    """Return the advice without other values of the settings that a better one sets with as little harm: one of several
    optimizers in fewer bits, or modes of checkpointing.
    """
    best: dict[tuple[frozenset[str], str], Advice] = {}
    for advice in ranked:
        settings = frozenset(advice.technique.changes)
        best.setdefault((settings, advice.technique.result), advice)
    return list(best.values())


def _of_several_categories(ranked: list[Advice]) -> list[Advice]:
    """Return the first MOST_ADVISED. One category has more than MOST_FOR_CATEGORY only if others leave places."""
    first = []
    rest = []
    count_by_category = Counter[Category]()
    for advice in ranked:
        count_by_category[advice.category] += 1
        if count_by_category[advice.category] <= MOST_FOR_CATEGORY:
            first.append(advice)
        else:
            rest.append(advice)
    chosen = [*first, *rest][:MOST_ADVISED]
    return sorted(chosen, key=lambda advice: advice.sort_key)
