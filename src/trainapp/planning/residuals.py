"""What a device has reserved beyond the plan: measured once in a real run, and added to later plans for that device.

A plan does not know what libraries take for themselves inside the allocator, such as cuDNN's workspaces, nor how the
allocator was used before. One small JSON file per device, torch version and class of configurations, in the user's
cache directory. A wrong one costs memory that is left unused, or one retry.
"""

import dataclasses
import logging
from collections.abc import Iterable
from typing import Any

import torch

from trainapp.config import remembered
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.planning import process
from trainapp.planning.own_device import config_to_plan
from trainapp.train.run import Run
from trainapp.units import bytes_text

PATIENCE = 60.0  # seconds for the plan of a run that has ended
FOLDER = "plan"  # in the cache directory
log = logging.getLogger(__name__)


def describe(config: Config, device_name: str) -> dict[str, Any]:
    """The device, and what decides which kernels run on it: the class of a configuration. Sizes are not part of it."""
    return {
        "device": device_name,
        "torch": torch.__version__,
        "model": config.model.target,
        "precision": config.precision.mode,
        **({} if config.adapter.kind == "none" else {"adapter": config.adapter.kind}),
        "optimizer": remembered.optimizer_of(config),
        "activation_checkpointing": config.activation_checkpointing.mode,
        "offload": config.memory.offload_activations,
        "chunks": config.memory.loss_chunk is not None,
        "expandable_segments": config.memory.expandable_segments,
        "deterministic": config.train.deterministic,
    }


def recall(config: Config, device_names: Iterable[str]) -> int:
    """The bytes to add to what a plan for one of these devices says; 0 where nothing is known or wanted.

    Of several, the most. Files that cannot be read count as none.
    """
    if config.oom.remember is not True:
        return 0
    return max((_read(describe(config, name)) or 0 for name in device_names), default=0)


def store(config: Config, device_name: str, planned: int, measured: int) -> None:
    """Remember both, in bytes reserved. A cache directory that cannot be written is ignored."""
    description = describe(config, device_name)
    facts = {"class": description, "planned_bytes": planned, "measured_bytes": measured}
    remembered.write(FOLDER, description, facts)


def measure(run: Run) -> None:
    """Compare what the run has reserved with its plan, the first time that this device runs such a configuration.

    For a run that has ended, in one process: with one size, and without an out-of-memory error, which would count too.
    Takes some seconds, once per class of configurations; with `oom.remember=clear`, again.
    """
    sizes, name = run.sizes.used, device_name(run.state.device)
    is_one = len(run.sizes.by_update) == len(sizes) == 1 and all(isinstance(size, int) for size in sizes.values())
    settled = is_one and not run.sizes.oom_restarts and run.ranks.world == 1
    remember = run.config.oom.remember
    if remember is False or run.config.train.compile or not settled or run.state.progress.step < 2:
        return
    if remember is True and _read(describe(run.config, name)) is not None:
        return
    try:
        facts = process.answer_of(
            "trainapp.planning.planner.facts_of", _with_used_sizes(run), patience=PATIENCE, sees_devices=False
        )
    except (process.NoAnswer, UserError) as error:
        log.debug("no plan to compare with: %s", error)
        return
    planned = facts.get("reserved_bytes", facts.get("peak_bytes"))
    if planned is None or "estimate" in facts or "range_bytes" in facts:
        return
    store(run.config, name, planned, run.memory.peak_reserved)
    log.info(
        "plan for %s: %s reserved, measured %s; plans for it will add the difference",
        name,
        bytes_text(planned),
        bytes_text(run.memory.peak_reserved),
    )


def device_name(device: torch.device) -> str:
    """As the driver reports it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _with_used_sizes(run: Run) -> Config:
    """The run's own configuration as one to plan, for its device, with the sizes that it has used."""
    config = config_to_plan(run)
    return dataclasses.replace(
        config,
        batch=dataclasses.replace(
            config.batch,
            micro_size=run.sizes.train.size,
            eval_micro_size=run.sizes.evaluation.size,
            micro_schedule=None,
        ),
        accumulation=dataclasses.replace(config.accumulation, steps="auto"),
        memory=dataclasses.replace(config.memory, limit=None),
    )


def _read(description: dict[str, Any]) -> int | None:
    """What was reserved beyond the plan, at least 0; None where no file says it."""
    known = remembered.read(FOLDER, description) or {}
    planned, measured = known.get("planned_bytes"), known.get("measured_bytes")
    if type(planned) is int and type(measured) is int and 0 < planned < 2**50 and 0 < measured < 2**50:
        return max(0, measured - planned)
    return None
