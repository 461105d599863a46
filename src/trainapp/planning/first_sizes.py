"""`batch.micro_size=plan`: a run starts with the largest sizes that the plan expects to fit."""

import dataclasses
import logging

import torch

from trainapp.config.schema import Config, Plan
from trainapp.parallel.ranks import answered_by_rank_zero
from trainapp.planning import process
from trainapp.planning.absent_gpu import spelled
from trainapp.sizes.record import PlannedSizes
from trainapp.training.session import Session

PATIENCE = 600.0  # seconds
log = logging.getLogger(__name__)


def first_sizes(session: Session) -> PlannedSizes | None:
    """The largest sizes within the memory limit; the smallest where none is expected to fit. Takes seconds. Collective.

    None where no size could be planned. Raises UserError for mistakes in the configuration, on all ranks.
    """
    return answered_by_rank_zero(session.ranks, lambda: _planned(config_to_plan(session)))


def config_to_plan(session: Session) -> Config:
    """The run's configuration as one to plan for its device. On a GPU the limit is what the run may reserve there."""
    config, device = session.config, session.state.device
    plan, memory = Plan(techniques=False, world=session.ranks.world), config.memory
    if device.type == "cuda":
        plan.device = spelled(torch.cuda.get_device_properties(device))
        memory = dataclasses.replace(memory, limit=session.memory.enforced)
    train = dataclasses.replace(config.train, device="cpu" if device.type == "cpu" else "auto")
    return dataclasses.replace(config, plan=plan, memory=memory, train=train)


def _planned(config: Config) -> PlannedSizes | None:
    is_searched = config.batch.eval_micro_size == "auto" and config.every.eval is not None
    facts = process.ask(config, only=("training", "evaluation") if is_searched else ("training",), patience=PATIENCE)
    if facts["method"] is None:
        log.warning(
            "batch.micro_size=plan: no estimate (%s); the search begins with all samples, as with auto",
            "; ".join(facts["notes"]),
        )
        return None
    size, eval_size = facts["largest_micro_size"], facts["largest_eval_micro_size"]
    if 0 in (size, eval_size):
        log.warning(
            "batch.micro_size=plan: not even the smallest %s micro-batch is expected to fit; the run starts with it "
            "anyway, see mode=plan for what would need less",
            "evaluation" if size else "training",
        )
    text = "" if eval_size is None else f", evaluation {max(1, eval_size)}"
    log.info("micro-batch %d%s, as planned (%s)", max(1, size), text, facts["method"])
    return PlannedSizes(max(1, size), None if eval_size is None else max(1, eval_size))
