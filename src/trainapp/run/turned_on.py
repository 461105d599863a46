"""The techniques that a session begins with: those of a climb, of workers that were restarted, or of a checkpoint."""

import contextlib
import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainapp.assembly.resolved_targets import choose_device
from trainapp.checkpoint.checkpointer import load_values
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.parallel.ranks import Ranks, answered_by_rank_zero
from trainapp.planning.process import NothingFits, with_checkpointing_modes
from trainapp.techniques.ladder import (
    CLIMB,
    LOSS_CHUNK,
    TURNED_ON,
    Climb,
    TurnedOn,
    overrides_turned_on,
    with_turned_on,
)

if TYPE_CHECKING:
    from trainapp.run.prepare import SessionStart

log = logging.getLogger(__name__)


def climb_of(start: "SessionStart", restart: Mapping[str, Any]) -> Climb | None:
    """Return the climb with which a session begins: of the session before, or of workers that were restarted."""
    if CLIMB in restart:
        return Climb.of_state_dict(restart[CLIMB])
    return start.climb


def techniques_turned_on(
    start: "SessionStart", restart: Mapping[str, Any], checkpoint: Path | None, ranks: Ranks
) -> TurnedOn:
    """Return the techniques that are turned on when a session begins. Collective.

    Those of the session before, or those that restarted workers left; otherwise the checkpoint's, if the memory is the
    same as then.
    """
    # The record by attempt is the checkpoint's: what came after it is repeated.
    saved = TurnedOn()
    if checkpoint is not None:
        facts = answered_by_rank_zero(ranks, lambda: load_values(checkpoint).get("sizes", {}).get(TURNED_ON, {}))
        saved = TurnedOn.of_state_dict(facts)

    memory = _memory_text(start.config, ranks)
    climb = climb_of(start, restart)
    if climb is not None:
        now = climb.turned_on
        if CLIMB in restart:  # only the rank that has failed has said so
            log.warning("the restarted workers go on with %s", climb.text)
    elif start.turned_on is not None:
        now = start.turned_on
    elif TURNED_ON in restart:
        now = TurnedOn.of_state_dict(restart[TURNED_ON])
    else:
        now = _kept(start.config, saved, memory)
    return dataclasses.replace(now, by_attempt=saved.by_attempt, memory=memory)


def with_planned_modes(config: Config, turned_on: TurnedOn, ranks: Ranks) -> tuple[Config, TurnedOn]:
    """Return the configuration with the techniques that are turned on and with the blocks' modes that were planned; and
    the techniques, with the loss in chunks if a plan fits only with it. Collective.

    Raises UserError as `with_checkpointing_modes`.
    """
    try:
        return with_checkpointing_modes(with_turned_on(config, turned_on.settings), ranks), turned_on
    except NothingFits:
        chunked = turned_on.with_technique(LOSS_CHUNK)
        chunked_config = with_turned_on(config, chunked.settings)
        is_new = chunked_config.memory.loss_chunk != with_turned_on(config, turned_on.settings).memory.loss_chunk
        if config.oom.techniques == "none" or not is_new:
            raise
        with contextlib.suppress(UserError):  # nor does it fit with chunks, or not with this model
            planned = with_checkpointing_modes(chunked_config, ranks)
            log.warning("%s turned on (oom.techniques=same): the plan fits only with it", LOSS_CHUNK)
            return planned, chunked
        raise


def _kept(config: Config, saved: TurnedOn, memory: str) -> TurnedOn:
    """Return the checkpoint's techniques, or none where another memory may not need them."""
    if not saved.settings:
        return saved
    overrides = overrides_turned_on(saved.settings)
    if config.oom.techniques == "none":
        log.info("%s, which the run had turned on, is off (oom.techniques=none)", overrides)
        return TurnedOn()
    if saved.memory != memory:
        log.info("%s, which the run had turned on for %s, is off for %s", overrides, saved.memory, memory)
        return TurnedOn()
    log.info("%s stays turned on, as in the checkpoint", overrides)
    return saved


def _memory_text(config: Config, ranks: Ranks) -> str:
    """Return the memory that a run has, in words."""
    device = choose_device(config.train.device)
    name = device.type
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    text = f"{ranks.world_size} x {name}"
    if config.memory.limit is not None:
        text += f" with memory.limit={config.memory.limit}"
    return text
