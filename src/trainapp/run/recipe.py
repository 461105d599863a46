"""The recipe of a run: how it trains, as it was built. Printed when it starts (`recipe_text`), saved as recipe.json.

The program's defaults differ from those of a plain script: a schedule with warm-up, clipping, no weight decay on norms
and biases, sizes filled in from the data. Users should not have to find that out by comparing losses.
"""

import functools
import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainapp.checkpoint.train_state import Update
from trainapp.config.schema import Config
from trainapp.draws.record import COLLATE
from trainapp.files import RECIPE, atomic_write, json_object, strict_json
from trainapp.losses.losses import Task, unchecked
from trainapp.models import recurrent
from trainapp.models.inspect import untrained_modules
from trainapp.optim.precision import Precision, has_tf32
from trainapp.techniques.ladder import overrides_turned_on
from trainapp.torch_private import BatchNorm
from trainapp.training.dependence import batchnorms_of_micro_batches
from trainapp.training.session import InitialWeights, Session
from trainapp.trials.modes import OF_CHECKPOINT

FIRST_STEPS = 4  # of an update, named in its line
WITHOUT_AUTOCAST = ("fp32", "tf32")  # modes that compute in the dtype of the weights


@dataclass(frozen=True)
class ModelRecipe:
    """The model's class, size and device. Of a shard, the whole tensor counts."""

    class_name: str
    parameters: int
    trained_parameters: int
    device: str
    device_name: str | None


@dataclass(frozen=True)
class PrecisionRecipe:
    """The dtypes in which the model computes."""

    mode: str
    computes_in: str
    is_emulated: bool
    weights: list[str]  # dtypes
    draws: str  # `train.draws`

    @property
    def dtypes_of_weights(self) -> str:
        """The dtypes in which a model computes whose weights, without autocast, are not all in fp32; else empty."""
        if self.mode not in WITHOUT_AUTOCAST or self.weights in ([], ["float32"]):
            return ""
        return " and ".join(self.weights)


@dataclass(frozen=True)
class BatchRecipe:
    """How a global batch is split, and how many there are."""

    global_size: int
    micro_size: int
    accumulation: int
    ranks: int
    has_micro_schedule: bool
    samples: int | None  # None: of a stream
    steps_per_epoch: int | None
    sampling_weights: str | None


@dataclass(frozen=True)
class GroupRecipe:
    """A group of parameters with its options."""

    lr: float
    first_lr: float  # with the schedule's factor in the first step
    weight_decay: float | None
    options: dict[str, Any]
    tensors: int
    largest_dimensions: int
    names: list[str]


@dataclass(frozen=True)
class OptimizerRecipe:
    """An optimizer, the steps in which it updates, and its groups."""

    update: str
    every: int
    offset: int | None
    first_steps: list[int]
    is_logged: bool  # whether any of its steps is
    class_name: str
    class_defaults: dict[str, Any]
    groups: list[GroupRecipe]


@dataclass(frozen=True)
class ScheduleRecipe:
    """The schedule of the learning rates."""

    name: str
    arguments: dict[str, Any]
    advances_with_each: str  # step or evaluation
    warmup_steps: int
    final_factor: float | None
    total_steps: int | None

    @property
    def is_named_by_target(self) -> bool:
        """Whether it is a class or function, whose first factor may be any."""
        return "." in self.name


@dataclass(frozen=True)
class StoppingRecipe:
    """The end of the run where evaluations no longer improve: `stopping`."""

    patience: int
    min_delta: float
    metric: str  # with its direction


@dataclass(frozen=True)
class FrozenRecipe:
    """The model's frozen parameters, and the layers in frozen modules that training changes nevertheless."""

    tensors: int
    of_tensors: int
    batchnorm_layers_in_training: int  # whose statistics move
    dropout_layers_in_training: int


@dataclass(frozen=True)
class ResumeRecipe:
    """A resume of the run. ranks_before: None if no file tells."""

    after_step: int
    ranks: int
    ranks_before: int | None


@dataclass(frozen=True)
class TrainingRecipe:
    """How the parameters are trained."""

    batch: BatchRecipe
    filled_from_data: dict[str, Any]
    task: str
    tasks_by_update: dict[str, str]
    task_arguments: dict[str, Any]
    objective: str | None
    optimizers: list[OptimizerRecipe]
    grad_clip: float | None
    ema: float | None  # the decay of the weight average
    schedule: ScheduleRecipe
    stopping: StoppingRecipe | None
    batchnorm_layers: int  # that normalise over a micro-batch
    collate_draws: bool  # whether the data's `collate` draws random numbers, for each micro-batch
    checks: dict[str, str]
    frozen: FrozenRecipe | None
    resumes: list[ResumeRecipe]


@dataclass(frozen=True)
class Recipe:
    """The recipe. training: None for a mode that does not train."""

    model: ModelRecipe
    precision: PrecisionRecipe
    tf32_is_unused: bool  # in fp32, on a device that has it
    without_cudnn: list[str]  # recurrent layers with dropout: see `models.recurrent`
    turned_on: str  # techniques, by the run itself, as on the command line
    initial_weights: InitialWeights | None
    training: TrainingRecipe | None

    def to_dict(self) -> dict[str, Any]:
        """Return the content of recipe.json: the parts of `training` stand beside the others, and what does not apply
        to the run (`_ONLY_IF_ANY`) is left out.
        """
        content = _as_dict(self)
        content |= content.pop("training") or {}
        for key in _ONLY_IF_ANY:
            if not content.get(key):
                content.pop(key, None)
        return content


_FILE_KEYS = {"class_name": "class"}  # by the name of the field, where they differ
_ONLY_IF_ANY = (
    "tf32_is_unused",
    "turned_on",
    "without_cudnn",
    "collate_draws",
    "ema",
    "initial_weights",
    "stopping",
    "frozen",
    "resumes",
)


def _as_dict(value: Any) -> Any:
    """Return a part of the recipe as the file has it. Unlike `dataclasses.asdict`, without copying users' objects."""
    if isinstance(value, list):
        return [_as_dict(element) for element in value]
    if not is_dataclass(value):
        return value
    content = {}
    for field in fields(value):
        key = _FILE_KEYS.get(field.name, field.name)
        content[key] = _as_dict(getattr(value, field.name))
    return content


def recipe_of(session: Session) -> Recipe:
    """Return the recipe of a session that has not begun to train."""
    activity = session.config.activity
    earlier = {}
    if activity.trains:
        earlier = json_object(Path(session.config.run_dir) / RECIPE)
    model = _model(session)
    precision = _precision(session)
    initial_weights = _initial_weights(session, earlier)
    training = None
    if activity.makes_steps:
        training = _training(session, earlier)
    device = session.state.device
    without_cudnn: list[str] = []
    if device.type == "cuda":
        without_cudnn = list(recurrent.layers_with_dropout(session.state.model))
    tf32_is_unused = precision.mode == "fp32" and has_tf32(device)
    turned_on = overrides_turned_on(session.turned_on.settings)
    return Recipe(model, precision, tf32_is_unused, without_cudnn, turned_on, initial_weights, training)


def write(run_dir: Path, recipe: Recipe) -> None:
    """Write recipe.json. Raises OSError if it cannot be written."""
    with atomic_write(run_dir / RECIPE) as file:
        file.write(strict_json(recipe.to_dict(), indent=1, default=str) + "\n")


# --- the model


def _model(session: Session) -> ModelRecipe:
    model = session.state.model
    device = session.state.device
    name = session.config.model.target.rpartition(".")[2]
    if not name[0].isupper():  # a function that builds the model
        name = type(model).__name__.removeprefix("FSDP")
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    device_name = None
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
    return ModelRecipe(
        class_name=name,
        parameters=sum(parameter.numel() for parameter in parameters),
        trained_parameters=sum(parameter.numel() for parameter in trained),
        device=str(device),
        device_name=device_name,
    )


def _precision(session: Session) -> PrecisionRecipe:
    precision: Precision = session.state.precision
    weights = sorted({_dtype_name(parameter.dtype) for parameter in session.state.model.parameters()})
    computes_in = _dtype_name(precision.compute_dtype)
    if precision.mode in WITHOUT_AUTOCAST and weights:
        computes_in = " and ".join(weights)
    return PrecisionRecipe(
        mode=precision.mode,
        computes_in=computes_in,
        is_emulated=precision.is_emulated,
        weights=weights,
        draws=session.config.train.draws,
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _initial_weights(session: Session, earlier: Mapping[str, Any]) -> InitialWeights | None:
    """Return what was loaded when the run began: by this session, or as an earlier recipe of the run tells.

    Args:
        session: the session.
        earlier: the content of recipe.json, as an earlier session has written it.
    """
    if session.initial_weights is not None or session.state.progress.step == 0:
        return session.initial_weights
    recorded = earlier.get("initial_weights")
    if not recorded:
        return None
    return InitialWeights(**recorded)


def _frozen(model: nn.Module) -> FrozenRecipe | None:
    """Return what is frozen; None if all parameters are trained."""
    parameters = list(model.parameters())
    frozen = sum(not parameter.requires_grad for parameter in parameters)
    if not frozen:
        return None

    # Layers that act in training mode, whatever their parameters do.
    in_training = [module for module in untrained_modules(model) if module.training]
    batchnorm_layers = [module for module in in_training if isinstance(module, BatchNorm)]
    dropout_layers = [module for module in in_training if isinstance(module, nn.Dropout) and module.p > 0]
    return FrozenRecipe(
        tensors=frozen,
        of_tensors=len(parameters),
        batchnorm_layers_in_training=len(batchnorm_layers),
        dropout_layers_in_training=len(dropout_layers),
    )


# --- training


def _training(session: Session, earlier: Mapping[str, Any]) -> TrainingRecipe:
    config = session.config
    objective = None
    if config.has_best:
        objective = f"{session.objective.direction} {session.objective.metric}"
    return TrainingRecipe(
        batch=_batch(session),
        filled_from_data=dict(session.filled),
        task=_task_name(session.task),
        tasks_by_update={name: _task_name(task) for name, task in session.engine.tasks.items()},
        task_arguments=dict(config.task_arguments),
        objective=objective,
        optimizers=[_optimizer(update, session) for update in session.state.updates],
        grad_clip=config.train.grad_clip,
        ema=config.train.ema,
        schedule=_schedule(session),
        stopping=_stopping(session.config, objective),
        batchnorm_layers=_batchnorm_layers(session),
        collate_draws=COLLATE in session.engine.draw_record.depends,
        checks=_checks(session, earlier),
        frozen=_frozen(session.state.model),
        resumes=_resumes(session, earlier),
    )


def _batch(session: Session) -> BatchRecipe:
    batches = session.batches
    micro_size = session.sizes.train.size
    steps_per_epoch = batches.steps_left()
    return BatchRecipe(
        global_size=session.config.batch.global_size,
        micro_size=micro_size,
        accumulation=batches.accumulation(micro_size),
        ranks=batches.world_size,
        has_micro_schedule=session.config.batch.micro_schedule is not None,
        samples=None if steps_per_epoch is None else batches.samples,
        steps_per_epoch=steps_per_epoch,
        sampling_weights=session.config.data.sampling.weights,
    )


def _task_name(task: Task) -> str:
    """Return the name of a task's function or class; of a user's, with its module."""
    original = unchecked(task)
    while isinstance(original, functools.partial):
        original = original.func
    named = original if hasattr(original, "__qualname__") else type(original)
    if named.__module__.startswith("trainapp."):
        return named.__qualname__
    return f"{named.__module__}.{named.__qualname__}"


def _batchnorm_layers(session: Session) -> int:
    """Return the number of layers that normalise over a micro-batch: not those that stay in evaluation mode."""
    return sum(layer.training for layer in batchnorms_of_micro_batches(session).values())


def _checks(session: Session, earlier: Mapping[str, Any]) -> dict[str, str]:
    """Return the outcomes of the checks before the first step; of draws that a resumed run takes from its checkpoint,
    those that an earlier session has found.

    Args:
        session: the session.
        earlier: see `_initial_weights`.
    """
    checks = {}
    for name, outcome in session.checks.items():
        checks[name] = outcome
        if outcome == OF_CHECKPOINT:
            checks[name] = earlier.get("checks", {}).get(name, outcome)
    return checks


def _resumes(session: Session, earlier: Mapping[str, Any]) -> list[ResumeRecipe]:
    """Return the resumes of the run up to this session, as far as recipe.json tells.

    Args:
        session: the session.
        earlier: see `_initial_weights`.
    """
    step = session.state.progress.step
    if step == 0:
        return []

    resumes = []
    for recorded in earlier.get("resumes", ()):
        resume = ResumeRecipe(**recorded)
        if resume.after_step < step:  # what an earlier session trained after this step is forgotten
            resumes.append(resume)

    # This session's own.
    ranks_before = earlier.get("batch", {}).get("ranks")
    resumes.append(ResumeRecipe(step, session.batches.world_size, ranks_before))
    return resumes


_NOT_OPTIONS = ("params", "lr", "initial_lr", "weight_decay", "label")  # of a group; they have entries of their own


def _optimizer(update: Update, session: Session) -> OptimizerRecipe:
    cadence = update.cadence
    steps = filter(cadence.includes, itertools.count(1))
    first_steps = list(itertools.islice(steps, FIRST_STEPS))

    # After `every` log steps the pattern repeats.
    log_every = session.limits.log
    logged_steps: Sequence[int] = ()
    if log_every:
        logged_steps = range(log_every, log_every * cadence.every + 1, log_every)
    is_logged = any(cadence.includes(step) for step in logged_steps)

    return OptimizerRecipe(
        update=update.name,
        every=cadence.every,
        offset=cadence.offset,
        first_steps=first_steps,
        is_logged=is_logged,
        class_name=type(update.optimizer).__name__,
        class_defaults=_defaults_of(type(update.optimizer)),
        groups=_groups(update, session.state.model),
    )


def _defaults_of(optimizer_class: type) -> dict[str, Any]:
    """Return the default values of the constructor's parameters."""
    defaults = {}
    for name, parameter in inspect.signature(optimizer_class).parameters.items():
        if parameter.default is not parameter.empty:
            defaults[name] = parameter.default
    return defaults


def _groups(update: Update, model: nn.Module) -> list[GroupRecipe]:
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = update.optimizer.param_groups
    recipes = []
    for group, first_rate in zip(groups, update.schedule.first_rates(groups), strict=True):
        parameters = group["params"]
        options = {name: value for name, value in group.items() if name not in _NOT_OPTIONS}
        dimensions = [parameter.ndim for parameter in parameters]
        recipe = GroupRecipe(
            lr=float(group.get("initial_lr", group["lr"])),
            first_lr=float(first_rate),
            weight_decay=group.get("weight_decay"),
            options=options,
            tensors=len(parameters),
            largest_dimensions=max(dimensions, default=0),
            names=[name_of.get(id(parameter), "?") for parameter in parameters],
        )
        recipes.append(recipe)
    return recipes


def _schedule(session: Session) -> ScheduleRecipe:
    settings = session.config.schedule
    schedule = session.state.updates[0].schedule
    has_final_factor = settings.target is None and settings.shape != "constant"
    return ScheduleRecipe(
        name=settings.shape if settings.target is None else settings.target,
        arguments=dict(schedule.arguments),
        advances_with_each="evaluation" if schedule.follows_evaluations else "step",
        warmup_steps=schedule.warmup_steps,
        final_factor=settings.final if has_final_factor else None,
        total_steps=session.limits.length.total_steps,
    )


def _stopping(config: Config, objective: str | None) -> StoppingRecipe | None:
    """Return what ends the run early. objective: with its direction."""
    settings = config.stopping
    if settings.patience is None:
        return None
    metric = settings.metric
    if metric == "auto":
        assert objective is not None, "refused by config.excludes"
        metric = objective
    return StoppingRecipe(settings.patience, settings.min_delta, metric)
