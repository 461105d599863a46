"""The plan of a configuration: its peak, what it consists of, how sure that is, and the largest sizes that fit."""

import logging
import pickle
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from trainapp.assembly.components import choose_device, load_components
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.files import atomic_write
from trainapp.memory.host_guard import guarded
from trainapp.memory.host_memory import total_bytes
from trainapp.memory.timeline import Drawing, Picture
from trainapp.planning.bounds import reason_of
from trainapp.planning.certainty import NOT_TRACEABLE, RANGE
from trainapp.planning.cuda.planner import for_device
from trainapp.planning.doubt import Doubt, of_foreign_code, of_reads
from trainapp.planning.estimating import EstimatingPlanner
from trainapp.planning.own_device import unseen
from trainapp.planning.process import UNSEEN, UNTRACEABLE
from trainapp.planning.ranking import ranked
from trainapp.planning.recorder import Peak
from trainapp.planning.sizes import Facts, Planner

log = logging.getLogger(__name__)

_NOT_ESTIMATED = (
    "an estimate from real steps needs one process on this machine: `parallel=single train.device=cpu` without "
    "plan.device. An operation of your own can be traced where it has a fake kernel (torch.library.register_fake)"
)


def _ignored(facts: Facts) -> None:
    pass


def plan(
    config: Config,
    only: Collection[str] = (),
    untraceable: str | None = None,
    early: Callable[[Facts], None] = _ignored,
) -> tuple[Facts, Peak | None]:
    """The plan as plain values, the content of plan.json, and the highest peak with its events.

    only: "training", "evaluation" or both: their largest micro-batches and nothing else, see `Planner.search`.
    untraceable: why a trace need not be tried. early: called with what is known before levers are ranked, which takes
    most of the time. Raises UserError for mistakes in the configuration, and for what is not planned. A model that
    cannot be traced is no error: `certainty` says so, `reason` why, and the rest is an estimate from small steps that
    are run for real. MeetsTrace where these need another process.
    """
    started = time.monotonic()
    require_plannable(config)
    planner = _planner(config)
    has_levers = config.plan.levers and not only
    planner.counts_work = has_levers
    if untraceable is None:
        try:
            facts, peak = planner.search(only) if only else planner.plan()
            doubt = of_reads(planner, facts) or (None if only else of_foreign_code(planner, facts))
            if doubt is not None and doubt.meets_trace:
                raise MeetsTrace(doubt.reason)
            if has_levers and facts["largest_micro_size"] is not None:  # else a band, in which no lever can be seen
                facts |= _hints(planner, facts)
                if doubt is None:
                    early(facts)
                facts |= _ranked(planner, facts)
            if doubt is not None:
                facts, peak = _doubted(planner, facts, doubt, only), None if doubt.reason else peak
        except (UserError, MeetsTrace):
            raise
        except Exception as error:
            log.debug("the model could not be traced", exc_info=True)
            untraceable = reason_of(error)
    if untraceable is not None:
        facts, peak = _estimated(planner, untraceable, only), None
    return facts | {"traces": planner.traces, "seconds": round(time.monotonic() - started, 3)}, peak


def facts_of(
    config: Config,
    only: Collection[str] = (),
    picture: Path | None = None,
    untraceable: str | None = None,
    early: Path | None = None,
) -> Facts:
    """The facts of `plan`. picture: also draw the step or evaluation that holds the peak to this PNG. early: where to
    leave, pickled, what is known before levers are ranked. Where another process has to answer, only what to ask it:
    UNSEEN in one that sees GPUs, of a plan for CUDA; UNTRACEABLE where steps would meet what a trace has left.
    """
    complete = unseen(config)
    if complete is not None:
        return {UNSEEN: complete}

    def leave(facts: Facts) -> None:
        if early is not None:
            with atomic_write(early, "wb") as file:
                pickle.dump(facts, file)

    with guarded(config.memory, total_bytes()):  # the user's code may allocate real memory
        try:
            facts, peak = plan(config, only, untraceable, leave)
        except MeetsTrace as error:
            return {UNTRACEABLE: str(error)}
    if picture is not None and peak is not None:
        Drawing([picture_of(peak, facts, picture)]).wait()
    return facts


def _planner(config: Config) -> "Planner":
    if config.plan.device is None:
        return Planner(config, load_components(config))
    return for_device(config, load_components)


class MeetsTrace(Exception):
    """The trace is wrong, and has left tensors that steps in this process would meet. The message is the reason."""


def _doubted(planner: Planner, facts: Facts, doubt: Doubt, only: Collection[str]) -> Facts:
    """The facts with the estimate in place of the trace, of which only the levers remain; without a reason, the trace
    as a range of which one end is known.
    """
    if doubt.reason and only:
        return _estimated(planner, doubt.reason, only)
    for entry in (*facts.get("levers", []), *([facts["best"]] if "best" in facts else [])):
        entry["certainty"] = NOT_TRACEABLE if entry["certainty"] == NOT_TRACEABLE else RANGE
    if not doubt.reason:
        facts = facts | {"certainty": RANGE, "notes": [*facts.get("notes", []), doubt.note]}
        if "eval_certainty" in facts:
            facts["eval_certainty"] = RANGE
        if not only:
            low, high = facts.get("range_bytes", [facts["peak_bytes"]] * 2)
            facts["range_bytes"] = [min(low, doubt.least or low), high]
        return facts
    facts.pop("range_bytes", None)
    estimate = _estimated(planner, doubt.reason, ())
    if "best" in facts:
        estimate["notes"] = [*estimate.get("notes", []), "the levers are from the trace"]
    return facts | estimate


def _hints(planner: Planner, facts: Facts) -> Facts:
    """Notes with what only a change of the user's code would save."""
    if planner.config.plan.device is not None:
        return {}
    hints = planner.at(facts["micro_size"], 0).hints
    return {"notes": [*facts.get("notes", []), *hints]} if hints else {}


def _ranked(planner: "Planner", facts: Facts) -> Facts:
    """The levers; a note in their place if they cannot be ranked, which is no reason to withhold the peak."""
    try:
        return ranked(planner, facts)
    except UserError:
        raise
    except Exception as error:
        log.debug("the levers could not be ranked", exc_info=True)
        return {"notes": [*facts.get("notes", []), f"the levers could not be ranked ({reason_of(error)})"]}


def require_plannable(config: Config) -> None:
    """Raises UserError for what the planner does not cover."""
    if config.train.compile:
        raise UserError("train.compile=true: a compiled step cannot be planned; use train.compile=false")
    if config.plan.device is not None:
        return
    device = choose_device(config.train.device)
    if device.type not in ("cpu", "cuda"):
        raise UserError(
            f"train.device={config.train.device}: the plan is for the CPU or for CUDA, and would not hold on "
            f"{device.type}; use train.device=cpu, or name a device, such as plan.device=h100-80gb"
        )


def _estimated(planner: Planner, reason: str, only: Collection[str]) -> Facts:
    """The plan from steps that are run for real; `reason` alone where they fail, too, and where they would say nothing:
    for several ranks, and for a device that is not here.
    """
    config = planner.config
    unknown: Facts = {"certainty": NOT_TRACEABLE, "reason": reason, "limit_bytes": planner.limit}
    if planner.world > 1 or config.plan.device is not None:
        return unknown | {"notes": [_NOT_ESTIMATED]}
    by_steps = EstimatingPlanner(config, planner.components, begins_run=bool(only))
    try:
        facts, _ = by_steps.search(only) if only else by_steps.plan()
    except UserError:
        raise
    except Exception as error:
        log.debug("no small step could be run", exc_info=True)
        return unknown | {"reason": f"{reason}; nor can small steps be run ({reason_of(error)})"}
    facts.pop("range_bytes", None)
    if "eval_certainty" in facts:
        facts["eval_certainty"] = NOT_TRACEABLE
    steps = by_steps.steps
    return facts | unknown | {"notes": [steps.note(), *facts.get("notes", [])], "estimate": steps.basis()}


def picture_of(peak: Peak, facts: Facts, path: Any) -> Picture:
    """The events of the step or evaluation that holds the peak, stacked by kind."""
    title = f"planned memory, micro-batch {facts['micro_size']}: {facts['binding_phase'].replace('_', ' ')} binds"
    return Picture(peak.events, peak.numbered_kinds, facts["limit_bytes"], title, path)
