"""After the first out-of-memory error of a run: the largest size that the plan predicts to fit."""

import logging
import time
from collections.abc import Callable

from trainapp.config.schema import Config
from trainapp.data.micro_batch_sizes import MicroBatchSizes
from trainapp.errors import UserError
from trainapp.oom.incident import Incident
from trainapp.planning import process
from trainapp.planning.first_sizes import Facts, at_least_one, searched, what_does_not_fit
from trainapp.planning.own_device import config_to_plan
from trainapp.planning.planner import require_plannable
from trainapp.planning.promised import forecast_of
from trainapp.planning.ranks import by_rank_zero
from trainapp.train.run import Run
from trainapp.units import bytes_text

# Seconds after which halving continues without a plan: some, or as long as a few more failed attempts would take.
PATIENCE, ATTEMPTS = 60.0, 5
log = logging.getLogger(__name__)


def follow_after_first_error(run: Run, failure: Incident, sizes: MicroBatchSizes) -> str:
    """With `oom.plan`: continue with the largest size within `memory.limit`, which becomes `failure.new_size`.

    Returns the words for the log; none where the plan does not cover the run, or is late. After training's first error,
    evaluation begins with its planned size, too. Takes seconds. Collective, except for an evaluation of a rank's own.
    """
    ranks = run.ranks
    if failure.alone and ranks.world > 1:
        return ""
    if not all(ranks.all_gather_object(_may_ask(run, failure, sizes))):
        return ""
    sizes.is_planned = True  # it would answer the same again
    config = config_to_plan(run)
    started = time.monotonic()
    only = ("evaluation",) if failure.evaluating else searched(config)
    patience = max(PATIENCE, ATTEMPTS * (started - run.attempt.started))
    if ranks.world > 1:
        patience = min(patience, config.parallel.timeout / 2)  # the other ranks wait in a collective
    kind = "evaluation micro-batch" if failure.evaluating else "micro-batch"
    log.info("planning the largest %s within %s, at most %.0f s", kind, bytes_text(failure.limit), patience)

    def ask(config: Config) -> Facts | None:
        # A stop request does not wait for the plan: a halved step is soon finished.
        return _asked(config, only, patience, stops=lambda: run.stop.signal is not None)

    facts = by_rank_zero(ranks, config, ask)
    seconds = time.monotonic() - started
    run.meter.pause(seconds)
    run.tracker.progress.pause(seconds)
    if facts is None:
        return ""
    if lacking := what_does_not_fit(config, facts):
        log.info("oom.plan: %s", lacking.message)
    failed = sizes.failed_buckets[0] if sizes.failed_buckets else 0
    if failure.evaluating:
        size, forecast = facts["largest_eval_micro_size"], None
    else:
        run.sizes.begin_evaluation_with(at_least_one(facts.get("largest_eval_micro_size")))
        _, forecast = forecast_of(facts, "oom.plan", failed)
        size = forecast.size
        if config.plan.device is not None:  # steps measure what is allocated, which is not what a size is limited by
            forecast = None
    if not sizes.expect(failed, max(sizes.smallest, size), forecast):
        return f" (the plan expected {size} to fit)"
    failure.new_size = sizes.search(failed).size
    return f" as planned in {seconds:.1f} s"


def _asked(config: Config, only: tuple[str, ...], patience: float, stops: Callable[[], bool]) -> Facts | None:
    """The plan's answer; None where there is none."""
    try:
        facts = process.ask(config, only=only, patience=patience, stops=stops)
    except UserError as error:
        log.info("oom.plan: %s; halving instead", error)
        return None
    if facts.get("largest_micro_size" if "training" in only else "largest_eval_micro_size") is None:
        log.info("oom.plan: %s; halving instead", facts.get("reason", facts["certainty"]))
        return None
    return facts


def _may_ask(run: Run, failure: Incident, sizes: MicroBatchSizes) -> bool:
    """Whether the plan covers what has failed, and has not been asked.

    On several GPUs it leaves a tenth to spare, so that halving may well end nearer to what fits.
    """
    config = run.config
    if config.updates and not failure.evaluating:
        return False  # the plan's peak is that of the highest update, which need not be the one that failed
    if not config.oom.plan or sizes.is_planned or config.batch.micro_size == "plan" or config.mode != "train":
        return False
    on_gpu = run.state.device.type == "cuda"
    is_limit = (run.memory.limit is not None or on_gpu) and not failure.host and not failure.swallowed
    if not is_limit or (on_gpu and run.ranks.world > 1):
        return False
    if config.batch.micro_schedule is not None or not config.oom.keep_global_batch:
        return False
    if not failure.evaluating and not sizes.failed_buckets:
        return False  # nothing has been cut yet: the shape that failed is not known
    if failure.evaluating:
        is_free = config.batch.eval_micro_size == "auto" and config.every.eval is not None
    else:
        is_free = config.batch.micro_size == "auto" and config.accumulation.steps == "auto"
    try:
        require_plannable(config)
    except UserError:
        return False
    return is_free
