"""Settings that exclude each other: one table, which needs only the configuration. Imports no torch.

Rules that need the built model, the data or the machine are checked where those exist.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from trainapp.config.schema import ABOUT_A_RUN, Config, Optimizer
from trainapp.config.targets import as_yaml

# Settings that users set by choosing a group's option.
OF_GROUP = {
    "activation_checkpointing": "activation_checkpointing.mode",
    "adapter": "adapter.kind",
    "parallel": "parallel.strategy",
    "precision": "precision.mode",
}


class Exclusion(NamedTuple):
    """Settings that conflict if `when` is true of the configuration.

    settings: names for the message, which adds their values; a text that is not a setting is used as is. The message
    is `a.b=1 with c=2: reason; remedy`.
    """

    settings: tuple[str, ...]
    when: Callable[[Config], bool]
    reason: str
    remedy: str


def conflicts(config: Config) -> list[str]:
    """The message of each row that applies."""
    return [message(row, config) for row in EXCLUSIONS if row.when(config)]


def message(row: Exclusion, config: Config) -> str:
    """The message of a row."""
    shown = " with ".join(_with_value(name, config) for name in row.settings)
    return f"{shown}: {row.reason}; {row.remedy}"


def _with_value(name: str, config: Config) -> str:
    if "=" in name:
        return name
    value = value_of(config, OF_GROUP.get(name, name))
    return name if isinstance(value, list | dict) and value else f"{name}={as_yaml(value)}"


def value_of(config: Config, name: str) -> Any:
    """The value of a setting with a dotted name."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _misses_updates(config: Config) -> bool:
    """Whether `batch.micro_schedule` has other names than the updates, or names without updates."""
    names = {update.name for update in config.updates} or {""}
    return config.batch.micro_schedule is not None and not config.batch.schedules.keys() <= names


_HUGGING_FACE = "trainapp.models.huggingface.build"


def _is_not_in_backward(config: Config) -> bool:
    """Whether a setting acts between the backward and the update of a parameter."""
    train = config.train
    return (
        train.grad_clip is not None
        or train.nonfinite == "skip"
        or train.compile
        or config.precision.mode == "fp16"
        or config.parallel.strategy != "single"
        or config.optimizer.offload
    )


def _is_with_fsdp(config: Config, is_own: Callable[[Optimizer], bool]) -> bool:
    """Whether FSDP is used with an optimizer for which `is_own` holds."""
    return config.parallel.strategy == "fsdp" and any(map(is_own, config.optimizers.values()))


EXCLUSIONS = (
    # The length of a run and its batches
    Exclusion(
        ("train.max_steps", "train.max_epochs"),
        lambda c: c.mode == "train" and c.train.max_steps is None and c.train.max_epochs is None,
        "the run would never end",
        "set one of them",
    ),
    Exclusion(
        ("accumulation.steps", "batch.micro_size"),
        lambda c: c.accumulation.steps != "auto" and c.batch.micro_size != "auto",
        "both fix the micro-batch",
        "set one of them to auto",
    ),
    Exclusion(
        ("train.detect_anomaly", "precision"),
        lambda c: c.train.detect_anomaly and c.precision.mode == "fp16" and c.precision.initial_scale > 1,
        "gradients overflow until its loss scale has settled, and the detection would stop at the first overflow",
        "use precision=bf16, or precision.initial_scale=1",
    ),
    Exclusion(
        ("stopping.patience", "every.eval"),
        lambda c: c.stopping.patience is not None and c.mode == "train" and c.every.eval is None,
        "it counts evaluations, and there are none",
        "set every.eval, or stopping.patience=null",
    ),
    # Several optimizers
    Exclusion(
        ("updates",),
        lambda c: len({update.name for update in c.updates}) < len(c.updates),
        "two of them have the same name",
        "give each update a name of its own",
    ),
    Exclusion(
        ("updates",),
        lambda c: bool(c.updates) and c.updates[0].every > 1,
        "the first update is made in every step",
        "put one with every=1 first",
    ),
    Exclusion(
        ("optimizer.groups", "updates"),
        lambda c: bool(c.updates) and bool(c.optimizer.groups),
        "its patterns would apply to the parameters of every update",
        "give them in the optimizer of their update (updates: [{name: ..., optimizer: {groups: ...}}])",
    ),
    Exclusion(
        ("batch.micro_schedule", "updates"),
        _misses_updates,
        "with updates it needs sizes for each update's name, and without updates no names",
        "write {NAME: {1: 64, 30: 32}} with updates, otherwise {1: 64, 30: 32}",
    ),
    Exclusion(
        ("optimizer.in_backward=true", "updates"),
        lambda c: bool(c.updates) and any(own.in_backward for own in (c.optimizer, *c.optimizers.values())),
        "the backward of one update passes through parameters of others, which it must not change",
        "use in_backward=false",
    ),
    # Techniques that save memory
    Exclusion(
        ("memory.offload_activations", "train.compile"),
        lambda c: c.memory.offload_activations != "none" and c.train.compile,
        "a compiled graph saves its tensors itself",
        "use train.compile=false, or leave the setting out",
    ),
    Exclusion(
        ("memory.offload_activations", "activation_checkpointing"),
        lambda c: c.memory.offload_activations == "inputs" and c.activation_checkpointing.mode == "none",
        "it moves the inputs of checkpointed blocks, and no block is checkpointed",
        "use activation_checkpointing=full, or memory.offload_activations=all",
    ),
    Exclusion(
        ("memory.offload_activations", "parallel"),
        lambda c: c.memory.offload_activations == "all" and c.parallel.strategy == "fsdp",
        "parameters gathered by FSDP would also be moved if autocast casts them",
        "use memory.offload_activations=inputs with activation_checkpointing=full",
    ),
    Exclusion(
        ("precision", "train.ema"),
        lambda c: c.precision.mode == "bf16_pure" and c.train.ema is not None,
        "an average in bf16 would not move, as its changes are smaller than its last bit",
        "use train.ema=null, or precision=bf16",
    ),
    Exclusion(
        ("optimizer.in_backward=true",),
        lambda c: c.optimizer.in_backward and _is_not_in_backward(c),
        "a parameter is updated during the backward, as soon as its gradient is complete, which rules out clipping, a "
        "loss scale, skipping steps, other ranks and the host",
        "use train.grad_clip=null, train.nonfinite=stop, train.compile=false, parallel=single, optimizer.offload=false "
        "and another precision than fp16",
    ),
    Exclusion(
        ("optimizer.offload=true", "parallel"),
        lambda c: _is_with_fsdp(c, lambda own: own.offload),
        "FSDP keeps its shards on the host itself",
        "use parallel.fsdp.cpu_offload=true",
    ),
    Exclusion(  # torch 2.13 has no rule for some of Adafactor's sums on shards
        ("optimizer=adamw_8bit, adamw_4bit or adafactor", "parallel"),
        lambda c: _is_with_fsdp(
            c,
            lambda own: own.arguments.get("state_dtype") in ("8bit", "4bit") or own.target == "torch.optim.Adafactor",
        ),
        "their state belongs to whole matrices or blocks of values, of which each rank has only a part",
        "use optimizer=adamw_bf16, or parallel=ddp",
    ),
    Exclusion(
        ("parallel.fsdp.cpu_offload", "parallel.fsdp.meta_init", "parallel"),
        lambda c: (c.parallel.fsdp.cpu_offload or c.parallel.fsdp.meta_init) and c.parallel.strategy != "fsdp",
        "both apply only to shards",
        "use parallel=fsdp, or leave them out",
    ),
    # Adapters
    Exclusion(
        ("adapter.base_dtype", "precision"),
        lambda c: c.adapter.base_dtype == "bf16" and c.precision.mode in ("fp32", "tf32", "fp16"),
        "matmuls with a base in bf16 are in bf16",
        "use precision=bf16",
    ),
    Exclusion(
        ("adapter", "model=hf", "parallel.fsdp.meta_init"),
        lambda c: (
            c.parallel.fsdp.meta_init
            and (c.adapter.kind != "none" or (c.model.target == _HUGGING_FACE and bool(c.model.arguments.get("path"))))
        ),
        "weights would be initialised shard by shard, replacing those of model.path or of an adapter's base",
        "use parallel.fsdp.meta_init=false",
    ),
    # Checkpoints and the modes that are about one
    Exclusion(
        ("mode", "checkpointing.resume"),
        lambda c: c.mode in ABOUT_A_RUN and c.checkpointing.resume in ("auto", "none"),
        "it needs a trained model",
        "name the checkpoint or the run directory, as checkpointing.resume=RUN",
    ),
    Exclusion(
        ("mode", "parallel"),
        lambda c: (
            c.mode in ("export", "generate", "lr_find", "predict")
            and c.parallel.strategy not in ("single", "ddp" if c.mode == "predict" else "single")
        ),
        "each process of this mode loads the whole model, from checkpoints of any number of ranks",
        "use parallel=single, or with mode=predict parallel=ddp",
    ),
    Exclusion(
        ("mode", "generate.prompts"),
        lambda c: c.mode == "generate" and not all([c.generate.prompts, *c.generate.prompts]),
        "there is nothing to continue: a prompt has at least one token",
        "give texts, as in 'generate.prompts=[\"import \"]'",
    ),
    # mode=lr_find
    Exclusion(
        ("mode", "updates"),
        lambda c: c.mode == "lr_find" and bool(c.updates),
        "the losses of several optimizers depend on each other's rates, so no curve shows which rate is good",
        "try rates by a sweep, such as -m optimizer.lr=1e-4,1e-3",
    ),
    Exclusion(
        ("mode", "checkpointing.resume"),
        lambda c: c.mode == "lr_find" and c.checkpointing.resume not in ("auto", "none"),
        "it starts from initial weights",
        "to start from trained ones, set model.init_from=RUN",
    ),
    Exclusion(
        ("mode", "optimizer.groups", "optimizer.lr"),
        lambda c: c.mode == "lr_find" and c.optimizer.lr is None and any("lr" in own for own in c.optimizer.groups),
        "the groups' rates keep their ratio to it",
        "set optimizer.lr",
    ),
)
