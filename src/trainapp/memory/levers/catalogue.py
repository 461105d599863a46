"""The one list of levers: every setting that trades something for memory.

The advice of a run that cannot continue, the refusals when a run is assembled, and the table of docs/memory.md read it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from trainapp.config import targets
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.memory.kinds import MemoryKind
from trainapp.memory.levers import chunked_loss
from trainapp.models.inspect import blocks_of, has_batchnorm


@dataclass(frozen=True)
class Situation:
    """What decides whether a lever applies: the configuration, the model that is built from it, and whether its loss
    is one of the application's own.
    """

    config: Config
    model: nn.Module
    knows_loss: bool


def _anywhere(situation: Situation) -> None:
    """No condition."""


@dataclass(frozen=True)
class Lever:
    """A setting that trades something for memory.

    setting: as on the command line; `=N` and `=[NAMES]` stand for values that the user chooses.
    changes: the same, as dotted names of `Config` and their values; empty where the value is the user's.
    saves, costs, applies: for the table.
    in_force: whether a configuration has the lever; None: if it has the changes.
    require: raises UserError where the lever does not apply.
    is_default: whether it is in force unless the user changes it.
    state_saved: `(bytes by kind, config) -> bytes` that persist between steps; None: only a traced step tells.
    """

    setting: str
    saves: str
    costs: str
    applies: str = "always"
    changes: Mapping[str, Any] = field(default_factory=dict)
    require: Callable[[Situation], None] = _anywhere
    in_force: Callable[[Config], bool] | None = None
    is_default: bool = False
    state_saved: Callable[[Mapping[MemoryKind, int], Config], int] | None = None

    def is_set(self, config: Config) -> bool:
        """Whether the configuration has this lever's values."""
        if self.in_force is not None:
            return self.in_force(config)
        return bool(self.changes) and all(_value(config, name) == value for name, value in self.changes.items())

    def sections(self, config: Config) -> dict[str, Any]:
        """The sections of the configuration that the lever changes, for `dataclasses.replace`."""
        changed: dict[str, Any] = {}
        for name, value in self.changes.items():
            section, *path = name.split(".")
            changed[section] = _replaced(changed.get(section, getattr(config, section)), path, value)
        return changed

    def suits(self, situation: Situation) -> bool:
        """Whether the lever applies."""
        try:
            self.require(situation)
        except UserError:
            return False
        return True


def _value(config: Config, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _replaced(node: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    first, *rest = path
    return dataclasses.replace(node, **{first: _replaced(getattr(node, first), rest, value)})


def require_suited(situation: Situation) -> None:
    """Raises UserError for levers that the configuration sets and that do not apply, with all their messages."""
    errors = []
    for lever in LEVERS:
        if lever.is_set(situation.config) and not lever.is_default:
            try:
                lever.require(situation)
            except UserError as error:
                errors.append(str(error))
    if errors:
        raise UserError("\n".join(dict.fromkeys(errors)))


def available(situation: Situation) -> list[Lever]:
    """The levers that apply and are not in force."""
    own = situation.config
    return [lever for lever in LEVERS if lever.changes and not lever.is_set(own) and lever.suits(situation)]


def table() -> list[str]:
    """The rows of the table in docs/memory.md."""
    rows = ["| setting | saves | costs | applies |", "|---|---|---|---|"]
    return rows + [f"| `{lever.setting}` | {lever.saves} | {lever.costs} | {lever.applies} |" for lever in LEVERS]


# --- when a lever applies


def _needs_blocks(situation: Situation) -> None:
    mode = situation.config.activation_checkpointing.mode
    blocks_of(situation.model, "activation_checkpointing" if mode == "none" else f"activation_checkpointing={mode}")


def _needs_a_head(situation: Situation) -> None:
    if not situation.knows_loss:
        raise UserError(
            f"{chunked_loss.SETTING}={situation.config.memory.loss_chunk}: the task computes its own loss; call "
            "trainapp.tasks.linear_cross_entropy in it, or leave the setting out"
        )
    chunked_loss.require_head(situation.config, situation.model)


def _needs_rounding_by_chance(situation: Situation) -> None:
    config, setting = situation.config, "precision=bf16_pure"
    if has_batchnorm(situation.model):
        raise UserError(f"{setting}: BatchNorm needs its weights in fp32; use model.norm=group, or precision=bf16")
    if config.train.ema is not None:
        raise UserError(
            f"{setting} with train.ema={config.train.ema}: an average in bf16 would stand still, as its changes are "
            "smaller than its last bit; use train.ema=null, or precision=bf16"
        )
    if config.precision.mode == "bf16_pure":
        kind = targets.locate(config.optimizer.target, "optimizer._target_", config.user_packages)
        if not getattr(kind, "rounds_by_chance", False):
            raise UserError(
                f"{setting} with {config.optimizer.target}: updates smaller than half of the last bit of a bf16 weight "
                "(1/512 of it) would be lost; use optimizer=adamw_bf16, which rounds by chance, or precision=bf16"
            )


def _needs_shards(situation: Situation) -> None:
    strategy = situation.config.parallel.strategy
    if strategy != "fsdp":
        raise UserError(
            f"parallel.fsdp.cpu_offload=true: only shards are kept on the host, but parallel.strategy={strategy}; use "
            "parallel=fsdp, or leave it out"
        )


# --- what a lever saves of what persists between steps


def _optimizer_state(static: Mapping[MemoryKind, int], config: Config) -> int:
    return static[MemoryKind.OPTIMIZER_STATE]


def _one_moment_of_two(static: Mapping[MemoryKind, int], config: Config) -> int:
    return static[MemoryKind.OPTIMIZER_STATE] // 2 if "Adam" in config.optimizer.target else 0


def _half_of_adams_state(static: Mapping[MemoryKind, int], config: Config) -> int:
    is_adam = config.optimizer.target in ("torch.optim.Adam", "torch.optim.AdamW")
    return static[MemoryKind.OPTIMIZER_STATE] // 2 if is_adam else 0


def _weight_average(static: Mapping[MemoryKind, int], config: Config) -> int:
    return static[MemoryKind.WEIGHT_AVERAGE]


_ADAMW_BF16 = {
    "optimizer.target": "trainapp.optim.low_precision.AdamW",
    "optimizer.arguments": {"betas": [0.9, 0.999], "eps": 1e-8, "state_dtype": "bf16"},
}

LEVERS = (
    Lever(
        "batch.micro_size=N",
        saves="activations, in proportion",
        costs="a little time; BatchNorm's statistics are those of N samples",
        applies="always: `auto` halves it when memory runs out",
    ),
    Lever(
        "batch.eval_micro_size=N",
        saves="the evaluation's activations",
        costs="a little time",
        applies="always: `auto` halves it when memory runs out",
    ),
    Lever(
        "precision=bf16",
        saves="up to half of the activations",
        costs="8 bits of precision in matrix products; saves time where the device computes in bf16",
        applies="where the device computes in bf16",
        changes={"precision.mode": "bf16"},
    ),
    Lever(
        "precision=bf16_pure optimizer=adamw_bf16",
        saves="half of parameters, gradients and AdamW's state, and as many activations as `bf16`",
        costs="8 bits of precision in weights and in sums of gradients; a slower optimizer step",
        applies="models without BatchNorm; without `train.ema`; optimizers that round by chance",
        changes={"precision.mode": "bf16_pure", **_ADAMW_BF16},
        in_force=lambda config: config.precision.mode == "bf16_pure",
        require=_needs_rounding_by_chance,
    ),
    Lever(
        "activation_checkpointing=full",
        saves="all activations of the blocks but their inputs",
        costs="a second forward of the blocks: about a third more time",
        applies="models with `blocks()`",
        changes={"activation_checkpointing.mode": "full"},
        require=_needs_blocks,
    ),
    Lever(
        "activation_checkpointing=selective",
        saves="activations that are cheap to recompute",
        costs="a few percent of time",
        applies="models with `blocks()`",
        changes={"activation_checkpointing.mode": "selective"},
        require=_needs_blocks,
    ),
    Lever(
        "memory.loss_chunk=auto",
        saves="all logits but those of a chunk, and their gradients",
        costs="one more product with the last layer's weight",
        applies="`task=next_token` and `classification`, models with `features()` and an nn.Linear `head`",
        changes={"memory.loss_chunk": "auto"},
        in_force=lambda config: config.memory.loss_chunk is not None,
        require=_needs_a_head,
    ),
    Lever(
        "optimizer=sgd",
        saves="one of AdamW's two moments",
        costs="another optimizer: needs a learning rate of its own",
        changes={
            "optimizer.target": "torch.optim.SGD",
            "optimizer.arguments": {"momentum": 0.9, "nesterov": True},
        },
        state_saved=_one_moment_of_two,
    ),
    Lever(
        "optimizer=sgd optimizer.momentum=0 optimizer.nesterov=false",
        saves="all optimizer state",
        costs="another optimizer: needs a learning rate of its own",
        changes={
            "optimizer.target": "torch.optim.SGD",
            "optimizer.arguments": {"momentum": 0, "nesterov": False},
        },
        state_saved=_optimizer_state,
    ),
    Lever(
        "optimizer=adamw_bf16",
        saves="half of AdamW's state",
        costs="8 bits of precision in the state, rounded by chance; a slower optimizer step, without a fused kernel",
        changes=_ADAMW_BF16,
        state_saved=_half_of_adams_state,
    ),
    Lever(
        "optimizer=adafactor",
        saves="nearly all optimizer state of matrices",
        costs="another optimizer; reads two numbers per parameter from the device in every step",
        changes={
            "optimizer.target": "torch.optim.Adafactor",
            "optimizer.arguments": {"beta2_decay": -0.8, "d": 1.0},
        },
    ),
    Lever(
        "optimizer=muon",
        saves="one of AdamW's two moments, for the matrices of hidden layers",
        costs="another optimizer; some matrix products per matrix in every step",
        applies="models with hidden matrices",
        changes={
            "optimizer.target": "trainapp.optim.muon.Muon",
            "optimizer.arguments": {
                "momentum": 0.95,
                "nesterov": True,
                "ns_steps": 5,
                "adjust_lr_fn": "match_rms_adamw",
                "betas": [0.9, 0.999],
                "eps": 1e-8,
            },
        },
    ),
    Lever(
        "optimizer.fused=auto",
        saves="a copy of the parameters in the optimizer's step",
        costs="nothing",
        applies="by default, for optimizers that have a fused kernel",
        changes={"optimizer.fused": "auto"},
        is_default=True,
    ),
    Lever(
        "train.ema=null",
        saves="a copy of the weights",
        costs="evaluation of the average of the weights",
        applies="by default",
        changes={"train.ema": None},
        is_default=True,
        state_saved=_weight_average,
    ),
    Lever(
        "model.freeze=[NAMES]",
        saves="gradients and optimizer state of these parameters, activations before the first one that is trained",
        costs="they are not trained",
        applies="always, unless nothing is left to train",
    ),
    Lever(
        "model.context_length=N",
        saves="activations, in proportion or more",
        costs="shorter texts: another model",
        applies="`model=gpt`",
    ),
    Lever(
        "parallel=fsdp",
        saves="parameters, gradients and optimizer state, divided by the number of ranks",
        costs="traffic: parameters are gathered in every forward and backward",
        applies="several ranks, models with `blocks()`",
        changes={"parallel.strategy": "fsdp"},
    ),
    Lever(
        "parallel.fsdp.reshard_after_forward=true",
        saves="the gathered parameters of all blocks but one between forward and backward",
        costs="gathering them again in backward",
        applies="`parallel=fsdp`, by default",
        changes={"parallel.fsdp.reshard_after_forward": True},
        is_default=True,
    ),
    Lever(
        "parallel.fsdp.sync_every_micro_batch=true",
        saves="unsharded gradients between micro-batches",
        costs="a reduction per micro-batch instead of one per step",
        applies="`parallel=fsdp`, by default",
        changes={"parallel.fsdp.sync_every_micro_batch": True},
        is_default=True,
    ),
    Lever(
        "parallel.fsdp.cpu_offload=true",
        saves="the device's part of parameters, gradients and optimizer state",
        costs="copies between host and device, and the optimizer's step on the host",
        applies="`parallel=fsdp`",
        changes={"parallel.fsdp.cpu_offload": True},
        require=_needs_shards,
    ),
    Lever(
        "memory.expandable_segments=true",
        saves="fragmentation: reserved memory that cannot be used",
        costs="nothing",
        applies="CUDA, by default",
        changes={"memory.expandable_segments": True},
        is_default=True,
    ),
    Lever(
        "checkpointing.asynchronous=false",
        saves="a copy of the state in host memory",
        costs="training waits while a checkpoint is written",
        applies="by default",
        changes={"checkpointing.asynchronous": False},
        is_default=True,
    ),
)
