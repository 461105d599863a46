"""The recipe of a run: how it trains, as it was built. Printed in at most six lines when it starts, and saved as
recipe.json.

The program's defaults differ from those of a plain script: a schedule with warm-up, clipping, no weight decay on norms
and biases, sizes filled in from the data. Users should not have to find that out by comparing losses.
"""

import functools
import inspect
import itertools
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import nn

from trainapp.checkpoint.train_state import Update
from trainapp.config.excludes import NO_BEST, SET_OBJECTIVE
from trainapp.files import RECIPE, atomic_write, strict_json
from trainapp.losses.losses import Task, unchecked
from trainapp.models.inspect import batchnorms
from trainapp.optim.precision import Precision
from trainapp.training.session import Session
from trainapp.units import listed, plural

FIRST_STEPS = 4  # of an update, named on the line
MOST_FILLED = 6  # settings named on the line
LONGEST = 120  # characters of a check's outcome on the line


def recipe_of(session: Session) -> dict[str, Any]:
    """Return the recipe in plain values. Of a mode that does not train: only the model and the precision."""
    recipe: dict[str, Any] = {"model": _model(session), "precision": _precision(session)}
    if not session.config.activity.makes_steps:
        return recipe
    objective = session.objective
    recipe |= {
        "batch": _batch(session),
        "filled_from_data": dict(session.filled),
        "task": _task_name(session.task),
        "tasks_by_update": {name: _task_name(task) for name, task in session.engine.tasks.items()},
        "task_arguments": dict(session.config.task_arguments),
        "objective": f"{objective.direction} {objective.metric}" if session.config.has_best else None,
        "optimizers": [_optimizer(update, session) for update in session.state.updates],
        "grad_clip": session.config.train.grad_clip,
        "schedule": _schedule(session),
        "batchnorm_layers": _batchnorm_layers(session.state.model),
        "checks": dict(session.checks),
    }
    return recipe


def write(run_dir: Path, recipe: dict[str, Any]) -> None:
    """Write recipe.json. Raises OSError if it cannot be written."""
    with atomic_write(run_dir / RECIPE) as file:
        file.write(strict_json(recipe, indent=1, default=str) + "\n")


def lines_of(recipe: dict[str, Any]) -> list[str]:
    """Return the recipe as at most six lines."""
    model = _model_text(recipe)
    if "batch" not in recipe:
        return [model, _precision_text(recipe["precision"])]
    return [
        f"{model}; {_batch_text(recipe['batch'])}",
        f"data: {_filled_text(recipe)}",
        f"optimizer: {_optimizers_text(recipe)}",
        f"schedule: {_schedule_text(recipe)}",
        f"precision: {_precision_text(recipe['precision'])}",
        f"checks: {_checks_text(recipe)}",
    ]


# --- the model and its batches


def _model(session: Session) -> dict[str, Any]:
    """Return the model's class, size and device. Of a shard, `numel` counts the whole tensor."""
    model, device = session.state.model, session.state.device
    name = session.config.model.target.rpartition(".")[2]
    if not name[0].isupper():  # a function that builds the model
        name = type(model).__name__.removeprefix("FSDP")
    parameters = list(model.parameters())
    return {
        "class": name,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trained_parameters": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }


def _model_text(recipe: dict[str, Any]) -> str:
    model = recipe["model"]
    device = model["device"]
    if model["device_name"]:
        device += f" ({model['device_name']})"
    size = _count_text(model["parameters"])
    # report/run_files.py recognises this line by " parameters on ", which no other line may contain.
    precision = _dtypes_of_weights(recipe["precision"]) or recipe["precision"]["mode"]
    text = f"{model['class']} with {size} parameters on {device}, {precision}"
    if "batch" in recipe and model["trained_parameters"] < model["parameters"]:
        share = 100 * model["trained_parameters"] / model["parameters"]
        text += f"; {model['trained_parameters']} of {model['parameters']} parameters are trained ({share:.2f}%)"
    return text


def _count_text(count: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.2f}{unit}"
    return str(count)


def _batch(session: Session) -> dict[str, Any]:
    batches, micro_size = session.batches, session.sizes.train.size
    steps_per_epoch = batches.steps_left()
    return {
        "global_size": session.config.batch.global_size,
        "micro_size": micro_size,
        "accumulation": batches.accumulation(micro_size),
        "ranks": batches.world_size,
        "has_micro_schedule": session.config.batch.micro_schedule is not None,
        "samples": None if steps_per_epoch is None else batches.samples,
        "steps_per_epoch": steps_per_epoch,
        "sampling_weights": session.config.data.sampling.weights,
    }


def _batch_text(batch: dict[str, Any]) -> str:
    text = (
        f"global batch {batch['global_size']} = micro-batch {batch['micro_size']} x "
        f"{batch['accumulation']} accumulated x {plural(batch['ranks'], 'rank')}"
    )
    if batch["has_micro_schedule"]:
        text += " (the sizes are those of batch.micro_schedule)"
    if batch["samples"] is None:
        return f"{text}; a stream"
    text += f"; {batch['samples']} samples, {batch['steps_per_epoch']} steps per epoch"
    if batch["sampling_weights"] is not None:
        text += f", drawn with replacement (data.sampling.weights={batch['sampling_weights']})"
    return text


def _filled_text(recipe: dict[str, Any]) -> str:
    filled = [f"{setting}={value}" for setting, value in recipe["filled_from_data"].items()]
    sizes = f"sets {listed(filled, MOST_FILLED)}" if filled else "no model size filled in"
    by_update = [f"{task} for {name}" for name, task in recipe["tasks_by_update"].items()]
    text = f"{sizes}; task {listed(by_update or [recipe['task']])}"
    if recipe["task_arguments"]:
        text += f" with {listed(f'{name}={value}' for name, value in recipe['task_arguments'].items())}"
    if recipe["objective"] is None:
        return f"{text}; {NO_BEST}, so the last checkpoint counts; {SET_OBJECTIVE}"
    return f"{text}, best checkpoint by {recipe['objective']}"


def _task_name(task: Task) -> str:
    """Return the name of a task's function or class; of a user's, with its module."""
    original = unchecked(task)
    while isinstance(original, functools.partial):
        original = original.func
    named = original if hasattr(original, "__qualname__") else type(original)
    if named.__module__.startswith("trainapp."):
        return named.__qualname__
    return f"{named.__module__}.{named.__qualname__}"


def _batchnorm_layers(model: nn.Module) -> int:
    """Return the number of layers that normalise over a micro-batch: not those that stay in evaluation mode."""
    return sum(model.get_submodule(name).training for name in batchnorms(model))


# --- optimizer and schedule


_NOT_OPTIONS = ("params", "lr", "initial_lr", "weight_decay", "label")  # of a group; they have entries of their own
_ALWAYS_SHOWN = ("betas", "momentum")


def _optimizer(update: Update, session: Session) -> dict[str, Any]:
    """Return an optimizer's class, the steps in which it updates, and its groups with their options and parameters."""
    name_of = {id(parameter): name for name, parameter in session.state.model.named_parameters()}
    first_rates = update.schedule.first_rates(update.optimizer.param_groups)
    groups = []
    for group, first_rate in zip(update.optimizer.param_groups, first_rates, strict=True):
        groups.append(
            {
                "lr": float(group.get("initial_lr", group["lr"])),
                "first_lr": float(first_rate),  # with the schedule's factor in the first step
                "weight_decay": group.get("weight_decay"),
                "options": {name: value for name, value in group.items() if name not in _NOT_OPTIONS},
                "tensors": len(group["params"]),
                "largest_dimensions": max((parameter.ndim for parameter in group["params"]), default=0),
                "names": [name_of.get(id(parameter), "?") for parameter in group["params"]],
            }
        )
    defaults = {}
    for name, parameter in inspect.signature(type(update.optimizer)).parameters.items():
        if parameter.default is not parameter.empty:
            defaults[name] = parameter.default
    cadence = update.cadence
    steps = filter(cadence.includes, itertools.count(1))
    log_every = session.limits.log
    logged_steps = range(log_every, log_every * cadence.every + 1, log_every) if log_every else ()
    return {
        "update": update.name,
        "every": cadence.every,
        "offset": cadence.offset,
        "first_steps": list(itertools.islice(steps, FIRST_STEPS)),
        "is_logged": any(map(cadence.includes, logged_steps)),
        "class": type(update.optimizer).__name__,
        "class_defaults": defaults,
        "groups": groups,
    }


def _optimizers_text(recipe: dict[str, Any]) -> str:
    texts = []
    for optimizer in recipe["optimizers"]:
        rates = f"lr {_range_text(optimizer, 'lr')}"
        if "." in recipe["schedule"]["name"]:  # a class or function, whose first factor may be any
            first = _range_text(optimizer, "first_lr")
            rates = f"begins at {rates}" if rates == f"lr {first}" else f"{rates}, begins at {first}"
        options = f"{rates}{_options_text(optimizer)}{_decay_text(optimizer)}"
        texts.append(f"{_update_text(optimizer)}{optimizer['class']}, {options}")
    clip = recipe["grad_clip"]
    texts.append("gradients are not clipped" if clip is None else f"gradients clipped to a norm of {clip:g}")
    return "; ".join(texts)


def _update_text(optimizer: dict[str, Any]) -> str:
    """Return the update's name, if it has one, with the steps that have it, unless all have."""
    if not optimizer["update"]:
        return ""
    if optimizer["every"] == 1:
        return f"{optimizer['update']}: "
    steps = ", ".join(map(str, optimizer["first_steps"]))
    unlogged = "" if optimizer["is_logged"] else "; every.log meets none of them"
    return f"{optimizer['update']} (in steps {steps}, ...{unlogged}): "


def _range_text(optimizer: dict[str, Any], name: str) -> str:
    """Return the rates of all groups: `lr`, or `first_lr`."""
    rates = [group[name] for group in optimizer["groups"]]
    low, high = min(rates), max(rates)
    return f"{high:g}" if low == high else f"{low:g} to {high:g}"


def _options_text(optimizer: dict[str, Any]) -> str:
    """Return the first group's options that are not the class's defaults, each with a comma before."""
    texts = []
    for name, value in optimizer["groups"][0]["options"].items():
        if not isinstance(value, bool | int | float | str | tuple | list):  # an array compares by element
            continue
        if name not in optimizer["class_defaults"]:  # set by the class itself
            continue
        is_default = repr(value) == repr(optimizer["class_defaults"][name])
        if is_default and name not in _ALWAYS_SHOWN:
            continue
        if value is True:
            texts.append(name)
        elif value:
            texts.append(f"{name} {value}")
    return "".join(f", {text}" for text in texts)


def _decay_text(optimizer: dict[str, Any]) -> str:
    """Return the weight decay and what is exempt from it, with a comma before; empty where the class has none."""
    groups = [group for group in optimizer["groups"] if group["weight_decay"] is not None]
    decays = sorted({group["weight_decay"] for group in groups})
    if not groups:
        return ""
    if decays == [0]:
        return ", no weight decay"
    largest = f"{decays[-1]:g}" if decays[-1] == min(d for d in decays if d) else f"up to {decays[-1]:g}"
    exempt = [group for group in groups if not group["weight_decay"]]
    if not exempt:
        return f", weight decay {largest} on all parameters"
    count = sum(group["tensors"] for group in exempt)
    if all(group["largest_dimensions"] <= 1 for group in exempt):
        return f", weight decay {largest} except on {count} norms and biases"
    return f", weight decay {largest} except on {count} tensors, such as {listed(exempt[0]['names'], 2)}"


def _schedule(session: Session) -> dict[str, Any]:
    settings = session.config.schedule
    schedule = session.state.updates[0].schedule
    return {
        "name": settings.shape if settings.target is None else settings.target,
        "arguments": dict(schedule.arguments),
        "advances_with_each": "evaluation" if schedule.follows_evaluations else "step",
        "warmup_steps": schedule.warmup_steps,
        "final_factor": settings.final if settings.target is None and settings.shape != "constant" else None,
        "total_steps": session.limits.length.total_steps,
    }


def _schedule_text(recipe: dict[str, Any]) -> str:
    schedule = recipe["schedule"]
    text: str = schedule["name"]
    if schedule["arguments"]:
        text += f"({', '.join(f'{name}={value}' for name, value in schedule['arguments'].items())})"
    if schedule["advances_with_each"] == "evaluation":
        text += f", advanced by {recipe['objective']} after each evaluation"
    elif "." in schedule["name"]:  # a class or function, which a script may advance once per epoch
        text += ", advanced in every step"
    if schedule["final_factor"] is not None:
        text += f", towards {schedule['final_factor']:g} x lr after step {schedule['total_steps']}"
    if schedule["warmup_steps"]:
        text += f", with {plural(schedule['warmup_steps'], 'step')} of warm-up"
    if "warmup" in schedule["arguments"]:  # a parameter of the class or function
        text += ", no warm-up added to its own"
    return text


# --- precision and checks


def _precision(session: Session) -> dict[str, Any]:
    precision: Precision = session.state.precision
    weights = sorted({str(p.dtype).removeprefix("torch.") for p in session.state.model.parameters()})
    computes_in = str(precision.compute_dtype).removeprefix("torch.")
    if precision.mode in _WITHOUT_AUTOCAST and weights:
        computes_in = " and ".join(weights)
    return {
        "mode": precision.mode,
        "computes_in": computes_in,
        "is_emulated": precision.is_emulated,
        "weights": weights,
        "draws": session.config.train.draws,
    }


_WITHOUT_AUTOCAST = ("fp32", "tf32")
_COMPUTATION = {
    "fp32": "fp32 throughout",
    "tf32": "matmuls and convolutions in TF32 where the GPU has it, all else in fp32",
    "bf16": "matmuls and convolutions in bf16 (autocast)",
    "bf16_pure": "weights, gradients, matmuls and convolutions in bf16",
    "fp16": "matmuls and convolutions in fp16 (autocast), with a loss scale",
    "int8": "linear layers of blocks in int8, other matmuls and convolutions in bf16 (autocast)",
    "fp8": "linear layers of blocks in fp8, other matmuls and convolutions in bf16 (autocast)",
}


def _dtypes_of_weights(precision: dict[str, Any]) -> str:
    """Return the dtypes in which a model computes whose weights, without autocast, are not all in fp32; else empty."""
    if precision["mode"] not in _WITHOUT_AUTOCAST or precision["weights"] in ([], ["float32"]):
        return ""
    return " and ".join(precision["weights"])


def _precision_text(precision: dict[str, Any]) -> str:
    text = _COMPUTATION[precision["mode"]]
    if dtypes := _dtypes_of_weights(precision):
        text = f"no autocast: as the model's weights, in {dtypes}"
    if precision["mode"] not in ("fp32", "tf32", "bf16_pure"):
        text += f"; weights in {' and '.join(precision['weights'])}"
    if precision["is_emulated"]:
        text += (
            f"; emulated: this CPU has no {precision['computes_in']} instructions, so matmuls and convolutions compute "
            "in fp32 on rounded operands, about as fast as fp32"
        )
    return text


def _checks_text(recipe: dict[str, Any]) -> str:
    """Return the outcomes, each once, with all that was checked with it: the loss first, then the random draws."""
    checks = recipe["checks"]
    modes_of: dict[str, dict[str, list[str]]] = {}  # by outcome and subject
    for name in sorted(checks, key=lambda name: name.startswith("draws")):
        subject, _, mode = name.partition(" ")
        modes_of.setdefault(checks[name], {}).setdefault(subject, []).append(mode)
    clauses: list[str] = []
    for outcome, modes_by_subject in modes_of.items():
        subjects_of: dict[str, list[str]] = {}  # subjects with the same outcome in the same modes share a clause
        for subject, modes in modes_by_subject.items():
            subjects_of.setdefault(_modes_text(modes), []).append(subject)
        clauses.extend(_check_text(subjects, modes, outcome) for modes, subjects in subjects_of.items())
    if recipe["batchnorm_layers"]:
        layers = plural(recipe["batchnorm_layers"], "BatchNorm layer")
        clauses.append(f"results depend on the micro-batch ({layers})")
    return "; ".join(clauses) or "none"


_SUBJECTS = {"loss": "the loss", "padding": "the loss in padded halves", "draws": "random draws"}


def _modes_text(modes: list[str]) -> str:
    """Return `in evaluation and training`, `in chunks` or the like. modes: as in the names of `checks`."""
    texts = []
    for mode in modes:
        is_named = mode.endswith(("in training", "in chunks"))
        texts.append(mode if is_named else f"{mode} in evaluation".lstrip())
    if texts[:2] == ["in evaluation", "in training"]:
        texts[:2] = ["in evaluation and training"]
    return ", ".join(texts)


def _check_text(subjects: list[str], modes: str, outcome: str) -> str:
    """Return one clause: an outcome that begins with a verb continues the subject, any other follows a colon."""
    if subjects == ["draws"] and outcome == "none":
        return f"no random draws {modes}"
    text = " and ".join(_SUBJECTS[subject] for subject in subjects) + f" {modes}"
    if subjects == ["loss", "padding"]:
        text = f"the loss {modes}, also in padded halves,"
    if outcome.startswith("not "):
        text += " are" if "draws" in subjects else " is"
    elif not outcome.startswith(("adds up ", "does not add up", "is ", "all belong ")):
        text += ":"
    return f"{text} {shorten(outcome, LONGEST, placeholder=' ...')}"
