"""The parts that a configuration names: device, data sets, model. Every mistake in them is a UserError."""

import inspect
import logging
import os
from typing import Any

import torch

from trainapp.config import targets
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.train import losses

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
            found["task"] = getattr(losses, config.task)
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
