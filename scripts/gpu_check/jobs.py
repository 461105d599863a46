"""Runs of trainapp that the steps need: through the program's own entry, with sizes that suit the device."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import helpers
import runs
import torch

from trainapp.config import compose
from trainapp.launch import launch
from trainapp.parallel.ranks import SingleRank
from trainapp.run import runner
from trainapp.signals import StopRequest
from trainapp.torch_private import storage_id
from trainapp.train.run import Run

MIB = 2**20
# On a GPU large enough that activations outweigh what libraries and the allocator's granularity take.
_CUDA = {
    "mlp": (
        "model=mlp",
        "model.width=2048",
        "data=synthetic_images",
        "data.size=8192",
        "data.val_size=512",
        "batch.global_size=4096",
    ),
    "gpt": (
        "model=gpt",
        "model.depth=4",
        "model.width=256",
        "model.heads=4",
        "model.context_length=256",
        "model.dropout=0.1",
        "data=synthetic_tokens",
        "data.size=512",
        "data.val_size=64",
        "batch.global_size=128",
    ),
    "resnet": (
        "model=resnet",
        "model.width=32",
        "data=synthetic_images",
        "data.image_shape=[3,64,64]",
        "data.size=1024",
        "data.val_size=128",
        "batch.global_size=256",
    ),
}
_CPU = {
    "mlp": ("model=mlp", "model.width=64", "data=digits", "batch.global_size=512"),
    "gpt": (*runs.MODELS["gpt"], "data.size=128", "batch.global_size=32"),
    "resnet": ("model=resnet", "model.width=8", "data=digits", "batch.global_size=64"),
}
# What a run does beside its steps is left out; each step switches on what it is about.
_QUIET = (
    "train.max_epochs=null",
    "schedule=constant",
    "every.log=1",
    "every.eval=null",
    "every.save=null",
    "oom.remember=false",
    "memory.guard=false",
)
_KINDS = ("parameters", "gradients", "optimizer_state", "buffers", "weight_average")


def overrides(device: str, model: str, *more: str) -> tuple[str, ...]:
    """The settings of a run of this model, with a size that suits the device."""
    return (*_QUIET, f"train.device={device}", *(_CUDA if device == "cuda" else _CPU)[model], *more)


def launched(run_dir: Path, *settings: str) -> SimpleNamespace:
    """A run from start to end in this process, as `python -m trainapp SETTINGS` does it. Returns its result.json."""
    launch.launch(compose.from_command_line(settings, str(run_dir)))
    return SimpleNamespace(**helpers.result(run_dir))


def prepared(run_dir: Path, *settings: str) -> Run:
    """A run that is ready for its next step. The caller closes it."""
    return runner.prepare(compose.from_command_line(settings, str(run_dir)), StopRequest(), SingleRank())


def command(
    run_dir: Path, *settings: str, env: Mapping[str, str | None] | None = None, seconds: float = 60
) -> subprocess.CompletedProcess:
    """`python -m trainapp SETTINGS` in a process of its own. env: changes to the environment, None to remove."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    environment = {key: value for key, value in (os.environ | dict(env or {})).items() if value is not None}
    return subprocess.run(
        [sys.executable, "-m", "trainapp", *settings, f"hydra.run.dir={run_dir}"],
        cwd=run_dir.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def last_line(text: str) -> str:
    """The last line that says something, cut to 120 characters."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:120] if lines else "no output"


def unlimited(run_dir: Path, *settings: str) -> SimpleNamespace:
    """The result of a run without a limit, with `static`: the bytes that persist between its steps.

    Twice: while cuDNN's search tries its algorithms for a new size, it takes far more than a step needs.
    """
    for name in ("first", "second"):
        result = launched(run_dir / name, *settings)
    line = helpers.metrics(run_dir / "second")[-1]
    result.static = int(sum(line[f"memory/{kind}"] for kind in _KINDS))
    return result


def limit_between(result: SimpleNamespace, share: float) -> int:
    """Bytes: what persists between steps, and this share of what a step of an `unlimited` run adds to it."""
    return int(result.static + share * (result.peak_memory_bytes - result.static))


def replayed(run_dir: Path, result: SimpleNamespace, *settings: str) -> SimpleNamespace:
    """The run that follows the `micro_schedule` of another one's result."""
    return launched(run_dir, *settings, f"batch.micro_schedule='{json.dumps(result.micro_schedule)}'")


def final_weights(run_dir: Path, step: int) -> torch.Tensor:
    """All of the model's floating-point tensors in the checkpoint of a step, as one vector on the host."""
    tensors = runs.saved(run_dir, step)["model"]
    return torch.cat([tensors[name].flatten().double().cpu() for name in sorted(tensors)])


def live_bytes(device: str) -> int:
    """Bytes of tensors: the allocator's count, or on the CPU those of all tensors that Python can reach."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    # By exact type: `isinstance` would make lazy objects of other libraries load themselves.
    tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
    return sum({storage_id(s): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def synchronise(device: str) -> None:
    """Wait for the device: before a clock is read."""
    if device == "cuda":
        torch.cuda.synchronize()


def lift_limit(device: str) -> None:
    """Remove the allocator's cap, which outlives what set it."""
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0)


def text(size: float) -> str:
    """MiB."""
    return f"{size / MIB:.1f} MiB"


def errors(count: int) -> str:
    """1 error, 2 errors."""
    return f"{count} error{'s' * (count != 1)}"
