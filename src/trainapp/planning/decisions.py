"""What a plan decides for a run: modes of activation checkpointing before it is built, and its first sizes."""

import dataclasses
import logging
from typing import Any

import torch

from trainapp.assembly.components import choose_device
from trainapp.config.schema import Config, Plan
from trainapp.parallel.ranks import Ranks, answered_by_rank_zero
from trainapp.planning.absent_gpu import spelled
from trainapp.planning.process import ask
from trainapp.planning.screen import modes_text
from trainapp.sizes.record import PlannedSizes
from trainapp.training.session import Session

PATIENCE_FOR_MODES, PATIENCE_FOR_SIZES = 120.0, 600.0  # seconds
log = logging.getLogger(__name__)


def with_modes(config: Config, ranks: Ranks) -> Config:
    """The configuration with a mode for each block, where `activation_checkpointing=auto` leaves them to be chosen: all
    are recomputed where memory cannot be estimated. Takes some seconds. Collective.

    Raises UserError for a model without blocks, and for mistakes in the configuration, on all ranks.
    """
    settings = config.activation_checkpointing
    if settings.mode != "auto" or settings.modes is not None:
        return config
    modes = answered_by_rank_zero(ranks, lambda: _modes(_to_plan(config, ranks.world, config.memory.limit)))
    changes = {"mode": "full"} if modes is None else {"modes": modes}
    return dataclasses.replace(config, activation_checkpointing=dataclasses.replace(settings, **changes))


def _modes(config: Config) -> list[str] | None:
    facts = ask(config, ("modes",), patience=PATIENCE_FOR_MODES)
    if facts["method"] is None:
        reasons = "; ".join(facts["notes"])
        log.warning("activation_checkpointing=auto: no estimate (%s); all blocks are recomputed, as with full", reasons)
        return None
    modes: list[str] = facts["modes"]
    log.info("activation checkpointing: %s, as planned (%s)", modes_text(modes), facts["method"])
    return modes


def first_sizes(session: Session) -> PlannedSizes | None:
    """`batch.micro_size=plan`: the largest sizes within the memory limit; the smallest where none is expected to fit.
    None where no size could be planned. Takes seconds. Collective.

    Raises UserError for mistakes in the configuration, on all ranks.
    """
    config, ranks = session.config, session.ranks
    limit = session.memory.enforced if session.state.device.type == "cuda" else config.memory.limit
    return answered_by_rank_zero(ranks, lambda: _sizes(_to_plan(config, ranks.world, limit)))


def _sizes(config: Config) -> PlannedSizes | None:
    is_searched = config.batch.eval_micro_size == "auto" and config.every.eval is not None
    facts = ask(config, ("training", "evaluation") if is_searched else ("training",), patience=PATIENCE_FOR_SIZES)
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
    size, eval_size = max(1, size), None if eval_size is None else max(1, eval_size)
    text = "" if eval_size is None else f", evaluation {eval_size}"
    log.info("micro-batch %d%s, as planned (%s)", size, text, facts["method"])
    return PlannedSizes(size, eval_size)


def _to_plan(config: Config, world: int, limit: Any) -> Config:
    """The run's configuration as one to plan for its device, which the planner's process then does not need to see."""
    device, plan = choose_device(config.train.device), Plan(techniques=False, world=world)
    if device.type == "cuda":
        plan.device = spelled(torch.cuda.get_device_properties(device))
    train = dataclasses.replace(config.train, device="cpu" if device.type == "cpu" else "auto")
    memory = dataclasses.replace(config.memory, limit=limit)
    return dataclasses.replace(config, plan=plan, memory=memory, train=train)
