"""The parts that a configuration names: device, data sets, classes. Every mistake in them is a UserError."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from trainapp.assembly.hooks import Hooks, load_hooks
from trainapp.checkpoint.directory import names_checkpoint, resolve
from trainapp.checkpoint.manifest import read_manifest
from trainapp.config import targets
from trainapp.config.arguments import check_arguments, parameters_of
from trainapp.config.schema import Config, Target
from trainapp.data.stream_reader import is_empty
from trainapp.errors import UserError
from trainapp.losses import losses
from trainapp.losses.contrastive import Contrastive
from trainapp.losses.losses import CheckedTask
from trainapp.models.adapters import adapted
from trainapp.units import listed

BUILT_IN_TASKS: dict[str, Any] = {
    "classification": losses.classification,
    "next_token": losses.next_token,
    "contrastive": Contrastive,
}


@dataclass
class ResolvedTargets:
    """The classes named by `_target_`s and `task`, and the data sets."""

    model: Callable[..., Any]
    task: CheckedTask  # of evaluations
    train_data: Any
    eval_data: dict[str, Any]  # the data's own split under "", if any; then the sets in `eval`, by name
    spec: dict[str, Any]  # arguments that the data provides to the model's constructor
    hooks: Hooks
    updates: dict[str, CheckedTask] = field(default_factory=dict)  # the task of each update, by name

    @property
    def training_tasks(self) -> list[CheckedTask]:
        """The tasks of a step's updates, or the only one."""
        return list(self.updates.values()) or [self.task]

    @property
    def has_embeddings(self) -> bool:
        """Whether a loss is an embedding loss: a step then holds the embeddings of all its micro-batches at once."""
        return any(map(losses.has_embeddings, (self.task, *self.training_tasks)))

    @property
    def knows_loss(self) -> bool:
        """Whether every loss can be computed in chunks."""
        return all(map(losses.can_be_chunked, (self.task, *self.training_tasks)))


def resolve_targets(config: Config) -> ResolvedTargets:
    """Find the named classes and open the data sets. Raises UserError with all errors in names and arguments."""
    found = located(config)
    train, evaluated = _datasets(config, found)
    if not evaluated and config.mode == "eval":
        raise UserError(f"mode=eval: data={config.data.target} has no validation split, and `eval` names no other data")
    if config.mode == "predict" and config.predict.split == "train":
        evaluated["train"] = train
    spec = dict(getattr(train, "spec", {}))
    task, updates = _tasks(config, found, train)
    return ResolvedTargets(
        model=adapted(found["model"], config, _base_weights(config)),
        task=task,
        updates=updates,
        train_data=train,
        eval_data=evaluated,
        spec=spec,
        hooks=load_hooks(config, spec),
    )


def located(config: Config) -> dict[str, Any]:
    """The classes and functions that `data`, `model`, `eval`, the optimizers and the tasks name, by setting. Raises
    UserError with all errors at once.
    """
    errors: list[str] = []
    found: dict[str, Any] = {}
    data: dict[str, Target] = {"data": config.data} | {f"eval.{name}": own for name, own in config.eval.items()}
    objects = {**data, "model": config.model, **config.optimizers}
    tasks = {f"updates.{number}.task": update.task for number, update in enumerate(config.updates)}
    tasks |= {} if config.task == "auto" else {"task": config.task}
    for name, target in ({name: own.target for name, own in objects.items()} | tasks).items():
        setting = name if name in tasks else f"{name}._target_"
        try:
            own_task = BUILT_IN_TASKS.get(target) if name in tasks else None
            found[name] = own_task or targets.locate(target, setting, config.user_packages)
            if name in objects:
                provided = {"split", "seed"} if name in data else set(parameters_of(found[name]))
                errors += check_arguments(found[name], objects[name].arguments, name, provided)
        except UserError as error:
            errors.append(str(error))
    if errors:
        raise UserError("\n".join(errors))
    return found


def _base_weights(config: Config) -> str | None:
    """The file with the initial weights of the adapters' base: `model.init_from`, or that of the run it names, whose
    adapters this run starts from.
    """
    source = None if config.adapter.kind == "none" else config.model.init_from
    while source is not None and names_checkpoint(source):
        source = read_manifest(resolve(source, "model.init_from"))["config"]["model"]["init_from"]
    return source


def _tasks(config: Config, found: dict[str, Any], data: Any) -> tuple[CheckedTask, dict[str, CheckedTask]]:
    """The task of evaluations and those of the updates. For task=auto, the first is the data set's or, with updates,
    the last one's; data for several losses need not declare one.
    """
    updates = {}
    for number, update in enumerate(config.updates):
        setting = f"updates.{number}.task"
        task = updates[update.name] = _task(config, found[setting], setting, update.task, update.task_arguments)
        if losses.needs_whole_batch(task):
            raise UserError(
                f"{task.setting} has whole_batch=True, which needs a single optimizer: each update is cut separately; "
                "use a loss that is a sum over samples, or an embedding loss (trainapp.tasks.EmbeddingTask)"
            )
    if config.task != "auto":
        return _task(config, found["task"], "task", config.task, config.task_arguments), updates
    if updates:
        if config.task_arguments:
            raise UserError(
                f"task.{next(iter(config.task_arguments))} with updates: task=auto is the last update's task, whose "
                "arguments are its own; write them there, or name a task for evaluation"
            )
        return list(updates.values())[-1], updates
    declared = getattr(data, "task", None)
    if declared not in BUILT_IN_TASKS:
        raise UserError(
            f"task=auto: {config.data.target} declares the task {declared!r}, which must be one of "
            f"{', '.join(BUILT_IN_TASKS)}; set task to one of them, or to your own function"
        )
    return _task(config, BUILT_IN_TASKS[declared], "task", "auto", config.task_arguments), updates


def _task(config: Config, found: Any, setting: str, name: str, arguments: dict[str, Any]) -> CheckedTask:
    """An instance of the class that a setting names, or the named function or object, with arguments bound. Raises
    UserError for arguments that do not fit.

    `output` is an argument of every task. One that does not take it leaves it to prediction and generation.
    """
    output = arguments.get("output")
    parameters = parameters_of(found)
    is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not is_open and "output" not in parameters:
        arguments = {argument: value for argument, value in arguments.items() if argument != "output"}
        if not (output is None or type(output) in (int, str)):
            raise UserError(f"{setting}.output={output}: must be the index or the name of a part of the model's output")
    task = targets.function_of(found, arguments, setting, config.user_packages, leading=2)
    return CheckedTask(task, f"{setting}={name}", output if type(output) in (int, str) else None)


def _datasets(config: Config, found: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The training data, and the evaluation data: see `ResolvedTargets`."""

    def opened(setting: str, node: Target, split: str) -> Any:
        provided = {"split": split, "seed": config.train.seed}
        return targets.construct(found[setting], node.arguments, setting, config.user_packages, provided)

    if "split" not in parameters_of(found["data"]):
        raise UserError(
            f"data._target_={config.data.target}: its constructor has no parameter `split`; the application asks for "
            'split="train" and split="val"'
        )
    train, own = (opened("data", config.data, split) for split in ("train", "val"))
    if is_empty(train):
        raise UserError(f"data={config.data.target}: the training split is empty")
    evaluated = {} if own is None or is_empty(own) else {"": own}
    for name, node in config.eval.items():
        evaluated[name] = opened(f"eval.{name}", node, "val")
        if evaluated[name] is None or is_empty(evaluated[name]):
            raise UserError(f"eval.{name}._target_={node.target}: it has no samples; remove it, or add samples")
    for name, data in evaluated.items():
        setting = f"eval.{name}._target_={config.eval[name].target}" if name else f"data={config.data.target}"
        _require_same_classes(train, data, setting)
    return train, evaluated


def _require_same_classes(train: Any, data: Any, setting: str) -> None:
    """Raises UserError for an evaluation set whose class names, their order, or tokenizer differ: all its metrics would
    be wrong.
    """
    known, own = (getattr(of, "vocabulary", None) for of in (train, data))
    if known and own and known != own:
        raise UserError(
            f"{setting}: its tokenizer differs from that of the training data (a tokenizer trained on the data depends "
            "on it); give both the same `tokenizer`"
        )
    known, own = (list(getattr(of, "class_names", None) or ()) for of in (train, data))
    if known and own and known != own:
        raise UserError(
            f"{setting}: its classes are {listed(own)}, but those of the training data {listed(known)}; they must be "
            "the same, in the same order (a folder of images takes them as `classes`)"
        )


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
    """Set determinism and anomaly detection, which are global in torch."""
    torch.use_deterministic_algorithms(config.train.deterministic)
    torch.autograd.set_detect_anomaly(config.train.detect_anomaly)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = False  # an earlier run in this process may have enabled it
        torch.backends.cudnn.deterministic = config.train.deterministic
