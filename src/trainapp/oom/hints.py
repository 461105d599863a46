"""What fitted is remembered for the next run of the same job: a hint that saves its out-of-memory errors.

One small JSON file for each job in the user's cache directory. A wrong hint costs one retry.
"""

import contextlib
import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from trainapp.config.schema import Config
from trainapp.paths import cache_dir
from trainapp.train.run import Job


def describe(config: Config, job: Job) -> dict[str, Any]:
    """All that the fitting size depends on; the shapes of the data are the buckets of the search itself."""
    device, state = job.state.device, job.state
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
        "batch": [config.batch.global_size, config.batch.eval_micro_size, job.ranks.world],
        "parallel": [config.parallel.strategy, asdict(config.parallel.ddp), asdict(config.parallel.fsdp)],
        "device": [name, job.memory.total, job.memory.limit],
        "torch": torch.__version__,
    }


def _path(description: dict[str, Any]) -> Path:
    text = json.dumps(description, sort_keys=True, default=str)
    return cache_dir() / "oom" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def recall(config: Config, job: Job) -> bool:
    """Begin the searches where the last run of this job ended. False when nothing is known, or it is not wanted.

    One rank reads for all: hosts have caches of their own.
    """
    known = job.ranks.gather(_read(config, job) if job.ranks.leads else None)[0]
    try:
        if _is_found(config) and known["micro"] is not None:
            job.state.micro.load_state_dict(known["micro"])
        if config.batch.eval_micro_size == "auto":
            job.state.eval_micro.load_state_dict(known["eval_micro"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return False  # a hint that cannot be read is no hint
    return any(search.fails for search in job.state.micro.searches.values())


def _read(config: Config, job: Job) -> Any:
    path = _path(describe(config, job))
    if config.oom.remember == "clear":
        path.unlink(missing_ok=True)
    if config.oom.remember is not True or not path.is_file():
        return None
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return None


def _is_found(config: Config) -> bool:
    """Whether the micro-batch is the search's: one that the user chose is no experience."""
    fixed = config.accumulation.steps != "auto" or config.oom.schedule is not None
    return config.batch.micro_size == "auto" and not fixed


def remember(config: Config, job: Job) -> None:
    """Write down what the searches know. Quiet when the cache directory cannot be written: it is a hint only."""
    if config.oom.remember is False or not job.state.micro.searches:
        return
    description = describe(config, job)
    path = _path(description)
    known = {
        "job": description,
        "micro": job.state.micro.state_dict() if _is_found(config) else None,
        "eval_micro": job.state.eval_micro.state_dict(),
    }
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(known, indent=1, default=str))
        os.replace(temporary, path)
