"""Settings that exclude each other: one table, which needs only the configuration. Imports no torch.

Rules that need the built model, the data or the machine are checked where those exist.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainapp.config.arguments import as_yaml
from trainapp.config.modes import ACTIVITIES
from trainapp.config.schema import Config
from trainapp.errors import UserError

# Settings that users set by choosing a group's option.
OF_GROUP = {
    "activation_checkpointing": "activation_checkpointing.mode",
    "adapter": "adapter.kind",
    "parallel": "parallel.strategy",
    "precision": "precision.mode",
}

NO_BEST = "with several updates no single metric says which evaluation is best"
SET_OBJECTIVE = "set objective to choose one, such as objective='min loss'"


@dataclass(frozen=True)
class Exclusion:
    """Settings that conflict: each with its value, or a test of its value; also `when`, if that is given. A setting or
    argument of `optimizer` is that of any of the optimizers. The message is `a.b=1 with c=2: reason; remedy`.
    """

    settings: dict[str, Any]
    reason: str
    remedy: str
    when: Callable[[Config], bool] = lambda config: True

    def applies(self, config: Config) -> bool:
        """Return whether the configuration has these settings."""
        for name, expected in self.settings.items():
            value = value_of(config, name)
            matches = expected(value) if callable(expected) else value == expected
            if not matches:
                return False
        return self.when(config)

    def message(self, config: Config) -> str:
        """Return what the user reads."""
        texts = []
        for name in self.settings:
            value = value_of(config, name)
            texts.append(_with_value(name, value))
        return f"{' with '.join(texts)}: {self.reason}; {self.remedy}"


def conflicts(config: Config) -> list[str]:
    """Return the message of each exclusion that applies."""
    configs = [config, *config.by_optimizer()]  # the configuration's own `optimizer` may be one that no update uses
    messages: list[str] = []
    for exclusion in EXCLUSIONS:
        for variant in configs:
            if not exclusion.applies(variant):
                continue
            message = exclusion.message(variant)
            if message not in messages:  # all optimizers may break one rule
                messages.append(message)
    return messages


def require_several_ranks(config: Config, world_size: int, setting: str) -> None:
    """Raise UserError for FSDP on a single rank, which would be a single device. Call where the number is known.

    Args:
        config: the configuration.
        world_size: the number of ranks.
        setting: what has determined it, for the message.
    """
    if config.parallel.strategy == "fsdp" and world_size == 1:
        raise UserError(
            f"parallel=fsdp with {setting}: a single rank cannot share the model, so nothing would be "
            "sharded, and settings of parallel.fsdp would have no effect; start more ranks, or use parallel=single "
            "(without torchrun or srun), where optimizer.offload=true or activation_checkpointing=auto saves memory "
            "on a GPU"
        )


def require_best(config: Config, setting: str) -> None:
    """Raise UserError if this setting, which compares evaluations, is set where none is the best."""
    if not config.has_best:
        raise UserError(f"{setting} with objective=auto: {NO_BEST}; {SET_OBJECTIVE}")


def _with_value(name: str, value: Any) -> str:
    """Return a setting as the user writes it, with its value unless that is long."""
    setting = name.replace(".target", "._target_")
    is_long = isinstance(value, list | dict) and value
    if is_long:
        return setting
    return f"{setting}={as_yaml(value)}"


def value_of(config: Config, name: str) -> Any:
    """Return the value of a setting or a class's argument with a dotted name; None for an argument that is not set."""
    value: Any = config
    path = OF_GROUP.get(name, name)
    for part in path.split("."):
        if hasattr(value, part):
            value = getattr(value, part)
        else:
            value = value.arguments.get(part)
    return value


# Tests of settings' values


def one_of(*values: Any) -> Callable[[Any], bool]:
    """Return a test whether a setting has one of these values."""
    return lambda value: value in values


def other_than(*values: Any) -> Callable[[Any], bool]:
    """Return a test whether a setting has none of these values."""
    return lambda value: value not in values


def any_value(value: Any) -> bool:
    """Return True: the setting is in the message, but does not decide whether the exclusion applies."""
    return True


def _share_a_name(updates: list[Any]) -> bool:
    names = {update.name for update in updates}
    return len(names) < len(updates)


def _begin_with_a_rare_one(updates: list[Any]) -> bool:
    return bool(updates) and updates[0].every > 1


def _set_a_rate(groups: list[dict[str, Any]]) -> bool:
    return any("lr" in group for group in groups)


def _needs_checkpoint(mode: str) -> bool:
    return ACTIVITIES[mode].needs_checkpoint


def _is_one_process(mode: str) -> bool:
    return ACTIVITIES[mode].is_one_process


def _lack_a_token(prompts: list[Any]) -> bool:
    return not prompts or not all(prompts)


# Tests of configurations


def _no_update_has_the_groups(config: Config) -> bool:
    """Return whether `optimizer.groups` were set for the common optimizer, which no update uses then."""
    return all(update.optimizer.groups != config.optimizer.groups for update in config.updates)


def _schedules_name_no_updates(config: Config) -> bool:
    """Return whether `batch.micro_schedule` is for updates that do not exist, or for one while there are several."""
    names = {update.name for update in config.updates} or {""}
    return not config.batch.schedules.keys() <= names


def _lacks_best(config: Config) -> bool:
    return config.activity.trains and not config.has_best


def _task_chooses_an_output(config: Config) -> bool:
    return "output" in config.task_arguments or any("output" in update.task_arguments for update in config.updates)


EXCLUSIONS = (
    # The length of a run and its batches
    Exclusion(
        {"train.max_steps": None, "train.max_epochs": None, "mode": "train"},
        "the run would never end",
        "set train.max_steps or train.max_epochs",
    ),
    Exclusion(
        {"accumulation.steps": other_than("auto"), "batch.micro_size": other_than("auto")},
        "both fix the micro-batch",
        "set one of them to auto",
    ),
    Exclusion(
        {"train.detect_anomaly": True, "precision": "fp16", "precision.initial_scale": lambda scale: scale > 1},
        "gradients overflow until its loss scale has settled, and the detection would stop at the first overflow",
        "use precision=bf16, or precision.initial_scale=1",
    ),
    # Several optimizers
    Exclusion(
        {"updates": _share_a_name},
        "two of them have the same name",
        "give each update a name of its own",
    ),
    Exclusion(
        {"optimizer.groups": bool, "updates": bool},
        "each of them has an optimizer of its own, so that none has these groups",
        "give groups in the optimizer of their update",
        when=_no_update_has_the_groups,
    ),
    Exclusion(
        {"updates": _begin_with_a_rare_one},
        "the first update must run in every step",
        "put one with every=1 first",
    ),
    Exclusion(
        {"batch.micro_schedule": other_than(None), "updates": any_value},
        "with updates it needs sizes for each update's name, and without updates no names",
        "write {NAME: {1: 64, 30: 32}} with updates, otherwise {1: 64, 30: 32}",
        when=_schedules_name_no_updates,
    ),
    Exclusion(
        {"optimizer.in_backward": True, "updates": bool},
        "the backward of one update passes through parameters of others, which it must not change",
        "use in_backward=false",
    ),
    Exclusion(
        {"stopping.patience": other_than(None), "stopping.metric": "auto", "objective": "auto"},
        NO_BEST,
        "set stopping.metric or objective, such as stopping.metric='min loss'",
        when=_lacks_best,
    ),
    # Techniques that save memory
    Exclusion(
        {"memory.offload_activations": other_than("none"), "train.compile": True},
        "a compiled graph saves its tensors itself",
        "use train.compile=false, or leave the setting out",
    ),
    Exclusion(
        {"memory.offload_activations": "inputs", "activation_checkpointing": "none"},
        "it moves the inputs of checkpointed blocks, and no block is checkpointed",
        "use activation_checkpointing=full, or memory.offload_activations=all",
    ),
    Exclusion(
        {"memory.offload_activations": "all", "parallel": "fsdp"},
        "parameters gathered by FSDP would also be moved if autocast casts them",
        "use memory.offload_activations=inputs with activation_checkpointing=full",
    ),
    Exclusion(
        {"memory.loss_chunk": other_than(None), "metrics": bool},
        "metrics get logits, which a loss in chunks never has as a whole",
        "use memory.loss_chunk=null, or no metrics",
    ),
    Exclusion(
        {"memory.loss_chunk": other_than(None)},
        "the loss in chunks replaces the model's last layer, and cannot read the part that task.output chooses",
        "use memory.loss_chunk=null, or a model that returns the logits alone, without task.output",
        when=_task_chooses_an_output,
    ),
    Exclusion(
        {"precision": "bf16_pure", "train.ema": other_than(None)},
        "an average in bf16 would not move, as its changes are smaller than its last bit",
        "use train.ema=null, or precision=bf16",
    ),
    *(
        Exclusion(
            {"optimizer.in_backward": True, name: value},
            "each parameter is updated during the backward, as soon as its own gradient is complete",
            f"use {remedy}",
        )
        for name, value, remedy in (
            ("train.grad_clip", other_than(None), "train.grad_clip=null"),
            ("train.nonfinite", "skip", "train.nonfinite=stop"),
            ("train.compile", True, "train.compile=false"),
            ("precision", "fp16", "precision=bf16"),
            ("parallel", other_than("single"), "parallel=single"),
            ("optimizer.offload", True, "optimizer.offload=false"),
        )
    ),
    Exclusion(
        {"optimizer.offload": True, "parallel": "fsdp"},
        "FSDP keeps its shards on the host itself",
        "use parallel.fsdp.cpu_offload=true",
    ),
    Exclusion(
        {"optimizer.state_dtype": one_of("8bit", "4bit"), "parallel": "fsdp"},
        "the state belongs to blocks of values, and each rank has only a part of a block",
        "use optimizer=adamw_bf16, or parallel=ddp",
    ),
    Exclusion(  # torch 2.13 has no rule for some of its sums on shards
        {"optimizer.target": "torch.optim.Adafactor", "parallel": "fsdp"},
        "its state belongs to whole matrices, and each rank has only a part of each",
        "use optimizer=adamw_bf16, or parallel=ddp",
    ),
    *(
        Exclusion({name: True, "parallel": other_than("fsdp")}, "it applies only to shards", "use parallel=fsdp")
        for name in ("parallel.fsdp.cpu_offload", "parallel.fsdp.meta_init")
    ),
    # Adapters
    Exclusion(
        {"adapter.base_dtype": "bf16", "precision": one_of("fp32", "tf32", "fp16")},
        "matmuls with a base in bf16 are in bf16",
        "use precision=bf16",
    ),
    Exclusion(
        {"adapter": other_than("none"), "parallel.fsdp.meta_init": True},
        "the adapters' base would be initialised shard by shard, instead of loaded",
        "use parallel.fsdp.meta_init=false",
    ),
    Exclusion(
        {"model.target": "trainapp.models.huggingface.build", "model.path": bool, "parallel.fsdp.meta_init": True},
        "the weights would be initialised shard by shard, instead of loaded from model.path",
        "use parallel.fsdp.meta_init=false",
    ),
    # Checkpoints and the modes that are about one
    Exclusion(
        {"mode": _needs_checkpoint, "checkpointing.resume": one_of("auto", "none")},
        "it needs a trained model",
        "name the checkpoint or the run directory, as checkpointing.resume=RUN",
    ),
    Exclusion(
        {"mode": _is_one_process, "parallel": other_than("single")},
        "this mode is one process, which loads checkpoints of any number of ranks",
        "use parallel=single",
    ),
    Exclusion(
        {"mode": "predict", "parallel": "fsdp"},
        "each process loads the whole model, from checkpoints of any number of ranks",
        "use parallel=single or parallel=ddp",
    ),
    Exclusion(
        {"mode": "generate", "generate.prompts": _lack_a_token},
        "there is nothing to continue: a prompt has at least one token",
        "give texts, as in 'generate.prompts=[\"import \"]'",
    ),
    # mode=lr_find
    Exclusion(
        {"mode": "lr_find", "updates": bool},
        "the losses of several optimizers depend on each other's rates, so no curve shows which rate is good",
        "try rates by a sweep, such as -m optimizer.lr=1e-4,1e-3",
    ),
    Exclusion(
        {"mode": "lr_find", "checkpointing.resume": other_than("auto", "none")},
        "it starts from initial weights",
        "to start from trained ones, set model.init_from=RUN",
    ),
    Exclusion(
        {"mode": "lr_find", "optimizer.groups": _set_a_rate, "optimizer.lr": None},
        "the groups' rates keep their ratio to it",
        "set optimizer.lr",
    ),
)
