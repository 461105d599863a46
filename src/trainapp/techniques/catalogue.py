"""The catalogue of techniques: every setting that trades time, precision or results for memory.

Read by the advice of a run that cannot continue, by plans, and by checks when a run is assembled. docs/memory.md has
the table, with where each applies. Pairs of settings that exclude each other are in `config.excludes`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import yaml
from omegaconf import OmegaConf
from torch import nn

from trainapp.config import excludes, targets
from trainapp.config.schema import Config, Optimizer
from trainapp.errors import UserError
from trainapp.files import CONF
from trainapp.memory.live_tensors import Category
from trainapp.models.adapters import linear_layers
from trainapp.models.inspect import batchnorms, blocks_of, instead_of_batchnorm
from trainapp.techniques import chunked_loss, savings
from trainapp.techniques.savings import Savings, Shortage, optimizer_state_size

SGD = "torch.optim.SGD"
ADAMW = "torch.optim.AdamW"
ADAMW_IN_FEWER_BITS = "trainapp.optim.low_precision.AdamW"
RESULTS = ("same", "rounded", "other")  # effect on the training, least change first: see `Technique`
# Categories of memory, see `Technique.relieves`.
_ACTIVATIONS = frozenset({Category.ACTIVATIONS})
_GRADIENTS = frozenset({Category.GRADIENTS})
_OPTIMIZER_STATE = frozenset({Category.OPTIMIZER_STATE})
_PARAMETERS = frozenset({Category.PARAMETERS})
_WEIGHTS_AND_STATE = _PARAMETERS | _GRADIENTS | _OPTIMIZER_STATE
# Settings of an optimizer that are not in here are arguments of its class.
_OPTIMIZER_FIELDS = {field.name for field in dataclasses.fields(Optimizer)}


@dataclass(frozen=True)
class Situation:
    """The facts that decide whether a technique applies.

    Attributes:
        config: the configuration.
        model: the model built from it.
        knows_loss: whether its loss is built in.
    """

    config: Config
    model: nn.Module
    knows_loss: bool


@dataclass(frozen=True)
class Technique:
    """A setting that saves memory at a price.

    Attributes:
        setting: as on the command line.
        saves: what it saves, for users.
        costs: its price, for users.
        relieves: the categories of memory that it makes smaller in a step.
        share: how much of these categories it saves at most, from 0 to 1.
        estimate: returns the bytes that it saves at most, if these are not a fixed share: see `savings`.
        needs: raises UserError for a model to which it cannot be applied. For settings: `config.excludes`.
        helps: whether it has an effect for a configuration without it; only then is it offered.
        in_force: whether a configuration has its effect; by default, if it has the first of the changes.
        is_planned: whether a plan tries it. A plan's variants have the adapters of the configuration.
        is_for_backward: whether it concerns only what a forward keeps for the backward, and thus no evaluation.
        result: effect on the training's result: "same" (except for the order of additions), "rounded" (the same
            algorithm at lower precision), "other": another optimizer, model or task, proposed only if nothing else
            fits.
    """

    setting: str
    saves: str
    costs: str
    relieves: frozenset[Category]
    share: float = 1.0
    estimate: Callable[[Config, Config, nn.Module, Shortage], Savings] | None = None
    needs: Callable[[Situation], None] = lambda situation: None
    helps: Callable[[Situation], bool] = lambda situation: True
    in_force: Callable[[Config], bool] | None = None
    is_planned: bool = True
    is_for_backward: bool = False
    result: Literal["same", "rounded", "other"] = "other"

    @functools.cached_property
    def changes(self) -> dict[str, Any]:
        """The effect of the setting: values by dotted names of `Config`."""
        changes: dict[str, Any] = {}
        for override in self.setting.split():
            name, text = override.split("=")
            value = yaml.safe_load(text)

            # A group of the optimizer, an argument of its class, or a setting, perhaps by the name of its group.
            option = name.removeprefix("optimizer.")
            if name == "optimizer":
                changes |= _changes_by_optimizer(value)
            elif option != name and option not in _OPTIMIZER_FIELDS:
                changes["optimizer.arguments"][option] = value
            else:
                changes[excludes.OF_GROUP.get(name, name)] = value
        return changes

    def is_set(self, config: Config) -> bool:
        """Return whether the configuration has this technique, or its effect."""
        if self.in_force is not None:
            return self.in_force(config)
        name, value = next(iter(self.changes.items()))
        return bool(excludes.value_of(config, name) == value)

    def savings(self, situation: Situation, shortage: Shortage) -> Savings:
        """Return how many bytes it saves at most of what filled memory, by category; negative where it needs more."""
        if self.is_for_backward and shortage.in_evaluation:
            return {}
        if self.estimate is None:
            return {category: self.share * shortage.of(category) for category in self.relieves}
        changed_config = with_techniques(situation.config, [self])
        return self.estimate(situation.config, changed_config, situation.model, shortage)

    def suits(self, situation: Situation) -> bool:
        """Return whether to offer the technique for a configuration that lacks it."""
        # With several optimizers, it would not change those with their own settings.
        config = situation.config
        changes_optimizer = any(name.startswith("optimizer.") for name in self.changes)
        if config.updates and changes_optimizer:
            return False
        # Beside an `optimizer._target_`, also of torch, an option has no effect but settings that the class may lack.
        if "optimizer.target" in self.changes and config.optimizer.target not in _targets_of_options():
            return False
        if not self.helps(situation):
            return False
        if self.relieves == _OPTIMIZER_STATE and not self._needs_less_state(config):
            return False

        # It must fit the other settings and the model.
        changed_config = with_techniques(config, [self])
        new_conflicts = set(excludes.conflicts(changed_config)) - set(excludes.conflicts(config))
        if new_conflicts:
            return False
        try:
            self.needs(dataclasses.replace(situation, config=changed_config))
        except UserError:
            return False
        return True

    def _needs_less_state(self, config: Config) -> bool:
        """Return whether the optimizer's state is smaller than the configuration's, as far as both are known."""
        state = optimizer_state_size(config)
        changed_state = optimizer_state_size(with_techniques(config, [self]))
        has_same_optimizer = "optimizer.target" not in self.changes
        return has_same_optimizer or state is None or changed_state is None or changed_state < state


@functools.cache
def _targets_of_options() -> frozenset[str]:
    """Return the classes of the optimizers that are options."""
    targets = set()
    for file in (CONF / "optimizer").glob("*.yaml"):
        option: Any = OmegaConf.load(file)
        targets.add(option["_target_"])
    return frozenset(targets)


def _changes_by_optimizer(option: str) -> dict[str, Any]:
    """Return the changes of `optimizer=option` that affect memory."""
    file = CONF / "optimizer" / f"{option}.yaml"
    values: Any = OmegaConf.to_container(OmegaConf.load(file))
    for name in ("lr", "weight_decay", "fused"):
        values.pop(name, None)
    target = values.pop("_target_")
    return {"optimizer.target": target, "optimizer.arguments": values}


def with_techniques(config: Config, techniques: Iterable[Technique]) -> Config:
    """Return the configuration with the techniques' changes."""
    for technique in techniques:
        for name, value in technique.changes.items():
            config = _with_value(config, name.split("."), value)
    return config


def _with_value(settings: Any, path: list[str], value: Any) -> Any:
    """Return a copy of the settings, a dataclass, with another value at the path."""
    if not path:
        return value
    name, *path_below = path
    new_child = _with_value(getattr(settings, name), path_below, value)
    return dataclasses.replace(settings, **{name: new_child})


def overrides_of(techniques: Iterable[Technique]) -> list[str]:
    """Return the overrides that set these techniques. If two set the same setting, the later one's."""
    override_by_name = {}
    for technique in techniques:
        for override in technique.setting.split():
            name = override.partition("=")[0]
            override_by_name[name] = override
    return list(override_by_name.values())


def require_suited(situation: Situation) -> None:
    """Raise UserError, with all messages, for techniques that are set but not supported by the model."""
    messages = []
    for technique in TECHNIQUES:
        if not technique.is_set(situation.config):
            continue
        try:
            technique.needs(situation)
        except UserError as error:
            messages.append(str(error))
    if messages:
        raise UserError("\n".join(dict.fromkeys(messages)))


def available(situation: Situation) -> list[Technique]:
    """Return the techniques that apply and are not in use."""
    config = situation.config
    techniques = []
    for technique in TECHNIQUES:
        if not technique.is_set(config) and technique.suits(situation):
            techniques.append(technique)

    # AdamW in fewer bits is the same algorithm only for AdamW.
    is_adamw = config.optimizer.target in (ADAMW, ADAMW_IN_FEWER_BITS)
    if is_adamw and not config.optimizer.arguments.get("amsgrad"):
        return techniques
    return [_with_other_result(technique) for technique in techniques]


def _with_other_result(technique: Technique) -> Technique:
    """Return the technique, with another result if it is an optimizer."""
    if "optimizer.target" not in technique.changes:
        return technique
    return dataclasses.replace(technique, result="other")


# --- requirements of techniques on the model: each function raises UserError if they are not met


def _require_blocks(situation: Situation) -> None:
    blocks_of(situation.model, f"activation_checkpointing={situation.config.activation_checkpointing.mode}")


def _require_head(situation: Situation) -> None:
    if not situation.knows_loss:
        raise UserError(
            f"{chunked_loss.SETTING}={situation.config.memory.loss_chunk}: the task computes its own loss; call "
            "trainapp.tasks.linear_cross_entropy in it, or omit the setting"
        )
    chunked_loss.require_head(situation.config, situation.model)


def _require_weights_in_bf16(situation: Situation) -> None:
    config = situation.config
    setting = "precision=bf16_pure"
    if batchnorms(situation.model):
        remedy = instead_of_batchnorm(config.model)
        raise UserError(f"{setting}: BatchNorm needs its weights in fp32; use precision=bf16, or {remedy}")
    kind = targets.locate(config.optimizer.target, "optimizer._target_", config.user_packages)
    if not getattr(kind, "rounds_by_chance", False):
        raise UserError(
            f"{setting} with {config.optimizer.target}: updates smaller than half of the last bit of a bf16 weight "
            "(1/512 of it) would be lost; use optimizer=adamw_bf16, which rounds stochastically, or precision=bf16"
        )


def _require_linear_layers(situation: Situation) -> None:
    if situation.config.adapter.targets == "auto":
        linear_layers(situation.model)


def _require_init_weights(situation: Situation) -> None:
    if not callable(getattr(situation.model, "init_weights", None)):
        raise UserError(
            f"parallel.fsdp.meta_init=true: {type(situation.model).__name__} has no method `init_weights()` that draws "
            "its parameters and fills its buffers; add one, or use meta_init=false"
        )


# --- whether techniques have an effect, or it is in force


def _computes_in_16_bits(config: Config) -> bool:
    return config.precision.mode not in savings.MODES_IN_FP32


def _checkpoints_all_blocks(*modes: str) -> Callable[[Config], bool]:
    """Return a test whether every block of a configuration is checkpointed in one of these modes."""

    def is_in_force(config: Config) -> bool:
        settings = config.activation_checkpointing
        block_modes = settings.modes if settings.modes is not None else [settings.mode]
        return all(mode in modes for mode in block_modes)

    return is_in_force


def _chooses_modes(config: Config) -> bool:
    """Return whether the blocks' modes are chosen by the limit, or there is nothing left to choose."""
    return config.activation_checkpointing.mode == "auto" or _checkpoints_all_blocks("full")(config)


def _has_fp32_base(situation: Situation) -> bool:
    """Return whether an adapter's base is in fp32."""
    return situation.config.adapter.kind != "none" and savings.fp32_base_bytes(situation.model) > 0


def _has_fp32_base_and_matmuls(situation: Situation) -> bool:
    """Return whether an adapter's base is in fp32, and matmuls with it are."""
    excludes_bf16_base = situation.config.precision.mode in ("fp32", "tf32", "fp16")
    return excludes_bf16_base and _has_fp32_base(situation) and _computes_in_bf16(situation)


def _is_on_a_gpu(situation: Situation) -> bool:
    """Return whether parameters are on a GPU. Offloading may be set on the CPU, but moves nothing."""
    return any(p.device.type == "cuda" for p in situation.model.parameters())


def _computes_in_bf16(situation: Situation) -> bool:
    """Return whether the device computes in bf16; GPUs before Ampere only emulate it."""
    if not _is_on_a_gpu(situation):  # a plan's times show what it costs on a CPU
        return True
    if not torch.cuda.is_available():  # the GPU is a simulated one
        return True
    return torch.cuda.is_bf16_supported(including_emulation=False)


def _trains_weights_in_bf16(situation: Situation) -> bool:
    """Return whether bf16 weights are worth it: beside adapters, whose updates are small, only the base should be."""
    return situation.config.adapter.kind == "none" and _computes_in_bf16(situation)


def _has_ranks_and_blocks(situation: Situation) -> bool:
    """Return whether there are several ranks, or GPUs for them, and blocks that FSDP can gather one by one."""
    try:
        blocks_of(situation.model, "parallel=fsdp")
    except UserError:
        return False
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return True
    return _is_on_a_gpu(situation) and torch.cuda.device_count() > 1


# --- the list


def _adamw_in_fewer_bits(state_dtype: str, share: str, bits: str) -> Technique:
    return Technique(
        f"optimizer=adamw_{state_dtype}",
        saves=f"{share} of AdamW's state",
        costs=f"{bits} in the state, rounded stochastically; a slower optimizer step, except by its kernel on CUDA",
        relieves=_OPTIMIZER_STATE,
        estimate=savings.by_other_optimizer,
        in_force=lambda config: config.optimizer.arguments.get("state_dtype") == state_dtype,
        result="rounded",
    )


def _bf16_base(
    setting: str, saves: str, relieves: frozenset[Category], helps: Callable[[Situation], bool]
) -> Technique:
    return Technique(
        setting,
        saves=saves,
        costs="the base and matmuls with it keep only 8 bits of precision; checkpoints with a base in fp32 do not fit",
        relieves=relieves,
        estimate=savings.by_bf16_base,
        is_planned=False,
        helps=helps,
        result="rounded",
    )


TECHNIQUES = (
    Technique(
        "precision=bf16",
        saves="up to half of the activations, less a copy of the weights in bf16",
        costs="matmuls keep only 8 bits of precision; saves time where the device computes in bf16",
        relieves=_ACTIVATIONS,
        estimate=savings.by_16_bits,
        in_force=_computes_in_16_bits,
        helps=_computes_in_bf16,
        result="rounded",
    ),
    Technique(
        "precision=bf16_pure optimizer=adamw_bf16",
        saves="half of parameters, gradients and AdamW's state, and as many activations as `bf16`",
        costs="weights and gradient sums keep only 8 bits of precision; a slower optimizer step",
        relieves=_WEIGHTS_AND_STATE | _ACTIVATIONS,
        estimate=savings.by_bf16_weights,
        needs=_require_weights_in_bf16,
        helps=_trains_weights_in_bf16,
        result="rounded",
    ),
    Technique(
        "activation_checkpointing=full",
        saves="all activations of the blocks except their inputs",
        costs="a second forward of the blocks: about a third more time",
        relieves=_ACTIVATIONS,
        in_force=_checkpoints_all_blocks("full"),
        is_for_backward=True,
        needs=_require_blocks,
        result="same",
    ),
    Technique(
        "activation_checkpointing=selective",
        saves="activations that are cheap to recompute",
        costs="Python for each operation of the blocks: a tenth of a GPT's step, a third of a small ResNet's",
        relieves=_ACTIVATIONS,
        share=0.5,
        in_force=_checkpoints_all_blocks("selective", "full"),
        is_for_backward=True,
        needs=_require_blocks,
        result="same",
    ),
    Technique(
        "activation_checkpointing=auto",
        saves="as many activations as the limit requires: each block is `none`, `selective` or `full`",
        costs="from nothing, if all fits, to that of `full`; some seconds for three plans before the model is built",
        relieves=_ACTIVATIONS,
        in_force=_chooses_modes,
        is_for_backward=True,
        needs=_require_blocks,
        result="same",
    ),
    Technique(
        "memory.offload_activations=all",
        saves="all activations of 1 MiB and more, except those being copied",
        costs="host memory; time where copies take longer than computing",
        relieves=_ACTIVATIONS,
        is_for_backward=True,
        helps=_is_on_a_gpu,
        result="same",
    ),
    Technique(
        "memory.offload_activations=inputs activation_checkpointing=full",
        saves="all activations of the blocks",
        costs="a second forward of the blocks; host memory; little time for copies",
        relieves=_ACTIVATIONS,
        is_for_backward=True,
        needs=_require_blocks,
        helps=_is_on_a_gpu,
        result="same",
    ),
    Technique(
        "memory.loss_chunk=auto",
        saves="all logits except one chunk's, and their gradients",
        costs="one more matmul with the last layer's weight",
        relieves=_ACTIVATIONS,
        estimate=savings.by_chunks_of_logits,
        in_force=lambda config: config.memory.loss_chunk is not None,
        needs=_require_head,
        result="same",
    ),
    Technique(
        "optimizer=sgd",
        saves="one of AdamW's two moments",
        costs="another optimizer, which needs its own learning rate",
        relieves=_OPTIMIZER_STATE,
        estimate=savings.by_other_optimizer,
    ),
    Technique(
        "optimizer=sgd optimizer.momentum=0 optimizer.nesterov=false",
        saves="all optimizer state",
        costs="another optimizer, which needs its own learning rate",
        relieves=_OPTIMIZER_STATE,
        estimate=savings.by_other_optimizer,
        in_force=lambda config: config.optimizer.target == SGD and not config.optimizer.arguments.get("momentum"),
    ),
    _adamw_in_fewer_bits("bf16", "half", "only 8 bits of precision"),
    _adamw_in_fewer_bits("8bit", "three quarters", "8 bits and a scale per 256 values"),
    _adamw_in_fewer_bits("4bit", "six sevenths", "4 bits and a scale per 128 values"),
    Technique(
        "optimizer=adafactor",
        saves="nearly all optimizer state of matrices",
        costs="another optimizer; reads two numbers per parameter from the device in every step",
        relieves=_OPTIMIZER_STATE,
        estimate=savings.by_other_optimizer,
    ),
    Technique(
        "optimizer=muon",
        saves="one of AdamW's two moments, for the matrices of hidden layers",
        costs="another optimizer; some matmuls per matrix in every step",
        relieves=_OPTIMIZER_STATE,
        estimate=savings.by_other_optimizer,
    ),
    Technique(
        "optimizer.in_backward=true",
        saves="all gradients but one, if the step is one micro-batch",
        costs="an error in the last backward restarts from the checkpoint",
        relieves=_GRADIENTS,
        estimate=savings.by_update_in_backward,
        result="same",
    ),
    Technique(
        "optimizer.in_backward=true train.grad_clip=null",
        saves="all gradients but one, if the step is one micro-batch",
        costs="no clipping; an error in the last backward restarts from the checkpoint",
        relieves=_GRADIENTS,
        estimate=savings.by_update_in_backward,
        helps=lambda situation: situation.config.train.grad_clip is not None,
    ),
    Technique(
        "optimizer.offload=true",
        saves="the device's part of the optimizer state, and all that the optimizer's step needs",
        costs="every step copies gradients and parameters to the host, updates there, and copies parameters back",
        relieves=_OPTIMIZER_STATE,
        helps=_is_on_a_gpu,
        result="same",
    ),
    Technique(
        "train.ema=null",
        saves="a copy of the weights",
        costs="evaluation of averaged weights",
        relieves=frozenset({Category.WEIGHT_AVERAGE}),
    ),
    Technique(
        "adapter=lora",
        saves="gradients and optimizer state of all but the adapters",
        costs="another result: small matrices beside linear layers are trained, and the model's own weights stay as "
        "they begin (set model.path or model.init_from to trained ones)",
        relieves=_GRADIENTS | _OPTIMIZER_STATE,
        estimate=savings.by_adapters,
        is_planned=False,
        in_force=lambda config: config.adapter.kind != "none",
        needs=_require_linear_layers,
    ),
    _bf16_base(
        "adapter.base_dtype=bf16",
        "half of the adapters' frozen base, and its copies in 16 bits",
        _PARAMETERS | _ACTIVATIONS,
        _has_fp32_base,
    ),
    _bf16_base(
        "adapter.base_dtype=bf16 precision=bf16",
        "half of the adapters' frozen base, and up to half of the activations",
        _PARAMETERS | _ACTIVATIONS,
        _has_fp32_base_and_matmuls,
    ),
    Technique(
        "parallel=fsdp",
        saves="parameters, gradients and optimizer state, divided by the number of ranks",
        costs="communication: parameters are gathered in every forward and backward",
        relieves=_WEIGHTS_AND_STATE,
        estimate=savings.by_shards,
        helps=_has_ranks_and_blocks,
        result="same",
    ),
    Technique(
        "parallel.fsdp.cpu_offload=true",
        saves="the device's part of parameters, gradients and optimizer state",
        costs="copies between host and device, and the optimizer's step on the host",
        relieves=_WEIGHTS_AND_STATE,
        result="same",
    ),
    Technique(
        "parallel.fsdp.meta_init=true",
        saves="the whole model on each device before it is sharded",
        costs="other initial weights from the same distribution",
        relieves=frozenset(),  # only before the first step
        needs=_require_init_weights,
    ),
)
# The settings and groups that techniques set, as on the command line: the first of each is the technique itself.
SETTINGS = frozenset(technique.setting.partition("=")[0] for technique in TECHNIQUES)
