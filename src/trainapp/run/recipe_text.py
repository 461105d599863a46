"""The lines with which a run says how it trains: the recipe as text.

One line per subject: the model and its batches, the weights if they are loaded or frozen, data, optimizer, schedule,
precision and checks. Nothing is cut off, except lists of names, whose whole is in recipe.json.
"""

import textwrap
from collections.abc import Sequence
from typing import Any

from trainapp.config.excludes import NO_BEST, SET_OBJECTIVE
from trainapp.run.recipe import (
    BatchRecipe,
    FrozenRecipe,
    GroupRecipe,
    ModelRecipe,
    OptimizerRecipe,
    PrecisionRecipe,
    Recipe,
    ScheduleRecipe,
    StoppingRecipe,
    TrainingRecipe,
)
from trainapp.training.session import InitialWeights
from trainapp.units import listed, plural

MOST_FILLED = 6  # settings named on the line
MOST_FRESH = 4  # tensors named on the line
WIDTH = 120  # of a wrapped line
_CHECKS = "checks: "


def printed_lines(recipe: Recipe) -> list[str]:
    """Return the recipe as lines to print: that of the checks, which may be long sentences, is wrapped."""
    printed = []
    for line in lines_of(recipe):
        if line.startswith(_CHECKS):
            indent = " " * len(_CHECKS)
            printed += textwrap.wrap(
                line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
        else:
            printed.append(line)
    return printed


def lines_of(recipe: Recipe) -> list[str]:
    """Return the recipe as one line per subject."""
    model = _model_text(recipe.model, recipe.precision)
    weights = _weights_lines(recipe)
    training = recipe.training
    if training is None:
        return [model, *weights, _precision_text(recipe)]
    return [
        f"{model}{_trained_text(recipe.model)}; {_batch_text(training.batch)}",
        *weights,
        f"data: {_data_text(training)}",
        f"optimizer: {_optimizers_text(training)}",
        f"schedule: {_schedule_text(training)}",
        f"precision: {_precision_text(recipe)}",
        f"{_CHECKS}{_checks_text(training)}",
    ]


# --- the model, its weights and its batches


def _model_text(model: ModelRecipe, precision: PrecisionRecipe) -> str:
    device = model.device
    if model.device_name:
        device += f" ({model.device_name})"
    dtypes = precision.dtypes_of_weights or precision.mode
    # report/run_files.py recognises this line by " parameters on ", which no other line may contain.
    return f"{model.class_name} with {_count_text(model.parameters)} parameters on {device}, {dtypes}"


def _count_text(count: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.2f}{unit}"
    return str(count)


def _trained_text(model: ModelRecipe) -> str:
    """Return the share of the parameters that is trained, after a semicolon; empty for all."""
    if model.trained_parameters == model.parameters:
        return ""
    share = 100 * model.trained_parameters / model.parameters
    return f"; {model.trained_parameters} of {model.parameters} parameters are trained ({share:.2f}%)"


def _weights_lines(recipe: Recipe) -> list[str]:
    """Return the line of what is loaded and what is frozen; none where neither is."""
    texts = []
    if recipe.initial_weights is not None:
        texts.append(_initial_weights_text(recipe.initial_weights))
    if recipe.training is not None and recipe.training.frozen is not None:
        texts.append(_frozen_text(recipe.training.frozen))
    if not texts:
        return []
    return [f"weights: {'; '.join(texts)}"]


def _initial_weights_text(weights: InitialWeights) -> str:
    if weights.tensors is None:
        return f"the adapters' base begins with {weights.source}"
    text = f"{weights.tensors} of {plural(weights.of_tensors, 'tensor')} begin with model.init_from={weights.source}"
    if weights.left_as_initialised:
        names = listed(weights.left_as_initialised, MOST_FRESH)
        text += f", left as initialised: {names}"
    return text


def _frozen_text(frozen: FrozenRecipe) -> str:
    text = f"{frozen.tensors} of {plural(frozen.of_tensors, 'parameter tensor')} are frozen"
    layers = []
    effects = []
    if frozen.batchnorm_layers_in_training:
        layers.append(plural(frozen.batchnorm_layers_in_training, "BatchNorm layer"))
        effects.append("statistics move")
    if frozen.dropout_layers_in_training:
        layers.append(plural(frozen.dropout_layers_in_training, "dropout layer"))
        effects.append("values are dropped")
    if not layers:
        return text
    remedy = "model.freeze_mode=eval keeps them in evaluation mode"
    return f"{text}, in training mode: {' and '.join(layers)} ({' and '.join(effects)}; {remedy})"


def _batch_text(batch: BatchRecipe) -> str:
    text = (
        f"global batch {batch.global_size} = micro-batch {batch.micro_size} x "
        f"{batch.accumulation} accumulated x {plural(batch.ranks, 'rank')}"
    )
    if batch.has_micro_schedule:
        text += " (the sizes are those of batch.micro_schedule)"
    if batch.samples is None:
        return f"{text}; a stream"
    text += f"; {batch.samples} samples, {batch.steps_per_epoch} steps per epoch"
    if batch.sampling_weights is not None:
        text += f", drawn with replacement (data.sampling.weights={batch.sampling_weights})"
    return text


def _data_text(training: TrainingRecipe) -> str:
    # The sizes that the data sets.
    text = "no model size filled in"
    if training.filled_from_data:
        filled = [f"{setting}={value}" for setting, value in training.filled_from_data.items()]
        text = f"sets {listed(filled, MOST_FILLED)}"

    # The task, or those of several updates.
    tasks = [f"{task} for {name}" for name, task in training.tasks_by_update.items()]
    if not tasks:
        tasks = [training.task]
    text += f"; task {listed(tasks)}"
    if training.task_arguments:
        arguments = [f"{name}={value}" for name, value in training.task_arguments.items()]
        text += f" with {listed(arguments)}"

    if training.objective is None:
        return f"{text}; {NO_BEST}, so the last checkpoint counts; {SET_OBJECTIVE}"
    return f"{text}, best checkpoint by {training.objective}"


# --- optimizer and schedule


_ALWAYS_SHOWN = ("betas", "momentum")


def _optimizers_text(training: TrainingRecipe) -> str:
    texts = []
    for optimizer in training.optimizers:
        rates = _rates_text(optimizer, training.schedule)
        options = f"{rates}{_options_text(optimizer)}{_decay_text(optimizer)}"
        texts.append(f"{_update_text(optimizer)}{optimizer.class_name}, {options}")
    if training.grad_clip is None:
        texts.append("gradients are not clipped")
    else:
        texts.append(f"gradients clipped to a norm of {training.grad_clip:g}")
    if training.ema is not None:
        purposes = "evaluations and exports"
        if training.objective is not None:
            purposes = "evaluations, the best checkpoint and exports"
        texts.append(f"weights are averaged (train.ema={training.ema:g}) for {purposes}")
    return "; ".join(texts)


def _rates_text(optimizer: OptimizerRecipe, schedule: ScheduleRecipe) -> str:
    """Return the learning rates, and those of the first step where the schedule may begin with any factor."""
    rates = _range_text([group.lr for group in optimizer.groups])
    if not schedule.is_named_by_target:
        return f"lr {rates}"
    first_rates = _range_text([group.first_lr for group in optimizer.groups])
    if rates == first_rates:
        return f"begins at lr {rates}"
    return f"lr {rates}, begins at {first_rates}"


def _update_text(optimizer: OptimizerRecipe) -> str:
    """Return the update's name, if it has one, with the steps that have it, unless all have."""
    if not optimizer.update:
        return ""
    if optimizer.every == 1:
        return f"{optimizer.update}: "
    steps = ", ".join(map(str, optimizer.first_steps))
    unlogged = "" if optimizer.is_logged else "; every.log meets none of them"
    return f"{optimizer.update} (in steps {steps}, ...{unlogged}): "


def _range_text(rates: Sequence[float]) -> str:
    """Return the rates of all groups."""
    low = min(rates)
    high = max(rates)
    if low == high:
        return f"{high:g}"
    return f"{low:g} to {high:g}"


def _options_text(optimizer: OptimizerRecipe) -> str:
    """Return the options that are not the class's defaults, each with a comma before; an option that differs between
    groups with all its values, and the first parameter that has each. Of groups with other options, as Muon has for
    AdamW, the first one's.
    """
    first_group = optimizer.groups[0]
    groups_alike = [group for group in optimizer.groups if group.options.keys() == first_group.options.keys()]
    texts = []
    for name in first_group.options:
        if name not in optimizer.class_defaults:  # set by the class itself
            continue
        groups_by_value: dict[str, list[GroupRecipe]] = {}
        for group in groups_alike:
            groups_by_value.setdefault(repr(group.options.get(name)), []).append(group)

        if len(groups_by_value) == 1:
            texts.append(_option_text(name, first_group.options[name], optimizer.class_defaults[name]))
        elif all(_is_shown(group.options.get(name)) for group in groups_alike):
            values = []
            for value, groups in groups_by_value.items():
                names = [parameter for group in groups for parameter in group.names]
                values.append(f"{value} for {listed(names, 1)}")
            texts.append(f"{name} {', '.join(values)}")
    return "".join(f", {text}" for text in texts if text)


def _is_shown(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | tuple | list)  # an array compares by element


def _option_text(name: str, value: Any, default: Any) -> str:
    """Return an option that all groups share; empty for a default that goes without saying, and for what is off."""
    is_default = repr(value) == repr(default)
    if not _is_shown(value) or (is_default and name not in _ALWAYS_SHOWN):
        return ""
    if value is True:
        return name
    return f"{name} {value}" if value else ""


def _decay_text(optimizer: OptimizerRecipe) -> str:
    """Return the weight decay and what is exempt from it, with a comma before; empty where the class has none."""
    groups = [group for group in optimizer.groups if group.weight_decay is not None]
    if not groups:
        return ""

    decays = sorted({group.weight_decay for group in groups if group.weight_decay})
    if not decays:
        return ", no weight decay"
    largest = f"{decays[-1]:g}"
    if len(decays) > 1:
        largest = f"up to {largest}"

    # Norms and biases are the usual exemption: anything else is named.
    exempt = [group for group in groups if not group.weight_decay]
    if not exempt:
        return f", weight decay {largest} on all parameters"
    count = sum(group.tensors for group in exempt)
    if all(group.largest_dimensions <= 1 for group in exempt):
        return f", weight decay {largest} except on {count} norms and biases"
    return f", weight decay {largest} except on {count} tensors, such as {listed(exempt[0].names, 2)}"


def _schedule_text(training: TrainingRecipe) -> str:
    schedule = training.schedule
    text: str = schedule.name
    if schedule.arguments:
        arguments = [f"{name}={value}" for name, value in schedule.arguments.items()]
        text += f"({', '.join(arguments)})"
    if schedule.advances_with_each == "evaluation":
        text += f", advanced by {training.objective} after each evaluation"
    elif schedule.is_named_by_target:  # which a script may advance once per epoch
        text += ", advanced in every step"
    if schedule.final_factor is not None:
        text += f", towards {schedule.final_factor:g} x lr after step {schedule.total_steps}"
    if schedule.warmup_steps:
        text += f", with {plural(schedule.warmup_steps, 'step')} of warm-up"
    if "warmup" in schedule.arguments:  # a parameter of the class or function
        text += ", no warm-up added to its own"
    if training.stopping is not None:
        text += f"; {_stopping_text(training.stopping)}"
    return text


def _stopping_text(stopping: StoppingRecipe) -> str:
    evaluations = plural(stopping.patience, "evaluation")
    if stopping.patience > 1:
        evaluations += " in a row"
    text = f"the run ends after {evaluations} without an improvement of {stopping.metric}"
    if stopping.min_delta:
        text += f" by more than {stopping.min_delta:g}"
    return text


# --- precision and checks


_COMPUTATION = {
    "fp32": "fp32 throughout",
    "tf32": "matmuls and convolutions in TF32 where the GPU has it, all else in fp32",
    "bf16": "matmuls and convolutions in bf16 (autocast)",
    "bf16_pure": "weights, gradients, matmuls and convolutions in bf16",
    "fp16": "matmuls and convolutions in fp16 (autocast), with a loss scale",
    "int8": "linear layers of blocks in int8, other matmuls and convolutions in bf16 (autocast)",
    "fp8": "linear layers of blocks in fp8, other matmuls and convolutions in bf16 (autocast)",
}


def _precision_text(recipe: Recipe) -> str:
    precision = recipe.precision
    text = _COMPUTATION[precision.mode]
    if precision.dtypes_of_weights:
        text = f"no autocast: as the model's weights, in {precision.dtypes_of_weights}"
    if precision.mode not in ("fp32", "tf32", "bf16_pure"):
        text += f"; weights in {' and '.join(precision.weights)}"
    if precision.is_emulated:
        text += (
            f"; emulated: this CPU has no {precision.computes_in} instructions, so matmuls and convolutions compute "
            "in fp32 on rounded operands, about as fast as fp32"
        )
    if recipe.tf32_is_unused:
        text += "; precision=tf32 is faster on this GPU and rounds the operands of matmuls and convolutions to 11 bits"
    if recipe.without_cudnn:
        layers = listed(recipe.without_cudnn, MOST_FRESH)
        text += f"; {layers} without cuDNN, whose dropout no seed repeats"
    return text


def _checks_text(training: TrainingRecipe) -> str:
    """Return the outcomes, each once, with all that was checked with it: the loss first, then the random draws."""
    clauses = []
    for outcome, calls_by_subject in _subjects_by_outcome(training.checks).items():
        # Subjects with the same outcome in the same calls share a clause.
        subjects_by_calls: dict[str, list[str]] = {}
        for subject, calls in calls_by_subject.items():
            subjects_by_calls.setdefault(_calls_text(calls), []).append(subject)
        for calls_text, subjects in subjects_by_calls.items():
            clauses.append(_check_text(subjects, calls_text, outcome))

    # What no check is needed for.
    causes = []
    if training.batchnorm_layers:
        causes.append(plural(training.batchnorm_layers, "BatchNorm layer"))
    if training.collate_draws:
        causes.append("draws of the data's `collate`")
    if causes:
        clauses.append(f"results depend on the micro-batch ({', '.join(causes)})")
    return "; ".join(clauses) or "none"


def _subjects_by_outcome(checks: dict[str, str]) -> dict[str, dict[str, list[str]]]:
    """Return by outcome and subject the calls in which the subject had this outcome.

    checks: the outcomes by subject and call, such as `loss in training`; a subject alone is meant in evaluation.
    """
    draws_last = sorted(checks, key=lambda name: name.startswith("draws"))
    subjects_by_outcome: dict[str, dict[str, list[str]]] = {}
    for name in draws_last:
        subject, _, call = name.partition(" ")
        calls_by_subject = subjects_by_outcome.setdefault(checks[name], {})
        calls_by_subject.setdefault(subject, []).append(call)
    return subjects_by_outcome


_SUBJECTS = {
    "loss": "the loss",
    "padding": "the loss in padded halves",
    "embeddings": "the embeddings",
    "padded_embeddings": "the embeddings in padded halves",
    "draws": "random draws",
}
# Subjects of one outcome that have a common name.
_WITH_PADDED_HALVES: dict[tuple[str, ...], str] = {
    ("loss", "padding"): "the loss {}, also in padded halves,",
    ("embeddings", "padded_embeddings"): "the embeddings {}, also in padded halves,",
}
_PLURAL_SUBJECTS = {"embeddings", "padded_embeddings", "draws"}
_VERBS = ("adds up ", "does not add up", "is ", "are ", "all belong ")  # with which outcomes begin


def _calls_text(calls: list[str]) -> str:
    """Return `in evaluation and training`, `in chunks` or the like. calls: as in the names of `checks`."""
    texts = []
    for call in calls:
        if call.endswith(("in training", "in chunks")):
            texts.append(call)
        else:
            texts.append(f"{call} in evaluation".lstrip())
    if texts[:2] == ["in evaluation", "in training"]:
        texts = ["in evaluation and training", *texts[2:]]
    return ", ".join(texts)


def _check_text(subjects: list[str], calls: str, outcome: str) -> str:
    """Return one clause: an outcome that begins with a verb continues the subject, any other follows a colon."""
    if subjects == ["draws"] and outcome == "none":
        return f"no random draws {calls}"
    names = " and ".join(_SUBJECTS[subject] for subject in subjects)
    text = f"{names} {calls}"
    joint_name = _WITH_PADDED_HALVES.get(tuple(subjects))
    if joint_name is not None:
        text = joint_name.format(calls)
    if outcome.startswith("not "):
        text += " is" if _PLURAL_SUBJECTS.isdisjoint(subjects) else " are"
    elif not outcome.startswith(_VERBS):
        text += ":"
    return f"{text} {outcome}"
