"""Runs on the GPU, through the program's own entry; and what those runs are made of. scripts/gpu_check uses it, too."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import helpers
import runs
import torch
from torch import Tensor, nn

from trainapp.launch import launch
from trainapp.losses import losses

MIB = 2**20
ON_GPU = ("train.device=cuda",)
# GroupNorm: the result does not depend on the micro-batch that the search finds.
LARGE = (
    "model=resnet",
    "model.width=32",
    "model.norm=group",
    "data=synthetic_images",
    "data.image_shape=[3,64,64]",
    "data.size=1024",
    "data.val_size=64",
    "batch.global_size=256",
    "optimizer=sgd",
    "optimizer.lr=0.01",
    *ON_GPU,
)
# Activations that outweigh what libraries and the allocator's granularity take.
LARGE_MODELS = {
    "mlp": (
        "model=mlp",
        "model.width=2048",
        "data=synthetic_images",
        "data.size=8192",
        "data.val_size=512",
        "batch.global_size=4096",
        *ON_GPU,
    ),
    "gpt": (
        "model=gpt",
        "model.depth=2",
        "model.width=256",
        "model.context_length=256",
        "model.dropout=0.1",
        "data=synthetic_tokens",
        "data.size=256",
        "data.val_size=32",
        "batch.global_size=128",
        *ON_GPU,
    ),
    "resnet": LARGE,
}
_KINDS = ("parameters", "gradients", "optimizer_state", "buffers", "weight_average")


def launched(run_dir: Path, *overrides: str) -> SimpleNamespace:
    """A run from start to end, as the command line does it once it is composed. Returns its result.json."""
    launch.launch(runs.configure(run_dir, *overrides))
    return SimpleNamespace(**helpers.result(run_dir))


def command(
    run_dir: Path, *overrides: str, env: Mapping[str, str | None] | None = None
) -> subprocess.CompletedProcess[str]:
    """`python -m trainapp OVERRIDES`; they may name tasks of this file. env: changes to it, None to remove."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    changes = {"PYTHONPATH": os.pathsep.join(sys.path), **(env or {})}
    return subprocess.run(
        [sys.executable, "-m", "trainapp", *overrides, f"hydra.run.dir={run_dir}"],
        cwd=run_dir.parent,
        env={name: value for name, value in (os.environ | changes).items() if value is not None},
        capture_output=True,
        text=True,
        timeout=120,
    )


def unlimited(run_dir: Path, *overrides: str) -> SimpleNamespace:
    """The result of a run without a limit, with `static`: the bytes that persist between its steps."""
    result = launched(run_dir, *overrides, "checkpointing=off")
    line = helpers.metrics(run_dir)[-1]
    result.static = int(sum(line[f"memory/{kind}"] for kind in _KINDS))
    return result


def limit_between(result: SimpleNamespace, share: float) -> int:
    """Bytes: what persists between steps, and this share of what a step of an `unlimited` run adds to it."""
    return int(result.static + share * (result.peak_memory_bytes - result.static))


def limit_of(run_dir: Path, share: float, *overrides: str) -> int:
    """`limit_between` for a run of two steps: cuDNN times no algorithm so early, which would take far more memory."""
    return limit_between(unlimited(run_dir, *overrides, "train.max_steps=2"), share)


def replayed(run_dir: Path, result: SimpleNamespace, *overrides: str) -> SimpleNamespace:
    """The run that follows another one's `micro_schedule`."""
    return launched(run_dir, *overrides, f"batch.micro_schedule='{json.dumps(result.micro_schedule)}'")


def forget() -> None:
    """Free the memory of earlier runs and remove their cap."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.reset_peak_memory_stats()


# Tasks, named in a configuration: user_packages=[on_gpu]


def past_the_end(model: nn.Module, batch: Any) -> tuple[Any, ...]:
    """Targets that are no classes: the kernel's assertion fails, and with it the context."""
    return losses.classification(model, {**batch, "targets": batch["targets"] + 1000})


def counting_nothing(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """A count of 0 that is a tensor of the device."""
    loss, _, metrics = losses.classification(model, batch)
    return loss, loss.detach() * 0, metrics
