"""Levers of the optimizer's state, and what levers save of what persists between steps."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from trainapp.config.adamw import IN_FEWER_BITS, is_adamw
from trainapp.config.schema import Config
from trainapp.memory.kinds import MemoryKind
from trainapp.optim import low_precision
from trainapp.techniques.conditions import (
    is_on_a_gpu,
    needs_unsharded_blocks,
    needs_updates_after_backward,
    trains_in_32_bits,
)
from trainapp.techniques.lever import Lever


def optimizer_state(static: Mapping[MemoryKind, int], config: Config) -> int:
    """All of it."""
    return static[MemoryKind.OPTIMIZER_STATE]


def one_moment_of_two(static: Mapping[MemoryKind, int], config: Config) -> int:
    """Half of any Adam's in fp32; in fewer bits, two take no more than one of SGD's."""
    target = config.optimizer.target
    return static[MemoryKind.OPTIMIZER_STATE] // 2 if "Adam" in target and target != IN_FEWER_BITS else 0


def half_of_adams_state(static: Mapping[MemoryKind, int], config: Config) -> int:
    """Of torch's own, in fp32, where AdamW in fewer bits is the same algorithm."""
    is_in_fp32 = is_adamw(config.optimizer) and config.optimizer.target != IN_FEWER_BITS
    return static[MemoryKind.OPTIMIZER_STATE] // 2 if is_in_fp32 else 0


def weight_average(static: Mapping[MemoryKind, int], config: Config) -> int:
    """All of it."""
    return static[MemoryKind.WEIGHT_AVERAGE]


def adamw(state_dtype: str) -> dict[str, Any]:
    """The changes that choose trainapp's AdamW."""
    return {
        "optimizer.target": IN_FEWER_BITS,
        "optimizer.arguments": {"betas": [0.9, 0.999], "eps": 1e-8, "state_dtype": state_dtype},
    }


def step_of_adamw(state_dtype: low_precision.StateDtype) -> Callable[[nn.Module], int]:
    """What trainapp's AdamW needs in its step."""
    return lambda model: low_precision.step_bytes(model.parameters(), state_dtype)


def has_moments_in(state_dtype: str) -> Callable[[Config], bool]:
    """Whether the optimizer of a configuration is trainapp's AdamW with such a state."""
    return lambda config: config.optimizer.arguments.get("state_dtype") == state_dtype


def quantized(state_dtype: low_precision.StateDtype, share: str, saved: float, bits: str) -> Lever:
    """The lever `optimizer=adamw_8bit` and the like. saved: of the fp32 state."""

    def state_saved(static: Mapping[MemoryKind, int], config: Config) -> int:
        return int(2 * saved * half_of_adams_state(static, config))

    return Lever(
        f"optimizer=adamw_{state_dtype}",
        saves=f"{share} of AdamW's state",
        costs=f"{bits} in the state, rounded by chance; a slower optimizer step, without a fused kernel",
        applies="not with `parallel=fsdp`; parameters of at least 4096 elements",
        changes=adamw(state_dtype),
        in_force=has_moments_in(state_dtype),
        require=needs_unsharded_blocks,
        helps=trains_in_32_bits,
        state_saved=state_saved,
        step_bytes=step_of_adamw(state_dtype),
        result="rounded",
    )


ON_HOST = Lever(
    "optimizer.offload=true",
    saves="the device's part of the optimizer state, and all that the optimizer's step needs",
    costs="in every step, gradients and parameters to the host, the update there, and parameters back",
    applies="CUDA, without `parallel=fsdp` (`parallel.fsdp.cpu_offload=true`) and `optimizer.in_backward`",
    changes={"optimizer.offload": True},
    in_force=lambda config: config.optimizer.offload,
    require=needs_updates_after_backward,
    helps=is_on_a_gpu,
    state_saved=optimizer_state,
    result="same",
)

MUON = Lever(
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
    in_force=lambda config: config.optimizer.target == "trainapp.optim.muon.Muon",
)
