"""The plan of a configuration: its peak, what it consists of, how sure that is, and the largest sizes that fit."""

import functools
import logging
import time
from typing import Any

from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.memory.host_memory import total_bytes
from trainapp.memory.timeline import Picture
from trainapp.plan.largest import largest_that_fits
from trainapp.plan.ranking import ranked
from trainapp.plan.recorder import PHASES, Peak
from trainapp.plan.traced_run import Trace, trace
from trainapp.train.components import Components, choose_device, load_components
from trainapp.units import parse_memory_size

EXACT, RANGE, NOT_TRACEABLE = "exact", "range", "not traceable"
Facts = dict[str, Any]
log = logging.getLogger(__name__)


def plan(config: Config, search_only: bool = False) -> tuple[Facts, Peak | None]:
    """The plan as plain values, the content of plan.json, and the highest peak with its events.

    search_only: training's largest micro-batch and nothing else. Raises UserError for mistakes in the configuration,
    and for what is not planned. A model that cannot be traced is no error: `certainty` says so, and `reason` why.
    """
    started = time.monotonic()
    require_plannable(config)
    components = load_components(config)
    planner = Planner(config, components)
    try:
        if search_only:
            facts, peak = planner.search()
        else:
            planner.counts_work = config.plan.levers
            facts, peak = planner.plan()
            if config.plan.levers:
                facts |= _ranked(planner, facts)
    except UserError:
        raise
    except Exception as error:
        log.debug("the model could not be traced", exc_info=True)
        return {"certainty": NOT_TRACEABLE, "reason": reason_of(error), "limit_bytes": planner.limit}, None
    return facts | {"traces": planner.traces, "seconds": round(time.monotonic() - started, 3)}, peak


def _ranked(planner: "Planner", facts: Facts) -> Facts:
    """The levers; a note in their place if they cannot be ranked, which is no reason to withhold the peak."""
    try:
        return ranked(planner, facts)
    except UserError:
        raise
    except Exception as error:
        log.debug("the levers could not be ranked", exc_info=True)
        return {"notes": [*facts.get("notes", []), f"the levers could not be ranked ({reason_of(error)})"]}


def reason_of(error: BaseException) -> str:
    """The error in one line, with its type: torch names the operation in its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def require_plannable(config: Config) -> None:
    """Raises UserError for what the planner does not cover."""
    if config.parallel.strategy != "single":
        raise UserError(
            f"parallel={config.parallel.strategy}: the plan is for one process; use parallel=single, with this rank's "
            "share of the batch as batch.global_size"
        )
    if config.train.compile:
        raise UserError("train.compile=true: a compiled step cannot be planned; use train.compile=false")
    device = choose_device(config.train.device)
    if device.type != "cpu":
        raise UserError(
            f"train.device={config.train.device}: the plan is for the CPU, and would not hold on {device.type}; use "
            "train.device=cpu"
        )


class Planner:
    """Traces one configuration at the sizes that the plan needs, each at most once."""

    def __init__(self, config: Config, components: Components):
        self.config, self.components = config, components
        self.counts_work = False  # whether traces also count operations
        self.traces = 0
        self.certainty = EXACT  # RANGE once a trace has made something up
        setting = config.memory.limit
        total = total_bytes()
        self.limit = total if setting is None else parse_memory_size(setting, total)
        self.share = min(config.batch.global_size, len(components.train_data))
        evaluated = components.eval_data
        self.eval_samples = 0 if evaluated is None or config.every.eval is None else len(evaluated)
        self.at = functools.cache(self._trace)

    def variant(self, config: Config) -> "Planner":
        """Of a configuration with the same model and data: see `ranking`."""
        planner = Planner(config, self.components)
        planner.counts_work, planner.smallest = self.counts_work, self.smallest
        return planner

    @functools.cached_property
    def smallest(self) -> int:
        """The model cannot train on fewer samples at once."""
        return self.at(self.share, 0).smallest

    def _trace(self, size: int, eval_size: int, otherwise: bool = False, which: str = "longest") -> Trace:
        """size, eval_size: 0 leaves out training, or evaluation."""
        self.traces += 1
        found = trace(
            self.config,
            self.components,
            size or self.smallest,
            eval_size or 1,
            training=size > 0,
            evaluation=eval_size > 0,
            otherwise=otherwise,
            which="longest" if which == "longest" else "shortest",
            count_work=self.counts_work,
        )
        if found.reads or found.varies:
            self.certainty = RANGE
        return found

    def search(self) -> tuple[Facts, Peak | None]:
        """Training's largest micro-batch alone."""
        largest = self._largest()
        return {"certainty": self.certainty, "limit_bytes": self.limit, "largest_micro_size": largest}, None

    def plan(self) -> tuple[Facts, Peak | None]:
        """Everything. At the sizes that the configuration gives, else at the largest that fit, else at the smallest."""
        largest = self._largest()
        largest_eval = self.largest_eval() if self.eval_samples else None
        size = self.given_size() or largest or min(self.smallest, self.share)
        eval_size = 0
        if self.eval_samples:
            given = self.config.batch.eval_micro_size
            eval_size = min(given, self.eval_samples) if given != "auto" else (largest_eval or 1)
        low, high, notes = self._bounds(size, eval_size)
        certainty = EXACT if low.total == high.total and not notes else RANGE
        static = (self.at(size, 0)).static
        facts: Facts = {
            "peak_bytes": high.total,
            "certainty": certainty,
            **({"range_bytes": [low.total, high.total]} if certainty == RANGE else {}),
            **({"notes": notes} if notes else {}),
            "binding_phase": high.phase,
            "binding_module": high.module,
            "phases": {name: high.phases[name] for name in PHASES if name in high.phases},
            "kinds": high.kinds,
            "static": {kind.value: size for kind, size in static.items()},
            "micro_size": size,
            "eval_micro_size": eval_size or None,
            "limit_bytes": self.limit,
            "largest_micro_size": largest,
            "largest_eval_micro_size": largest_eval,
        }
        return facts, high

    def given_size(self) -> int | None:
        """The micro-batch that the configuration fixes, if it does."""
        batch, parts = self.config.batch, self.config.accumulation.steps
        if batch.micro_schedule is not None:
            plans = batch.micro_schedule.values()
            largest = max(max(plan.values()) if isinstance(plan, dict) else plan for plan in plans)
            return min(largest, self.share)
        if parts != "auto":
            return -(-self.share // parts)
        return min(batch.micro_size, self.share) if isinstance(batch.micro_size, int) else None

    def _largest(self) -> int:
        def peak_of(size: int) -> int:
            found = self.at(size, 0).training
            assert found is not None, "traced without training"
            return found.total

        smallest = min(self.smallest, self.share)
        return largest_that_fits(peak_of, self.limit, self.share, smallest)

    def largest_eval(self) -> int:
        """Up to where the search of a run starts, twice the share of the global batch."""

        def peak_of(size: int) -> int:
            found = self.at(0, size).evaluation
            return 0 if found is None else found.total

        return largest_that_fits(peak_of, self.limit, min(2 * self.share, self.eval_samples))

    def _bounds(self, size: int, eval_size: int) -> tuple[Peak, Peak, list[str]]:
        """The lowest and the highest peak that the run may have, and why they differ."""
        notes: list[str] = []
        traces = [self.at(size, 0), *([self.at(0, eval_size)] if eval_size else [])]
        high = low = self._joined(traces)
        if any(found.varies for found in traces):
            notes.append(
                "the batches differ in shape: the longest of the first ones counts, and a longer one needs more"
            )
            shortest = self._joined([self.at(size, 0, False, "shortest")])
            low = shortest if shortest.total < low.total else low
        reads = sorted({phase for found in traces for phase in found.reads})
        if reads:
            notes.append(f"the model or the task reads values ({', '.join(reads)}): both ways were traced")
        clips = high.phase == "clip" and self.config.train.grad_clip is not None
        if reads or clips:  # whether gradients will be clipped is not known either
            try:
                other = self._joined([self.at(size, 0, True), *([self.at(0, eval_size, True)] if eval_size else [])])
            except UserError:
                raise
            except Exception as error:
                notes.append(f"the other way cannot be traced ({reason_of(error)})")
            else:
                low = other if other.total < low.total else low
                high = other if other.total > high.total else high
        return low, high, notes

    @staticmethod
    def _joined(traces: list[Trace]) -> Peak:
        return functools.reduce(Peak.joined, [p for t in traces for p in (t.training, t.evaluation) if p is not None])


def picture_of(peak: Peak, facts: Facts, path: Any) -> Picture:
    """The events of the step or evaluation that holds the peak, stacked by kind."""
    title = f"planned memory, micro-batch {facts['micro_size']}: {facts['binding_phase'].replace('_', ' ')} binds"
    return Picture(peak.events, peak.numbered_kinds, facts["limit_bytes"], title, path)
