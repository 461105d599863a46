"""The parts that a configuration names: device, data sets, classes. Every mistake in them is a UserError."""

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trainapp.config import targets
from trainapp.config.schema import Config
from trainapp.config.validation import check_arguments
from trainapp.errors import UserError
from trainapp.models.adapters import adapted
from trainapp.train import losses

BUILT_IN_TASKS = ("classification", "next_token")
log = logging.getLogger(__name__)


@dataclass
class Components:
    """The classes that `_target_`s and `task` name, and the data sets."""

    model: Callable[..., Any]
    task: losses.Task
    train_data: Any
    eval_data: Any  # None where there is none
    spec: dict[str, Any]  # arguments that the data provides to the model's constructor


def load_components(config: Config) -> Components:
    """Find the named classes and open the data sets. Raises UserError with all mistakes in names and arguments."""
    found = _locate_all(config)
    train, evaluation = _datasets(config, found["data"])
    return Components(
        model=adapted(found["model"], config),
        task=_task(config, found["task"]) or getattr(losses, train.task),
        train_data=train,
        eval_data=evaluation,
        spec=dict(getattr(train, "spec", {})),
    )


def _task(config: Config, found: Any) -> Any:
    """The function or object that `task` names; an instance of the class that it names, built without arguments."""
    if not inspect.isclass(found):
        return found
    lacking = check_arguments(found, {}, "task", {})
    if lacking:
        names = ", ".join(line.partition(":")[0].removeprefix("task.") for line in lacking)
        raise UserError(
            f"task={config.task}: the class must be constructible without arguments, but requires {names}; give them "
            "defaults, or a subclass with defaults, or let `task` name an instance in your module, such as "
            f"`my_task = {found.__name__}({names.partition(',')[0]}=...)`"
        )
    task = targets.construct(found, {}, "task", config.user_packages)
    if not callable(task):
        raise UserError(
            f"task={config.task}: an instance of it cannot be called; give the class a method "
            "`__call__(self, model, batch)` that returns (loss_sum, count, metrics)"
        )
    return task


def choose_device(setting: str) -> torch.device:
    """The device of `train.device`; auto prefers CUDA, then MPS, then the CPU. Raises UserError if it is missing."""
    is_available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    available = [name for name, has_it in is_available.items() if has_it]
    name = available[0] if setting == "auto" else setting
    if name not in available:
        raise UserError(
            f"train.device={setting}: this machine has no such device; available: auto, {', '.join(available)}"
        )
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def set_global_switches(config: Config, device: torch.device) -> None:
    """Determinism and anomaly detection, which are global in torch. See also `Autotuner`."""
    torch.use_deterministic_algorithms(config.train.deterministic)
    torch.autograd.set_detect_anomaly(config.train.detect_anomaly)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = False  # an earlier run in this process may have enabled it
        torch.backends.cudnn.deterministic = config.train.deterministic


def _locate_all(config: Config) -> dict[str, Any]:
    """`data`, `model` and `task` (None: from the data set). Raises UserError with all mistakes at once."""
    errors: list[str] = []
    found: dict[str, Any] = {"task": None}
    for group, node in {"data": config.data, "model": config.model}.items():
        try:
            found[group] = targets.locate(node.target, f"{group}._target_", config.user_packages)
            open_ended = {"split", "seed"} if group == "data" else set(_parameters(found[group]))
            errors += check_arguments(found[group], node.arguments, group, open_ended)
        except UserError as error:
            errors.append(str(error))
    try:
        targets.locate(config.optimizer.target, "optimizer._target_", config.user_packages)
        if config.task in BUILT_IN_TASKS:
            found["task"] = getattr(losses, config.task)
        elif config.task != "auto":
            found["task"] = targets.locate(config.task, "task", config.user_packages)
    except UserError as error:
        errors.append(str(error))
    if errors:
        raise UserError("\n".join(errors))
    return found


def _datasets(config: Config, kind: Any) -> tuple[Any, Any]:
    """Training data and evaluation data."""
    if "split" not in _parameters(kind):
        raise UserError(
            f"data._target_={config.data.target}: its constructor has no parameter `split`; the application asks for "
            'split="train" and split="val"'
        )
    train, evaluation = (
        targets.construct(
            kind, config.data.arguments, "data", config.user_packages, {"split": split, "seed": config.train.seed}
        )
        for split in ("train", "val")
    )
    if config.task == "auto":
        _require_known_task(train, config.data.target)
    if len(train) == 0:
        raise UserError(f"data={config.data.target}: the training split is empty")
    if evaluation is not None and not len(evaluation):
        evaluation = None
    if evaluation is None and config.mode == "eval":
        raise UserError(f"mode=eval: data={config.data.target} has no validation split")
    return train, evaluation


def _require_known_task(data: Any, name: str) -> None:
    """Raises UserError unless the data set's `task` is one of the application's own."""
    task = getattr(data, "task", None)
    if task is None:
        raise UserError(
            f"task=auto: {name} does not say what its task is; set task to classification, next_token or a function of "
            "yours"
        )
    if task not in BUILT_IN_TASKS:
        raise UserError(
            f"task=auto: {name} says that its task is {task!r}, which must be one of {', '.join(BUILT_IN_TASKS)}; "
            "correct it, or set task to a function of yours"
        )


def _parameters(target: Any) -> list[str]:
    return list(inspect.signature(target).parameters)
