"""Remembers which sizes fitted, so that the next run of the same configuration avoids those out-of-memory errors.

One small JSON file per configuration in the user's cache directory. A wrong hint costs one retry.
"""

import contextlib
import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from trainapp import strict_json
from trainapp.files import atomic_write
from trainapp.paths import user_cache_dir
from trainapp.train.run import Run


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
        "compile": config.train.compile,
        "average": config.train.ema is not None,
        "optimizer": [
            config.optimizer.target,
            config.optimizer.arguments,
            config.optimizer.fused,
            config.optimizer.in_backward,
            config.optimizer.offload,
        ],
        "batch": [config.batch.global_size, config.batch.eval_micro_size, run.ranks.world],
        "parallel": [config.parallel.strategy, asdict(config.parallel.ddp), asdict(config.parallel.fsdp)],
        "device": [name, run.memory.total, run.memory.limit],
        "torch": torch.__version__,
    }


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
        sizes["micro"] = None
    text = strict_json.dumps({"run": description, **sizes}, indent=1, default=str)
    path = _path(description)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(text)


def _is_searched(run: Run) -> bool:
    batch = run.config.batch
    return batch.micro_size == "auto" and run.config.accumulation.steps == "auto" and batch.micro_schedule is None


def _read(run: Run) -> dict[str, Any] | None:
    path = _path(describe(run))
    if run.config.oom.remember == "clear":
        path.unlink(missing_ok=True)
    if run.config.oom.remember is not True:
        return None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        known = json.loads(path.read_text())
        return known if isinstance(known, dict) else None
    return None


def _path(description: dict[str, Any]) -> Path:
    text = json.dumps(description, sort_keys=True, default=str)
    return user_cache_dir() / "oom" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
