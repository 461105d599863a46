"""Runs on the GPU, through the program's own entry; and what those runs are made of."""

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
from trainapp.train import losses

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
        "data.val_size=64",
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


def command(run_dir: Path, *overrides: str, env: Mapping[str, str | None] | None = None) -> Any:
    """`python -m trainapp OVERRIDES`; they may name tasks of this file. env: changes to it, None to remove."""
    changes = {"PYTHONPATH": os.pathsep.join(sys.path), **(env or {})}
    return subprocess.run(
        [sys.executable, "-m", "trainapp", *overrides, f"hydra.run.dir={run_dir}"],
        cwd=run_dir.parent,
        env={name: value for name, value in (os.environ | changes).items() if value is not None},
        capture_output=True,
        text=True,
        timeout=120,
    )


def limit_of(run_dir: Path, share: float, *overrides: str) -> int:
    """Bytes: what persists between the steps of a run, and this share of what a step adds to it.

    Runs it twice: while cuDNN's search tries its algorithms for a new size, it takes far more than a step needs.
    """
    for name in ("first", "second"):
        settings = ("train.max_steps=2", "checkpointing=off", "oom.remember=false")
        peak = launched(run_dir / name, *overrides, *settings).peak_memory_bytes
    line = helpers.metrics(run_dir / "second")[-1]
    static = sum(line[f"memory/{kind}"] for kind in _KINDS)
    return int(static + share * (peak - static))


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
