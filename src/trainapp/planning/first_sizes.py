"""`batch.micro_size=plan`: a run starts with the largest sizes that the plan predicts to fit."""

import logging
from typing import Any, NamedTuple

from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.planning import process
from trainapp.planning.certainty import EXACT
from trainapp.sizes.record import PlannedSizes
from trainapp.units import bytes_text

Facts = dict[str, Any]
log = logging.getLogger(__name__)


def first_sizes(config: Config) -> PlannedSizes | None:
    """For batch.micro_size=plan: the largest sizes within the memory limit. Takes seconds.

    config: see `own_device.config_to_plan`. None where no size could be planned. If it is certain that none fits, the
    run is refused; where the plan is not exact, it starts with the smallest, and a warning. Raises UserError for that,
    and for what the planner does not cover.
    """
    facts = process.ask(config, only=searched(config))
    if facts.get("largest_micro_size") is None:
        log.warning(
            "batch.micro_size=plan: %s (%s); the search begins with all samples, as with auto",
            facts["certainty"],
            facts.get("reason", "no size is sure to fit"),
        )
        return None
    lacking = what_does_not_fit(config, facts)
    if lacking and lacking.certainty == EXACT:
        raise UserError(f"batch.micro_size=plan: {lacking.message}")
    if lacking:
        log.warning("batch.micro_size=plan: %s; the run starts with the smallest anyway", lacking.message)
    planned = PlannedSizes(max(1, facts["largest_micro_size"]), at_least_one(facts.get("largest_eval_micro_size")))
    evaluation = "" if planned.evaluation is None else f", evaluation {planned.evaluation}"
    log.info("micro-batch %d%s, as planned in %.1f s", planned.train, evaluation, facts["seconds"])
    return planned


class Lacking(NamedTuple):
    """What does not fit, and how sure that is."""

    message: str
    certainty: str


def what_does_not_fit(config: Config, facts: Facts) -> Lacking | None:
    """Where not even the smallest sizes fit; None where they do."""
    limit = bytes_text(facts["limit_bytes"])
    if config.plan.device is not None:
        limit = f"{limit} on this GPU"
    else:
        limit = f"memory.limit={limit}" if config.memory.limit is not None else f"this machine's {limit}"
    for kind, size, peak, certainty, setting in (
        ("micro-batch", "largest_micro_size", "largest_peak_bytes", "certainty", "micro_size"),
        (
            "evaluation micro-batch",
            "largest_eval_micro_size",
            "largest_eval_peak_bytes",
            "eval_certainty",
            "eval_micro_size",
        ),
    ):
        if facts.get(size) == 0:
            return Lacking(
                f"no {kind} fits {limit}: the smallest needs {bytes_text(facts[peak])} ({facts[certainty]}). Raise "
                f"the limit, or see mode=plan for what would need less; batch.{setting}=N tries it anyway",
                facts[certainty],
            )
    return None


def searched(config: Config) -> tuple[str, ...]:
    """What has a micro-batch size of its own that is not given: training, and evaluation where there is one."""
    is_searched = config.batch.eval_micro_size == "auto" and config.every.eval is not None
    return ("training", "evaluation") if is_searched else ("training",)


def at_least_one(size: int | None) -> int | None:
    """The size to start with: the smallest is tried even where none is expected to fit."""
    return None if size is None else max(1, size)
