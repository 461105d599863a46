"""The one list of levers: every setting that trades something for memory.

The advice of a run that cannot continue, the plan, the refusals when a run is assembled, and the table of
docs/memory.md read it.
"""

import dataclasses
import importlib.util
from collections.abc import Mapping

from trainapp.config.adamw import is_adamw
from trainapp.config.schema import Optimizer
from trainapp.errors import UserError
from trainapp.memory.kinds import MemoryKind
from trainapp.techniques.activations import ACTIVATIONS
from trainapp.techniques.conditions import (
    clips,
    computes_in_bf16,
    needs_a_head,
    needs_layers_for_adapters,
    needs_rounding_by_chance,
    needs_updates_in_place_of_clipping,
    needs_updates_one_by_one,
    needs_whole_parameters,
    trains_in_32_bits,
    trains_real_numbers,
)
from trainapp.techniques.lever import Lever, Situation
from trainapp.techniques.optimizer_state import (
    MUON,
    ON_HOST,
    adamw,
    half_of_adams_state,
    has_moments_in,
    one_moment_of_two,
    optimizer_state,
    quantized,
    step_of_adamw,
    weight_average,
)
from trainapp.techniques.products import PRODUCTS
from trainapp.techniques.shards import SHARDS


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


def available_levers(situation: Situation) -> list[Lever]:
    """The levers that apply and are not in force."""
    own = situation.config
    found = [lever for lever in LEVERS if lever.changes and not lever.is_set(own) and lever.suits(situation)]
    return [_instead_of(own.optimizer, lever) for lever in found]


def of_state(situation: Situation, static: Mapping[MemoryKind, int]) -> list[tuple[int | None, Lever]]:
    """The levers that save of `static`, the memory that persists between steps, and could be set: the largest saving
    first, None where it is not known.
    """
    own = situation.config
    lowered = [(lever.lowers(static, situation), lever) for lever in available_levers(situation)]
    known = [(saved, lever) for saved, lever in lowered if saved is not None and saved > 0]
    known.sort(key=lambda saving: -saving[0])
    others = [lever for lever in LEVERS if lever.shrinks_state and not lever.is_set(own) and lever.suits(situation)]
    return [*known, *((None, _with_extra(lever)) for lever in others)]


def table() -> list[str]:
    """The rows of the table in docs/memory.md."""
    rows = ["| setting | saves | costs | applies |", "|---|---|---|---|"]
    return rows + [f"| `{lever.setting}` | {lever.saves} | {lever.costs} | {lever.applies} |" for lever in LEVERS]


def _with_extra(lever: Lever) -> Lever:
    """With what is to be installed first, where it is missing."""
    lacks = lever.setting == "adapter=lora" and importlib.util.find_spec("peft") is None
    return dataclasses.replace(lever, costs=f"{lever.costs}; first, pip install 'trainapp[peft]'") if lacks else lever


def _instead_of(optimizer: Optimizer, lever: Lever) -> Lever:
    """AdamW in fewer bits is the same algorithm for AdamW alone."""
    is_same = "optimizer.target" not in lever.changes or is_adamw(optimizer)
    return lever if is_same else dataclasses.replace(lever, result="other")


_ADAMW_BF16 = adamw("bf16")

LEVERS = (
    Lever(
        "batch.micro_size=N",
        saves="activations, in proportion",
        costs="a little time; BatchNorm's statistics are those of N samples",
        applies="always: `auto` halves it when memory runs out",
        result="same",
    ),
    Lever(
        "batch.eval_micro_size=N",
        saves="the evaluation's activations",
        costs="a little time",
        applies="always: `auto` halves it when memory runs out",
        result="same",
    ),
    Lever(
        "precision=bf16",
        saves="up to half of the activations",
        costs="only 8 bits of precision remain in matrix products; saves time where the device computes in bf16",
        applies="where the device computes in bf16",
        changes={"precision.mode": "bf16"},
        helps=computes_in_bf16,
        result="rounded",
    ),
    Lever(
        "precision=bf16_pure optimizer=adamw_bf16",
        saves="half of parameters, gradients and AdamW's state, and as many activations as `bf16`",
        costs="only 8 bits of precision remain in weights and in sums of gradients; a slower optimizer step",
        applies="as above; models without BatchNorm; without `train.ema`; optimizers that round by chance",
        changes={"precision.mode": "bf16_pure", **_ADAMW_BF16},
        in_force=lambda config: config.precision.mode == "bf16_pure",
        require=needs_rounding_by_chance,
        helps=computes_in_bf16,
        result="rounded",
        shrinks_state=True,
    ),
    *PRODUCTS,
    *ACTIVATIONS,
    Lever(
        "memory.loss_chunk=auto",
        saves="all logits but those of a chunk, and their gradients",
        costs="one more product with the last layer's weight",
        applies="`task=next_token` and `classification`, models with `features()` and an nn.Linear `head`",
        changes={"memory.loss_chunk": "auto"},
        in_force=lambda config: config.memory.loss_chunk is not None,
        require=needs_a_head,
        result="same",
    ),
    Lever(
        "optimizer=sgd",
        saves="one of AdamW's two moments",
        costs="another optimizer: needs a learning rate of its own",
        changes={
            "optimizer.target": "torch.optim.SGD",
            "optimizer.arguments": {"momentum": 0.9, "nesterov": True},
        },
        in_force=lambda config: config.optimizer.target == "torch.optim.SGD",
        state_saved=one_moment_of_two,
    ),
    Lever(
        "optimizer=sgd optimizer.momentum=0 optimizer.nesterov=false",
        saves="all optimizer state",
        costs="another optimizer: needs a learning rate of its own",
        changes={
            "optimizer.target": "torch.optim.SGD",
            "optimizer.arguments": {"momentum": 0, "nesterov": False},
        },
        in_force=lambda config: (
            config.optimizer.target == "torch.optim.SGD" and not config.optimizer.arguments.get("momentum")
        ),
        state_saved=optimizer_state,
    ),
    Lever(
        "optimizer=adamw_bf16",
        saves="half of AdamW's state",
        costs="only 8 bits of precision remain in the state, rounded by chance; a slower optimizer step, without a "
        "fused kernel",
        changes=_ADAMW_BF16,
        in_force=has_moments_in("bf16"),
        helps=trains_in_32_bits,
        state_saved=half_of_adams_state,
        step_bytes=step_of_adamw("bf16"),
        result="rounded",
    ),
    quantized("8bit", "three quarters", 1 - 1.03 / 4, "8 bits and a scale per 256 values"),
    quantized("4bit", "six sevenths", 1 - 0.57 / 4, "4 bits and a scale per 128 values"),
    Lever(
        "optimizer=adafactor",
        saves="nearly all optimizer state of matrices",
        costs="another optimizer; reads two numbers per parameter from the device in every step",
        applies="not with `parallel=fsdp`",
        changes={
            "optimizer.target": "torch.optim.Adafactor",
            "optimizer.arguments": {"beta2_decay": -0.8, "d": 1.0},
        },
        in_force=lambda config: config.optimizer.target == "torch.optim.Adafactor",
        require=needs_whole_parameters,
        helps=trains_real_numbers,
    ),
    MUON,
    Lever(
        "optimizer.in_backward=true",
        saves="all gradients but one, where the step is one micro-batch",
        costs="an error in the last backward goes back to the checkpoint",
        applies="with `train.grad_clip=null`, `parallel=single`; not with `train.compile`, `precision=fp16` or "
        "`train.nonfinite=skip`",
        changes={"optimizer.in_backward": True},
        require=needs_updates_one_by_one,
        result="same",
    ),
    Lever(
        "optimizer.in_backward=true train.grad_clip=null",
        saves="all gradients but one, where the step is one micro-batch",
        costs="no clipping; an error in the last backward goes back to the checkpoint",
        applies="as above, in place of `train.grad_clip`",
        changes={"optimizer.in_backward": True, "train.grad_clip": None},
        in_force=lambda config: config.optimizer.in_backward,
        require=needs_updates_in_place_of_clipping,
        helps=clips,
        shrinks_state=True,
    ),
    ON_HOST,
    Lever(
        "optimizer.fused=auto",
        saves="a copy of the parameters in the optimizer's step",
        costs="nothing",
        applies="by default, for optimizers that have a fused kernel",
        changes={"optimizer.fused": "auto"},
        is_default=True,
        result="same",
    ),
    Lever(
        "train.ema=null",
        saves="a copy of the weights",
        costs="evaluation of the average of the weights",
        applies="by default",
        changes={"train.ema": None},
        is_default=True,
        state_saved=weight_average,
    ),
    Lever(
        "model.freeze=[NAMES]",
        saves="gradients and optimizer state of these parameters, activations before the first one that is trained",
        costs="they are not trained",
        applies="always, unless nothing is left to train",
        shrinks_state=True,
    ),
    Lever(
        "adapter=lora",
        saves="gradients and optimizer state of all but the adapters",
        costs="the model's own weights stay as they are, so the result is another",
        applies="models with linear layers in their `blocks()`, those of Transformers; needs `trainapp[peft]`",
        in_force=lambda config: config.adapter.kind != "none",
        require=needs_layers_for_adapters,
        shrinks_state=True,
    ),
    Lever(
        "model.context_length=N",
        saves="activations, in proportion or more",
        costs="shorter texts: another model",
        applies="`model=gpt`",
    ),
    *SHARDS,
    Lever(
        "memory.expandable_segments=true",
        saves="fragmentation: reserved memory that cannot be used",
        costs="nothing",
        applies="CUDA, by default",
        changes={"memory.expandable_segments": True},
        is_default=True,
        result="same",
    ),
    Lever(
        "checkpointing.asynchronous=false",
        saves="a copy of the state in host memory",
        costs="training waits while a checkpoint is written",
        applies="by default",
        changes={"checkpointing.asynchronous": False},
        is_default=True,
        result="same",
    ),
)
