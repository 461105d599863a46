"""Sizes that the plan predicts to be the largest that fit: for the begin of a run, and for after its first error."""

import dataclasses
import logging
import time
from dataclasses import dataclass

from trainapp.config.schema import Config, Plan
from trainapp.data.micro_batch_sizes import MicroBatchSizes
from trainapp.errors import UserError
from trainapp.oom.incident import Incident
from trainapp.plan import process
from trainapp.plan.planner import require_plannable
from trainapp.plan.sizes import EXACT
from trainapp.train.run import Run
from trainapp.train.sizes import Begin
from trainapp.units import bytes_text

# Seconds after which halving continues without a plan: some, or as long as a few more failed attempts would take.
PATIENCE, ATTEMPTS = 60.0, 5
log = logging.getLogger(__name__)


def first_sizes(config: Config) -> Begin | None:
    """For batch.micro_size=plan: the largest sizes within the memory limit, 1 where none fits. Takes seconds.

    None where the model cannot be traced. Raises UserError for what the planner does not cover.
    """
    facts = process.ask(config, only=_searched(config))
    if "largest_micro_size" not in facts:
        log.warning(
            "batch.micro_size=plan: %s (%s); the search begins with all samples, as with auto",
            facts["certainty"],
            facts["reason"],
        )
        return None
    begin = Begin(max(1, facts["largest_micro_size"]), _at_least_one(facts.get("largest_eval_micro_size")))
    evaluation = "" if begin.evaluation is None else f", evaluation {begin.evaluation}"
    log.info("micro-batch %d%s, as planned in %.1f s", begin.train, evaluation, facts["seconds"])
    return begin


def _searched(config: Config) -> tuple[str, ...]:
    is_searched = config.batch.eval_micro_size == "auto" and config.every.eval is not None
    return ("training", "evaluation") if is_searched else ("training",)


def _at_least_one(size: int | None) -> int | None:
    return None if size is None else max(1, size)


@dataclass(frozen=True)
class Prediction:
    """The largest size that fits. seconds: what it took. peak: the bytes it needs, where that is exact and known."""

    size: int
    seconds: float
    peak: int | None


def after_first_error(run: Run, failure: Incident, sizes: MicroBatchSizes) -> Prediction | None:
    """With `oom.plan`: the largest size within `memory.limit`. None where the plan does not cover the run, or is late.

    After training's first error, evaluation begins with its planned size, too. Takes seconds.
    """
    if not _may_ask(run, failure, sizes):
        return None
    sizes.is_planned = True  # it would answer the same again
    on_cpu = dataclasses.replace(run.config.train, device="cpu")
    config = dataclasses.replace(run.config, train=on_cpu, plan=Plan())  # for this run, whatever mode=plan would ask
    started = time.monotonic()
    patience = max(PATIENCE, ATTEMPTS * (started - run.attempt.started))
    kind = "evaluation micro-batch" if failure.evaluating else "micro-batch"
    log.info("planning the largest %s within %s, at most %.0f s", kind, bytes_text(failure.limit), patience)
    try:
        only = ("evaluation",) if failure.evaluating else _searched(config)
        # A stop request does not wait for the plan: a halved step is soon finished.
        facts = process.ask(config, only=only, patience=patience, stops=lambda: run.stop.signal is not None)
    except UserError as error:
        log.info("oom.plan: %s; halving instead", error)
        return None
    largest = facts.get("largest_eval_micro_size" if failure.evaluating else "largest_micro_size")
    if largest is None:
        log.info("oom.plan: %s; halving instead", facts.get("reason", facts["certainty"]))
        return None
    if not failure.evaluating:
        run.sizes.begin_evaluation_at(_at_least_one(facts.get("largest_eval_micro_size")))
        if facts["bucket"] not in (0, failure.bucket):
            log.info("oom.plan: the batches differ in shape, and the plan is for longer ones; halving instead")
            return None
    peak = facts["largest_peak_bytes"] if facts["certainty"] == EXACT and not failure.evaluating else None
    return Prediction(max(sizes.smallest, largest), time.monotonic() - started, peak)


def _may_ask(run: Run, failure: Incident, sizes: MicroBatchSizes) -> bool:
    """Whether the plan covers what has failed, and has not been asked.

    On a GPU a trace of the CPU would not hold; several ranks would each need a plan of their own. Where batches of
    several shapes have been seen, each has a size of its own, and the plan is for one.
    """
    config = run.config
    if not config.oom.plan or sizes.is_planned or config.batch.micro_size == "plan" or config.mode != "train":
        return False
    is_limit = run.memory.limit is not None and not failure.host and not failure.swallowed
    if not is_limit or run.state.device.type != "cpu" or run.ranks.world > 1 or len(sizes.searches) > 1:
        return False
    if config.batch.micro_schedule is not None or not config.oom.keep_global_batch:
        return False
    if failure.evaluating:
        is_free = config.batch.eval_micro_size == "auto" and config.every.eval is not None
    else:
        is_free = config.batch.micro_size == "auto" and config.accumulation.steps == "auto"
    try:
        require_plannable(config)
    except UserError:
        return False
    return is_free
