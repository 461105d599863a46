"""What fitted is remembered for the next run of the same run: a hint that saves its out-of-memory errors.

One small JSON file for each run in the user's cache directory. A wrong hint costs one retry.
"""

import contextlib
import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from trainapp.config.schema import Config
from trainapp.files import atomic_write
from trainapp.paths import user_cache_dir
from trainapp.train.run import Run


def describe(config: Config, run: Run) -> dict[str, Any]:
    """All that the fitting size depends on; the shapes of the data are the buckets of the search itself."""
    device, state = run.state.device, run.state
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "model": [config.model.target, config.model.arguments],
        "parameters": sum(p.numel() for p in state.model.parameters()),
        "data": [config.data.target, {k: v for k, v in config.data.arguments.items() if not str(k).endswith("size")}],
        "task": config.task,
        "precision": config.precision.mode,
        "activation_checkpointing": [config.activation_checkpointing.mode, config.activation_checkpointing.every],
        "compile": config.train.compile,
        "average": config.train.ema is not None,
        "optimizer": [config.optimizer.target, config.optimizer.arguments, config.optimizer.fused],
        "batch": [config.batch.global_size, config.batch.eval_micro_size, run.ranks.world],
        "parallel": [config.parallel.strategy, asdict(config.parallel.ddp), asdict(config.parallel.fsdp)],
        "device": [name, run.memory.total, run.memory.limit],
        "torch": torch.__version__,
    }


def _path(description: dict[str, Any]) -> Path:
    text = json.dumps(description, sort_keys=True, default=str)
    return user_cache_dir() / "oom" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def recall(config: Config, run: Run) -> bool:
    """Begin the searches where the last run of this run ended. False when nothing is known, or it is not wanted.

    One rank reads for all: hosts have caches of their own.
    """
    known = run.ranks.all_gather_object(_read(config, run) if run.ranks.is_rank_zero else None)[0]
    try:
        if _is_found(config) and known["micro"] is not None:
            run.state.micro.load_state_dict(known["micro"])
        if config.batch.eval_micro_size == "auto":
            run.state.eval_micro.load_state_dict(known["eval_micro"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return False  # a hint that cannot be read is no hint
    return any(search.fails for search in run.state.micro.searches.values())


def _read(config: Config, run: Run) -> Any:
    path = _path(describe(config, run))
    if config.oom.remember == "clear":
        path.unlink(missing_ok=True)
    if config.oom.remember is not True or not path.is_file():
        return None
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return None


def _is_found(config: Config) -> bool:
    """Whether the micro-batch is the search's: one that the user chose is no experience."""
    fixed = config.accumulation.steps != "auto" or config.batch.micro_schedule is not None
    return config.batch.micro_size == "auto" and not fixed


def remember(config: Config, run: Run) -> None:
    """Write down what the searches know. Quiet when the cache directory cannot be written: it is a hint only."""
    if config.oom.remember is False or not run.state.micro.searches:
        return
    description = describe(config, run)
    path = _path(description)
    known = {
        "job": description,
        "micro": run.state.micro.state_dict() if _is_found(config) else None,
        "eval_micro": run.state.eval_micro.state_dict(),
    }
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            json.dump(known, file, indent=1, default=str)
