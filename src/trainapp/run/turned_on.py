"""The techniques that a session begins with: those of a climb, of workers that were restarted, or of a checkpoint."""

import contextlib
import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
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
    not_chosen,
    overrides_turned_on,
    with_turned_on,
)

if TYPE_CHECKING:
    from trainapp.run.prepare import SessionStart

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Techniques:
    """The techniques with which a session begins.

    Attributes:
        config: the configuration, with them and with the blocks' modes.
        chosen_config: the same without those that the run has turned on.
        turned_on: those.
        climb: if one of them is new.
    """

    config: Config
    chosen_config: Config
    turned_on: TurnedOn
    climb: Climb | None


def begin_techniques(
    start: "SessionStart", config: Config, restart: Mapping[str, Any], checkpoint: Path | None, ranks: Ranks
) -> Techniques:
    """Return the techniques with which a session begins. Only training turns any on. Collective.

    Raises UserError as `with_checkpointing_modes`.

    Args:
        start: what the session starts from.
        config: the configuration as the user and the checkpoint determine it.
        restart: the content of restart.json.
        checkpoint: that the session continues from, if any.
        ranks: all ranks of the run.
    """
    if not config.activity.trains:
        return Techniques(config, config, TurnedOn(), climb=None)
    climb = _climb_of(start, restart)
    turned_on = _turned_on(start, climb, restart, checkpoint, ranks)
    planned_config, turned_on = _with_planned_modes(config, turned_on, ranks)
    return Techniques(planned_config, _with_modes_of(planned_config, config), turned_on, climb)


def _climb_of(start: "SessionStart", restart: Mapping[str, Any]) -> Climb | None:
    """Return the climb with which a session begins: of the session before, or of workers that were restarted."""
    if CLIMB in restart:
        return Climb.of_state_dict(restart[CLIMB])
    return start.climb


def _turned_on(
    start: "SessionStart",
    climb: Climb | None,
    restart: Mapping[str, Any],
    checkpoint: Path | None,
    ranks: Ranks,
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
    if climb is not None:
        turned_on = climb.turned_on
        if CLIMB in restart:  # only the rank that has failed has said so
            log.warning("the restarted workers continue with %s", climb.text)
    elif start.turned_on is not None:
        turned_on = start.turned_on
    elif TURNED_ON in restart:
        turned_on = TurnedOn.of_state_dict(restart[TURNED_ON])
    else:
        turned_on = _of_checkpoint(start.config, saved, memory)
    return dataclasses.replace(turned_on, by_attempt=saved.by_attempt, memory=memory)


def _with_planned_modes(config: Config, turned_on: TurnedOn, ranks: Ranks) -> tuple[Config, TurnedOn]:
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


def _with_modes_of(config: Config, chosen: Config) -> Config:
    """Return the configuration that the user has chosen, with the blocks' modes that were planned for the run: a later
    session need not plan them again.
    """
    settings = config.activation_checkpointing
    if settings.mode != chosen.activation_checkpointing.mode:
        return chosen
    return dataclasses.replace(chosen, activation_checkpointing=settings)


def _of_checkpoint(config: Config, saved: TurnedOn, memory: str) -> TurnedOn:
    """Return the checkpoint's techniques, or none where another memory may not need them."""
    if not saved.settings:
        return saved
    overrides = overrides_turned_on(saved.settings)
    if config.oom.techniques == "none":
        log.info("%s, which the run had turned on, is off (oom.techniques=none)", overrides)
        return TurnedOn()
    settings = not_chosen(saved.settings, config)
    if settings != saved.settings:
        log.info("of %s, which the run had turned on, the command line sets some itself", overrides)
        overrides = overrides_turned_on(settings)
        saved = dataclasses.replace(saved, settings=settings)
    if not settings:
        return saved
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
