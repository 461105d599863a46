"""The micro-batch size that the plan predicts to be the largest that fits."""

import logging

from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.oom.incident import Incident
from trainapp.plan import process
from trainapp.train.run import Run

log = logging.getLogger(__name__)


def size_of(config: Config) -> int | None:
    """The largest size within the memory limit, 1 if none fits; None where the model cannot be traced. Takes seconds.

    Raises UserError for what the planner does not cover.
    """
    facts = process.ask(config, search_only=True)
    if "largest_micro_size" not in facts:
        log.warning(
            "batch.micro_size=plan: %s (%s); the search begins with all samples, as with auto",
            facts["certainty"],
            facts["reason"],
        )
        return None
    size = max(1, int(facts["largest_micro_size"]))
    log.info("micro-batch %d, as planned in %.1f s", size, facts["seconds"])
    return size


def after_first_error(run: Run, failure: Incident) -> int | None:
    """With `oom.plan`, after a run's first error: the largest size within `memory.limit`. None where it is not sure.

    Only where all batches have one shape: the others keep sizes of their own. Takes seconds.
    """
    config = run.config
    is_free = config.batch.micro_size == "auto" and config.accumulation.steps == "auto"
    if not (config.oom.plan and is_free and config.batch.micro_schedule is None and config.oom.keep_global_batch):
        return None
    is_limit = run.memory.limit is not None and not failure.host and not failure.evaluating
    if not is_limit or run.ranks.world > 1 or run.sizes.oom_restarts > 1:
        return None
    try:
        facts = process.ask(config, search_only=True)
    except UserError as error:
        log.info("oom.plan: %s", error)
        return None
    if facts["certainty"] != "exact":
        log.info("oom.plan: the plan is not exact (%s); halving instead", facts.get("reason", facts["certainty"]))
        return None
    return int(facts["largest_micro_size"]) or None
