"""`activation_checkpointing=auto`: a mode for each block, decided by a plan before the model is built."""

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import torch

from trainapp.assembly.build import smallest_micro_batch
from trainapp.assembly.components import choose_device, load_components
from trainapp.assembly.model import constructed
from trainapp.config.schema import Config
from trainapp.memory.host import total_bytes
from trainapp.models.inspect import blocks_of
from trainapp.parallel.ranks import Ranks, answered_by_rank_zero
from trainapp.planning import process
from trainapp.planning.traced import Traced
from trainapp.techniques.checkpointing import Mode, choose_modes
from trainapp.units import bytes_text, parse_memory_size

MODES: tuple[Mode, ...] = ("none", "selective", "full")
PATIENCE = 120.0  # seconds for the three traces
log = logging.getLogger(__name__)


class Peaks(NamedTuple):
    """peaks: bytes of a step with all blocks in one mode."""

    peaks: Mapping[Mode, int]
    blocks: int
    micro_batch: int


def with_modes(config: Config, ranks: Ranks) -> Config:
    """The configuration with `activation_checkpointing.modes`, where `auto` leaves them to be chosen. Collective.

    For a micro-batch of `batch.micro_size`, or else of the smallest size. Where the model cannot be traced, all blocks
    are recomputed. Takes some seconds. Raises UserError for a model without blocks.
    """
    settings = config.activation_checkpointing
    if settings.mode != "auto" or settings.modes is not None:
        return config
    modes = answered_by_rank_zero(ranks, lambda: _chosen(config, ranks.world))
    if modes is None:
        return dataclasses.replace(config, activation_checkpointing=dataclasses.replace(settings, mode="full"))
    return dataclasses.replace(config, activation_checkpointing=dataclasses.replace(settings, modes=modes))


def planned(config: Config, world: int, limit: int) -> Config:
    """As `with_modes`, in this process, for a plan within so many bytes."""
    settings = config.activation_checkpointing
    if settings.mode != "auto" or settings.modes is not None:
        return config
    found = peaks_of(config, world)
    if found is None:
        settings = dataclasses.replace(settings, mode="full")
    else:
        settings = dataclasses.replace(settings, modes=choose_modes(found.peaks, limit, found.blocks))
    return dataclasses.replace(config, activation_checkpointing=settings)


def _chosen(config: Config, world: int) -> list[Mode] | None:
    started, limit = time.monotonic(), _limit(config)
    try:
        found = process.answer_of(f"{__name__}.peaks_of", config, world, patience=PATIENCE, sees_devices=False)
    except process.NoAnswer as error:
        log.warning("activation_checkpointing=auto: %s; all blocks are recomputed", error)
        return None
    if found is None:
        log.warning(
            "activation_checkpointing=auto: the model cannot be traced; all blocks are recomputed, as with full"
        )
        return None
    modes = choose_modes(found.peaks, limit, found.blocks)
    counts, seconds = Counter(modes), time.monotonic() - started
    log.info(
        "activation checkpointing of %d blocks: %s, planned for a micro-batch of %d within %s in %.1f s",
        *(found.blocks, ", ".join(f"{counts[mode]} {mode}" for mode in MODES if counts[mode])),
        *(found.micro_batch, bytes_text(limit), seconds),
    )
    return modes


def peaks_of(config: Config, world: int) -> Peaks | None:
    """The peaks of the three modes on one rank, with the whole model, on the CPU; None where they cannot be traced.

    Sets torch's global switches: call it in a process of its own.
    """
    components = load_components(config)
    with torch.device("meta"):
        model = constructed(config, components)
    blocks = len(blocks_of(model, "activation_checkpointing=auto"))
    size = config.batch.micro_size if isinstance(config.batch.micro_size, int) else smallest_micro_batch(model)
    traced = Traced(components, 1)
    try:
        peaks = {mode: traced.peak(_with_mode(config, mode, world), size, 0).total for mode in MODES}
    except Exception:
        log.debug("no trace of the modes", exc_info=True)
        return None
    return Peaks(peaks, blocks, size) if blocks else None


def _with_mode(config: Config, mode: Mode, world: int) -> Config:
    share = -(-config.batch.global_size // world)
    return dataclasses.replace(
        config,
        batch=dataclasses.replace(config.batch, global_size=share),
        parallel=dataclasses.replace(config.parallel, nodes=1),
        train=dataclasses.replace(config.train, device="cpu"),
        activation_checkpointing=dataclasses.replace(config.activation_checkpointing, mode=mode),
    )


def _limit(config: Config) -> int:
    """The bytes for a rank's live tensors. On a GPU a tenth is left to the allocator's cache and to fragmentation."""
    device = choose_device(config.train.device)
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else total_bytes()
    limit = total if config.memory.limit is None else parse_memory_size(config.memory.limit, total)
    return limit - limit // 10 if device.type == "cuda" else limit
