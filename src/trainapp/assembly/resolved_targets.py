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
from trainapp.config.claimed_settings import errors_of_unclaimed
from trainapp.config.schema import Config, Target
from trainapp.data.stream_reader import is_empty
from trainapp.errors import UserError
from trainapp.losses import losses
from trainapp.losses.contrastive import Contrastive
from trainapp.losses.losses import CheckedTask
from trainapp.models.adapters import with_adapters
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
        return any(losses.has_embeddings(task) for task in (self.task, *self.training_tasks))

    @property
    def knows_loss(self) -> bool:
        """Whether every loss can be computed in chunks."""
        return all(losses.can_be_chunked(task) for task in (self.task, *self.training_tasks))


def resolve_targets(config: Config) -> ResolvedTargets:
    """Find the named classes and open the data sets. Raises UserError with all errors in names and arguments."""
    targets_by_setting = locate_targets(config)

    train_data, eval_data = _open_datasets(config, targets_by_setting)
    if not eval_data and config.mode == "eval":
        raise UserError(f"mode=eval: data={config.data.target} has no validation split, and `eval` names no other data")
    if config.mode == "predict" and config.predict.split == "train":
        eval_data["train"] = train_data

    # The data fills in arguments of models and hooks, and may name its task.
    spec = dict(getattr(train_data, "spec", {}))
    task, updates = _tasks(config, targets_by_setting, train_data)
    return ResolvedTargets(
        model=with_adapters(targets_by_setting["model"], config, _base_weights(config)),
        task=task,
        updates=updates,
        train_data=train_data,
        eval_data=eval_data,
        spec=spec,
        hooks=load_hooks(config, spec),
    )


def locate_targets(config: Config) -> dict[str, Any]:
    """Return the classes and functions that `data`, `model`, `eval`, the optimizers and the tasks name, by setting.
    Raises UserError with all errors at once.
    """
    errors: list[str] = []
    located_targets: dict[str, Any] = {}

    # Nodes with a `_target_` and arguments. The application provides some of the arguments: of data only these two.
    data_nodes: dict[str, Target] = {"data": config.data}
    for name, node in config.eval.items():
        data_nodes[f"eval.{name}"] = node
    for name, node in {**data_nodes, "model": config.model, **config.optimizers}.items():
        try:
            target = targets.locate(node.target, f"{name}._target_", config.user_packages)
            located_targets[name] = target
            provided = {"split", "seed"}
            if name not in data_nodes:
                provided = set(parameters_of(target))
            unclaimed = errors_of_unclaimed(name, node, target)
            for messages in unclaimed.values():
                errors.extend(messages)
            arguments = {argument: value for argument, value in node.arguments.items() if argument not in unclaimed}
            errors.extend(check_arguments(target, arguments, name, provided))
        except UserError as error:
            errors.append(str(error))

    # Tasks, whose arguments are checked when they are bound.
    tasks = {f"updates.{number}.task": update.task for number, update in enumerate(config.updates)}
    if config.task != "auto":
        tasks["task"] = config.task
    for setting, task in tasks.items():
        try:
            built_in_task = BUILT_IN_TASKS.get(task)
            located_targets[setting] = built_in_task or targets.locate(task, setting, config.user_packages)
        except UserError as error:
            errors.append(str(error))

    if errors:
        raise UserError("\n".join(errors))
    return located_targets


# --- data sets


def _open_datasets(config: Config, targets_by_setting: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the training data, and the evaluation data: see `ResolvedTargets`."""
    if "split" not in parameters_of(targets_by_setting["data"]):
        raise UserError(
            f"data._target_={config.data.target}: its constructor has no parameter `split`; the application asks for "
            'split="train" and split="val"'
        )

    def opened(setting: str, node: Target, split: str) -> Any:
        provided = {"split": split, "seed": config.train.seed}
        return targets.construct(targets_by_setting[setting], node.arguments, setting, config.user_packages, provided)

    # The data's two splits. It may have none for validation.
    train_data = opened("data", config.data, "train")
    validation_data = opened("data", config.data, "val")
    if is_empty(train_data):
        raise UserError(f"data={config.data.target}: the training split is empty")
    eval_data: dict[str, Any] = {}
    if validation_data is not None and not is_empty(validation_data):
        eval_data[""] = validation_data

    # The sets of `eval`, each of which has samples for validation.
    for name, node in config.eval.items():
        dataset = opened(f"eval.{name}", node, "val")
        if dataset is None or is_empty(dataset):
            raise UserError(f"eval.{name}._target_={node.target}: it has no samples; remove it, or add samples")
        eval_data[name] = dataset

    # What indices of tokens and classes mean has to be the same everywhere.
    for name, dataset in eval_data.items():
        setting = f"data={config.data.target}"
        if name:
            setting = f"eval.{name}._target_={config.eval[name].target}"
        _require_same_vocabulary(train_data, dataset, setting)
        _require_same_classes(train_data, dataset, setting)
    return train_data, eval_data


def _require_same_vocabulary(train_data: Any, eval_data: Any, setting: str) -> None:
    """Raise UserError for an evaluation set whose tokenizer differs: all its metrics would be wrong."""
    trained = getattr(train_data, "vocabulary", None)
    evaluated = getattr(eval_data, "vocabulary", None)
    if trained and evaluated and trained != evaluated:
        raise UserError(
            f"{setting}: its tokenizer differs from that of the training data (a tokenizer trained on the data depends "
            "on it); give both the same `tokenizer`"
        )


def _require_same_classes(train_data: Any, eval_data: Any, setting: str) -> None:
    """Raise UserError for an evaluation set whose class names, or their order, differ: all its metrics would be
    wrong.
    """
    trained = list(getattr(train_data, "class_names", None) or ())
    evaluated = list(getattr(eval_data, "class_names", None) or ())
    if trained and evaluated and trained != evaluated:
        raise UserError(
            f"{setting}: its classes are {listed(evaluated)}, but those of the training data {listed(trained)}; they "
            "must be the same, in the same order (a folder of images takes them as `classes`)"
        )


# --- tasks


def _tasks(
    config: Config, targets_by_setting: dict[str, Any], train_data: Any
) -> tuple[CheckedTask, dict[str, CheckedTask]]:
    """Return the task of evaluations and those of the updates. For task=auto, the first is the data set's or, with
    updates, the last one's; data for several losses need not declare one.
    """
    # Each update names its task.
    updates = {}
    for number, update in enumerate(config.updates):
        setting = f"updates.{number}.task"
        task = _bind_task(config, targets_by_setting[setting], setting, update.task, update.task_arguments)
        updates[update.name] = task
        if losses.needs_whole_batch(task):
            raise UserError(
                f"{task.setting} has whole_batch=True, which needs a single optimizer: each update is split by itself; "
                "use a loss that is a sum over samples, or an embedding loss (trainapp.tasks.EmbeddingTask)"
            )

    # Evaluations have the task that is named for them, or the last update's, or else the data set's.
    if config.task != "auto":
        task = _bind_task(config, targets_by_setting["task"], "task", config.task, config.task_arguments)
        return task, updates
    if updates:
        if config.task_arguments:
            argument = next(iter(config.task_arguments))
            raise UserError(
                f"task.{argument} with updates: task=auto is the last update's task, whose "
                "arguments are its own; write them there, or name a task for evaluation"
            )
        return list(updates.values())[-1], updates
    declared = getattr(train_data, "task", None)
    if declared not in BUILT_IN_TASKS:
        raise UserError(
            f"task=auto: {config.data.target} declares the task {declared!r}, which must be one of "
            f"{', '.join(BUILT_IN_TASKS)}; set task to one of them, or to your own function"
        )
    return _bind_task(config, BUILT_IN_TASKS[declared], "task", "auto", config.task_arguments), updates


def _bind_task(config: Config, target: Any, setting: str, value: str, arguments: dict[str, Any]) -> CheckedTask:
    """Return an instance of the class that a setting names, or the named function or object, with arguments bound.
    Raises UserError for arguments that do not fit.

    `output` is an argument of every task. One that does not take it leaves it to prediction and generation.

    Args:
        config: the run's.
        target: the class, function or object.
        setting: the setting that names it.
        value: of that setting.
        arguments: to bind.
    """
    output = arguments.get("output")
    is_index_or_name = type(output) in (int, str)

    # Leave out an `output` that the task does not take.
    parameters = parameters_of(target)
    takes_any_keyword = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not takes_any_keyword and "output" not in parameters:
        arguments = {name: argument for name, argument in arguments.items() if name != "output"}
        if not (output is None or is_index_or_name):
            raise UserError(f"{setting}.output={output}: must be the index or the name of a part of the model's output")

    task = targets.function_of(target, arguments, setting, config.user_packages, leading=2)
    return CheckedTask(task, f"{setting}={value}", output if is_index_or_name else None)


# --- the model's weights, the device


def _base_weights(config: Config) -> str | None:
    """Return the file with the initial weights of the adapters' base: `model.init_from`, or that of the run it names,
    whose adapters this run starts from.
    """
    if config.adapter.kind == "none":
        return None
    source = config.model.init_from
    while source is not None and names_checkpoint(source):
        manifest = read_manifest(resolve(source, "model.init_from"))
        source = manifest["config"]["model"]["init_from"]
    return source


def choose_device(setting: str) -> torch.device:
    """Return the device of `train.device`; auto prefers CUDA, then MPS, then the CPU. Raises UserError if it is
    missing.
    """
    available = []  # the preferred one first
    if torch.cuda.is_available():
        available.append("cuda")
    if torch.backends.mps.is_available():
        available.append("mps")
    available.append("cpu")

    name = available[0] if setting == "auto" else setting
    if name not in available:
        raise UserError(
            f"train.device={setting}: this machine has no such device; available: auto, {', '.join(available)}"
        )
    if name == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(name)


def set_global_switches(config: Config, device: torch.device) -> None:
    """Set determinism and anomaly detection, which are global in torch."""
    torch.use_deterministic_algorithms(config.train.deterministic)
    torch.autograd.set_detect_anomaly(config.train.detect_anomaly)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = False  # an earlier run in this process may have enabled it
        torch.backends.cudnn.deterministic = config.train.deterministic
