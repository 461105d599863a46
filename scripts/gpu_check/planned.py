"""Plans beside measurements: the configurations, the plans in a process that sees no device, and the arithmetic."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import runs
from gpu import on_gpu

from trainapp.planning import process

MEDIAN, WORST = 0.01, 0.05  # relative errors that a plan may have; xMem's are 3.59% in the median
_GPT = ("model=gpt", "model.dropout=0", "data=synthetic_tokens")
# Peaks of some GiB, to which 2 MiB pages and what earlier runs leave in the allocator are little.
LARGE = {
    "gpt": (
        *_GPT, "model.depth=6", "model.width=1024", "model.context_length=512", "data.vocab_size=16384",
        "data.size=64", "data.val_size=16", "batch.global_size=16", "batch.micro_size=16",
    ),
    "mlp": (
        "model=mlp", "model.width=8192", "model.depth=4", "data=synthetic_images", "data.size=8192", "data.val_size=64",
        "batch.global_size=8192", "batch.micro_size=8192",
    ),
    "resnet": (
        "model=resnet", "model.width=64", "model.norm=group", "data=synthetic_images", "data.image_shape=[3,64,64]",
        "data.size=512", "data.val_size=64", "batch.global_size=256", "batch.micro_size=256",
    ),
}  # fmt: skip
SMALL = {
    "gpt": (
        *_GPT, "model.depth=2", "model.width=64", "model.context_length=64", "data.vocab_size=512", "data.size=64",
        "data.val_size=16", "batch.global_size=16", "batch.micro_size=16",
    ),
    "mlp": ("model=mlp", "model.width=64", "data=digits", "batch.global_size=64", "batch.micro_size=64"),
    "resnet": ("model=resnet", "model.width=4", "model.norm=group", "data=digits", "batch.global_size=16",
               "batch.micro_size=16"),
}  # fmt: skip
_PURE = "precision=bf16_pure", "optimizer=adamw_bf16"
CASES: tuple[tuple[str, tuple[str, ...]], ...] = (
    *((model, (f"precision={precision}",)) for model in ("gpt", "mlp") for precision in ("fp32", "bf16", "fp16")),
    *(("gpt", (f"precision={precision}", "activation_checkpointing=full")) for precision in ("fp32", "bf16")),
    ("gpt", ("activation_checkpointing=selective", "precision=bf16")),
    ("gpt", ("memory.loss_chunk=auto", "precision=bf16")),
    ("gpt", ("memory.offload_activations=all", "precision=bf16")),
    ("gpt", ("memory.offload_activations=inputs", "activation_checkpointing=full", "precision=bf16")),
    ("gpt", _PURE),
    ("gpt", (*_PURE, "activation_checkpointing=full", "memory.loss_chunk=auto")),
    ("gpt", ("batch.micro_size=4",)),
    ("gpt", ("batch.micro_size=4", "precision=bf16")),
    ("gpt", ("model.dropout=0.1", "precision=bf16")),
    ("gpt", ("train.ema=0.99",)),
    ("gpt", ("optimizer=sgd",)),
    ("gpt", ("optimizer=adamw_8bit",)),
    ("gpt", ("optimizer.fused=false",)),
    ("gpt", ("optimizer.in_backward=true", "train.grad_clip=null")),
    ("mlp", ("optimizer=muon",)),
    ("resnet", ("precision=fp32",)),
    ("resnet", ("precision=bf16",)),
)
LABELLED = "resnet"  # what cuDNN takes for a convolution is not in a plan
STEPS = 4


def overrides(device: str, model: str, chosen: Sequence[str]) -> tuple[str, ...]:
    """The settings of a run of this model with these settings."""
    models = LARGE if device == "cuda" else SMALL
    quiet = ("checkpointing=off", f"train.max_steps={STEPS}", "plan.techniques=false")
    return (*runs.TINY, *models[model], *quiet, f"train.device={device}", *chosen)


def spelled(device: str) -> tuple[str, ...]:
    """What a plan for this machine's device has to be told."""
    if device == "cpu":
        return ()
    import torch  # late: the process of the plans comes by here, too

    from trainapp.planning import absent_gpu

    name = absent_gpu.spelled(torch.cuda.get_device_properties(0))
    return (f"plan.device={name}", "train.device=auto")


def plans(configurations: Sequence[Sequence[str]], patience: float) -> list[dict[str, Any]]:
    """The content of plan.json of each, from one process that sees no device. Raises NoAnswer."""
    found: list[dict[str, Any]] = process.answer_of(
        f"{__name__}.plans_here", [tuple(own) for own in configurations], patience=patience, sees_devices=False
    )
    return found


def plans_here(configurations: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """The same in this process, whose global switches it sets."""
    from trainapp.planning import planner

    return [planner.plan(runs.configure(Path("unused"), *own))[0] for own in configurations]


@dataclass(frozen=True)
class Compared:
    """Bytes of one configuration: allocated, planned and measured, and reserved."""

    name: str
    planned: int
    measured: int
    reserved: int

    @property
    def error(self) -> float:
        """Relative, of what is allocated."""
        return self.planned / self.measured - 1

    @property
    def text(self) -> str:
        """MiB, planned against measured."""
        planned, measured, reserved = (size / on_gpu.MIB for size in (self.planned, self.measured, self.reserved))
        return f"allocated {planned:.1f} for {measured:.1f} MiB ({100 * self.error:+.2f}%), reserved {reserved:.0f}"


def compared(name: str, facts: dict[str, Any], result: Any) -> Compared:
    """A plan beside a run's result. Raises RuntimeError for a plan without figures."""
    if facts["method"] is None:
        raise RuntimeError(f"no estimate: {facts['notes']}")
    return Compared(name, facts["peak_bytes"], result.peak_memory_bytes, result.peak_reserved_bytes)


def summary(errors: Sequence[float]) -> tuple[str, bool]:
    """Median and worst of relative errors as text, and whether both are small enough. No error is no success."""
    if not errors:
        return "nothing was compared", False
    sizes = [abs(error) for error in errors]
    median, worst = statistics.median(sizes), max(sizes)
    text = f"median {100 * median:.2f}%, worst {100 * worst:.2f}%, of {len(sizes)}"
    return text, median <= MEDIAN and worst <= WORST
