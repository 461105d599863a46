"""Remembers which sizes fitted, so that the next run of the same configuration avoids those out-of-memory errors.

One small JSON file per configuration in the user's cache directory. A wrong hint costs one retry.
"""

from dataclasses import asdict
from typing import Any

import torch

from trainapp.config import remembered
from trainapp.config.schema import Config
from trainapp.train.run import Run

FOLDER = "oom"  # in the cache directory


def describe(run: Run) -> dict[str, Any]:
    """Everything that the fitting size depends on. The shapes of the data are the buckets of the search itself."""
    config, device, state = run.config, run.state.device, run.state
    checkpointing = config.activation_checkpointing
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "model": [config.model.target, config.model.arguments],
        "parameters": sum(p.numel() for p in state.model.parameters()),
        "frozen": config.model.freeze,
        **({} if config.adapter.kind == "none" else {"adapter": asdict(config.adapter)}),
        "data": [config.data.target, {k: v for k, v in config.data.arguments.items() if not str(k).endswith("size")}],
        "task": config.task,
        "precision": config.precision.mode,
        "activation_checkpointing": [checkpointing.mode, checkpointing.every, checkpointing.bytes],
        "loss_chunk": config.memory.loss_chunk,
        "offload": config.memory.offload_activations,
        # Of evaluations; only where there are some, so that what was remembered without them stays known.
        **({"metrics": {n: [m.target, m.arguments] for n, m in config.metrics.items()}} if config.metrics else {}),
        "compile": config.train.compile,
        "average": config.train.ema is not None,
        "optimizer": remembered.optimizer_of(config),
        "batch": [config.batch.global_size, config.batch.eval_micro_size, run.ranks.world],
        "parallel": [config.parallel.strategy, asdict(config.parallel.ddp), asdict(config.parallel.fsdp)],
        "device": [name, run.memory.total, run.memory.limit],
        "torch": torch.__version__,
    } | _of_updates(config)


def _of_updates(config: Config) -> dict[str, Any]:
    """What there is only in some configurations: the names of others' files stay as they are."""
    found: dict[str, Any] = {}
    if config.updates:
        found["updates"] = [
            [update.name, update.task, update.parameters, *remembered.settings_of(update.optimizer)]
            for update in config.updates
        ]
    groups = [group for optimizer in config.optimizers.values() for group in optimizer.groups]
    frozen = [group["match"] for group in groups if group.get("freeze")]
    return found | ({"frozen_groups": frozen} if frozen else {})


def recall(run: Run) -> dict[str, Any] | None:
    """Where the last run of this configuration ended: `Sizes.state_dict`, or None when nothing is known or wanted.

    Collective: rank 0 reads for all, since hosts have caches of their own.
    """
    return run.ranks.all_gather_object(_read(run) if run.ranks.is_rank_zero else None)[0]


def remember(run: Run) -> None:
    """Store the sizes that the searches found. A cache directory that cannot be written is ignored.

    A micro-batch size that the user set is not stored: it proves nothing.
    """
    if run.config.oom.remember is False or not run.sizes.train.searches:
        return
    description, sizes = describe(run), run.sizes.state_dict()
    if not _is_searched(run):
        sizes |= {key: None for key in sizes if key != "eval_micro"}
    remembered.write(FOLDER, description, {"run": description, **sizes})


def _is_searched(run: Run) -> bool:
    batch = run.config.batch
    return batch.micro_size == "auto" and run.config.accumulation.steps == "auto" and batch.micro_schedule is None


def _read(run: Run) -> dict[str, Any] | None:
    description = describe(run)
    if run.config.oom.remember == "clear":
        remembered.path_of(FOLDER, description).unlink(missing_ok=True)
    return remembered.read(FOLDER, description) if run.config.oom.remember is True else None
