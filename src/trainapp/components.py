"""The parts that a configuration names: device, data sets, model. Every mistake in them is a UserError."""

import contextlib
import inspect
import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainapp import activation_checkpointing, targets, tasks
from trainapp.config import Config
from trainapp.errors import UserError
from trainapp.models.weights import load_weights
from trainapp.parallel.ranks import Alone
from trainapp.parallel.strategies import Replicated, Single, shard
from trainapp.state import has_batchnorm, seed_everything

log = logging.getLogger(__name__)


def choose_device(setting: str) -> torch.device:
    """The device that was asked for; auto takes CUDA, then Apple's MPS, then the CPU. Raises UserError without it."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if setting == "auto":
        setting = next(name for name, there in available.items() if there)
    if not available[setting]:
        there = ", ".join(name for name, is_there in available.items() if is_there)
        raise UserError(f"train.device={setting}: this machine has no such device; available: auto, {there}")
    return torch.device("cuda", torch.cuda.current_device()) if setting == "cuda" else torch.device(setting)


def set_global_switches(config: Config, device: torch.device) -> None:
    torch.use_deterministic_algorithms(config.train.deterministic)
    torch.autograd.set_detect_anomaly(config.train.detect_anomaly)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = not config.train.deterministic
        if config.train.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def locate_all(config: Config) -> dict[str, Any]:
    """The classes and functions that the configuration names. Every mistake in names and arguments in one error."""
    errors: list[str] = []
    found: dict[str, Any] = {"task": None}
    named = {"data": config.data, "model": config.model}
    for group, node in named.items():
        try:
            found[group] = targets.locate(node.target, f"{group}._target_", config.user_packages)
            open_ended = {"split", "seed"} if group == "data" else set(_parameters(found[group]))
            errors += targets.check(found[group], node.arguments, group, dict.fromkeys(open_ended))
        except UserError as error:
            errors.append(str(error))
    try:
        targets.locate(config.optimizer.target, "optimizer._target_", config.user_packages)
        if config.task not in ("auto", "classification", "next_token"):
            found["task"] = targets.locate(config.task, "task", config.user_packages)
        elif config.task != "auto":
            found["task"] = getattr(tasks, config.task)
    except UserError as error:
        errors.append(str(error))
    if errors:
        raise UserError("\n".join(errors))
    return found


def _parameters(target: Any) -> list[str]:
    return list(inspect.signature(target).parameters)


def datasets(config: Config, kind: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Training data, evaluation data (None when there is none), and what a model may need to know of them."""
    takes = _parameters(kind)
    if "split" not in takes:
        raise UserError(
            f"data._target_={config.data.target}: its constructor has no parameter `split`; the application asks for "
            'split="train" and split="val"'
        )
    provided = {"seed": config.train.seed}
    arguments = config.data.arguments
    train, val = (
        targets.construct(kind, arguments, "data", config.user_packages, {"split": split, **provided})
        for split in ("train", "val")
    )
    if config.task == "auto" and getattr(train, "task", None) not in ("classification", "next_token"):
        raise UserError(
            f"task=auto: {config.data.target} does not say what its task is; set task to classification, next_token or "
            "a function of yours"
        )
    if len(train) == 0:
        raise UserError(f"data={config.data.target}: the training split is empty")
    val = val if val is not None and len(val) else None
    if val is None and config.mode == "eval":
        raise UserError(f"mode=eval: data={config.data.target} has no validation split")
    return train, val, dict(getattr(train, "spec", {}))


def model_over_ranks(
    config: Config, kind: Any, spec: dict[str, Any], ranks: Alone, device: torch.device, compute: torch.dtype
) -> Single:
    """The model on its device, spread over the ranks: activation checkpointing, then compilation, then shards.

    compute: the dtype of gathered parameters in FSDP.
    """
    required = [
        name
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    lacking = [name for name in required if name not in config.model.arguments and name not in spec]
    if lacking:
        raise UserError(
            f"model={config.model.target} cannot read data={config.data.target}: it needs {', '.join(lacking)}, and "
            f"the data has {', '.join(spec) or 'no spec'}; choose a model for this kind of data"
        )
    on_meta = ranks.world > 1 and config.parallel.strategy == "fsdp" and config.parallel.fsdp.meta_init
    with torch.device("meta") if on_meta else contextlib.nullcontext():
        model = targets.construct(kind, config.model.arguments, "model", config.user_packages, spec)
    if not on_meta:
        _start_from_weights(config, model)
        model.to(device)
    model.train()
    activation_checkpointing.apply(model, config.activation_checkpointing)
    if config.train.compile:
        model.compile()
    strategy = _spread(config, model, ranks, compute)
    if on_meta:
        _fill(config, model, ranks, device)
        _start_from_weights(config, model)
    return strategy


def _start_from_weights(config: Config, model: nn.Module) -> None:
    if config.model.init_from:
        skipped = load_weights(model, Path(config.model.init_from), strict=config.model.init_strict)
        if skipped:
            log.warning("model.init_from: not loaded, left as initialised: %s", ", ".join(skipped))


def _fill(config: Config, model: nn.Module, ranks: Alone, device: torch.device) -> None:
    """Give a model that was built without memory its shards, and draw them.

    On the CPU each rank draws its own shards from a seed of its own: other numbers than the whole model would get, of
    the same distribution. On CUDA torch draws shards as parts of the whole.
    """
    if not callable(getattr(model, "init_weights", None)):
        raise UserError(
            f"parallel.fsdp.meta_init=true: {type(model).__name__} has no method `init_weights()` that draws its "
            "parameters and fills its buffers; add one, or use meta_init=false"
        )
    model.to_empty(device=device)
    if device.type == "cpu":
        part = ranks.rank % (ranks.world // config.parallel.fsdp.replicas)  # replicas hold the same shards
        torch.manual_seed((config.train.seed * 1_000_003 + part) % 2**63)
    with torch.no_grad():
        model.init_weights()
    seed_everything(config.train.seed)


def _spread(config: Config, model: nn.Module, ranks: Alone, compute: torch.dtype) -> Single:
    """Over the ranks, after activation checkpointing and compilation and before the optimizer."""
    if ranks.world == 1:
        return Single(model, ranks)
    if config.parallel.strategy == "ddp":
        return Replicated(model, ranks, config.parallel.ddp)
    blocks = activation_checkpointing.blocks_of(model, "parallel=fsdp")
    # BatchNorm wants its parameters in fp32: such models are gathered so, and autocast casts where it computes.
    return shard(model, blocks, ranks, config.parallel.fsdp, torch.float32 if has_batchnorm(model) else compute)
