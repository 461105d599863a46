"""Levers on a device that is not here: what each would allocate and reserve, alone and stacked, and what then fits.

Without time, which only the device could tell: the best plan has the fewest levers rather than the fastest ones.
"""

import dataclasses
import logging
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from trainapp.config.pasted import size_overrides
from trainapp.errors import UserError
from trainapp.memory.levers.lever import RESULTS, Lever, result_of, to_paste, with_levers
from trainapp.plan.certainty import NOT_TRACEABLE
from trainapp.plan.cuda.planner import CudaPlanner
from trainapp.plan.sizes import Facts

MOST_SEARCHES = 4  # variants of each kind of result whose largest micro-batch is searched, at most 6 traces each
MOST_STACKS = 4  # combinations that are traced
LEAST_SAVING = 0.01  # of what is reserved
log = logging.getLogger(__name__)


@dataclass(eq=False)
class Variant:
    """The configuration with some levers, traced with the sizes of the plan. Bytes; None where it is not traceable.

    largest: the largest micro-batch that fits, 0 if none does; None where it has not been searched.
    """

    levers: tuple[Lever, ...]
    planner: "CudaPlanner"
    allocated: int | None = None
    reserved: int | None = None
    largest: int | None = None
    certainty: str = NOT_TRACEABLE

    @property
    def result(self) -> str:
        """What becomes of the training's result: see `Lever`."""
        return result_of(self.levers)

    @property
    def overrides(self) -> str:
        """What to paste on the command line."""
        return shlex.join(to_paste(self.levers, self.planner.config.command))

    @property
    def total(self) -> float:
        """What is reserved; infinite where it is not known."""
        return float("inf") if self.reserved is None else self.reserved

    def search(self) -> int:
        """The largest micro-batch that fits; 0 if none does."""
        if self.largest is None:
            self.largest = 0 if self.reserved is None else self.planner.largest().size
        return self.largest

    def entry(self) -> Facts:
        """In plan.json."""
        return {
            "overrides": self.overrides,
            "peak_bytes": self.allocated,
            "reserved_bytes": self.reserved,
            "largest_micro_size": self.largest,
            "relative_time": None,
            "certainty": self.certainty,
            "result": self.result,
        }


def ranked(planner: "CudaPlanner", facts: Facts) -> Facts:
    """`levers`, `levers_eval_micro_size` and `best` of plan.json, for the plan that these facts are of.

    Raises UserError for mistakes in the configuration.
    """
    return _Ranking(planner, facts).facts()


class _Ranking:
    def __init__(self, planner: "CudaPlanner", facts: Facts):
        self.planner, self.room, self.size = planner, planner.room, facts["micro_size"]
        # An evaluation whose size is chosen by the limit always comes near it, which would hide what a lever saves.
        is_fixed = planner.config.batch.eval_micro_size != "auto"
        self.eval_size = facts["eval_micro_size"] or 0 if is_fixed else 0
        self.largest_eval = facts["largest_eval_micro_size"] or 0
        peaks, certainty = planner.peaks(self.size, self.eval_size), planner.certainty(self.size, self.eval_size)
        self._planners: list[CudaPlanner] = []  # of all variants, also of those that are refused
        self.own = Variant((), planner, *peaks, facts["largest_micro_size"], certainty)

    def facts(self) -> Facts:
        levers = self.planner.at(self.size, self.eval_size).levers
        seen = [lever for lever in levers if not self._is_hidden(lever)]
        singles = [single for lever in seen if (single := self._traced((lever,))) is not None]
        saving = sorted((v for v in singles if self._saves(v)), key=lambda v: v.total)
        stacks = self._stacked([v for v in saving if v.result != "other"])
        best = self._best([*saving, *stacks])
        for variant in [v for v in saving if v.result != "other"][:MOST_SEARCHES]:
            variant.search()
        self.planner.traces += sum(planner.traces for planner in self._planners)
        entries = [variant.entry() for variant in sorted([*singles, *stacks], key=self._order)]
        return {"levers": entries, "levers_eval_micro_size": self.eval_size or None, "best": best}

    def _is_hidden(self, lever: Lever) -> bool:
        """Whether no trace shows what is against it: checkpoints, in one process what acts on several, bf16 on a
        device that emulates it.
        """
        of_ranks = lever.is_of_several_ranks and self.planner.world == 1
        is_bf16 = lever.changes.get("precision.mode") in ("bf16", "bf16_pure")
        emulated = is_bf16 and not self.planner.named.has_bf16
        return of_ranks or emulated or any(name.startswith("checkpointing.") for name in lever.changes)

    def _traced(self, levers: Sequence[Lever]) -> Variant | None:
        """The configuration with these levers; None where it is refused."""
        planner = self.planner.variant(with_levers(self.planner.config, levers))
        self._planners.append(planner)
        try:
            allocated, reserved = planner.peaks(self.size, self.eval_size)
        except UserError as error:
            log.debug("not with this model: %s", error)
            return None
        except Exception:
            log.debug("a lever could not be traced", exc_info=True)
            return Variant(tuple(levers), planner)
        fits_whole = reserved <= self.room and self.size == planner.share
        largest, certainty = planner.share if fits_whole else None, planner.certainty(self.size, self.eval_size)
        return Variant(tuple(levers), planner, allocated, reserved, largest, certainty)

    def _saves(self, variant: Variant) -> bool:
        return variant.total < (1 - LEAST_SAVING) * self.own.total

    def _stacked(self, saving: Sequence[Variant]) -> list[Variant]:
        """The lever that saves most, with the next one, and so on, as long as each lowers what is reserved."""
        if not saving:
            return []
        stack, found = saving[0], list[Variant]()
        for single in saving[1:]:
            lever = single.levers[0]
            others = [other for other in stack.levers if not other.changes.keys() & lever.changes.keys()]
            if len(others) < len(stack.levers) or len(found) == MOST_STACKS:
                continue  # it would take the place of one that saves more
            more = self._traced((*others, lever))
            if more is not None and more.total < (1 - LEAST_SAVING) * stack.total:
                stack = more
                found.append(more)
        return found

    def _order(self, variant: Variant) -> tuple[bool, bool, float]:
        """The lowest first; what saves nothing; what changes the training."""
        return variant.result == "other", not self._saves(variant), variant.total

    def _best(self, variants: Sequence[Variant]) -> Facts:
        """What fits, of the least change to the result, with the fewest levers and then the largest micro-batch; where
        nothing fits, what reserves least, and what it lacks.
        """
        by_result = [sorted((v for v in variants if v.result == r), key=lambda v: v.total) for r in RESULTS]
        for alike in ([self.own], *by_result):
            training = [variant for variant in alike[:MOST_SEARCHES] if variant.search()]
            for chosen in sorted(training, key=lambda variant: (len(variant.levers), -variant.search())):
                plan = self._plan(chosen, chosen.search())
                if not plan["missing_bytes"]:  # nor of the evaluation
                    return plan
        lowest = min([self.own, *variants], key=lambda variant: variant.total)
        return self._plan(lowest, self.planner.smallest)

    def _plan(self, variant: Variant, size: int) -> Facts:
        planner, eval_size = variant.planner, 0
        if planner.eval_samples:
            eval_size = self.eval_size or self.largest_eval
            if not eval_size or planner.peaks(0, eval_size)[1] > self.room:
                eval_size = planner.largest_eval().size or 1
        allocated, reserved = planner.peaks(size, eval_size)
        settings = [*variant.overrides.split(), *size_overrides(planner.config, size)]
        settings += [f"batch.eval_micro_size={eval_size}"] if eval_size else []
        return dataclasses.replace(variant, allocated=allocated, reserved=reserved, largest=size).entry() | {
            "overrides": " ".join(settings),
            "missing_bytes": max(0, reserved - self.room),
            "micro_size": size,
            "eval_micro_size": eval_size or None,
        }
