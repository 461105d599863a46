"""What several checks need: settings of runs with sizes that suit the device; tests/gpu/on_gpu.py launches them."""

import gc
from pathlib import Path
from types import SimpleNamespace

import runs
import torch
from gpu import on_gpu

from trainapp.torch_private import storage_id

_CPU = {
    "mlp": ("model=mlp", "model.width=64", "data=digits", "batch.global_size=512"),
    "gpt": (*runs.MODELS["gpt"], "data.size=128", "batch.global_size=32"),
    "resnet": ("model=resnet", "model.width=8", "model.norm=group", "data=digits", "batch.global_size=64"),
}


def overrides(device: str, model: str, *more: str) -> tuple[str, ...]:
    """The settings of a run of this model, with a size that suits the device."""
    models = on_gpu.LARGE_MODELS if device == "cuda" else _CPU
    return (*runs.TINY, "schedule=constant", *models[model], f"train.device={device}", *more)


def unlimited(run_dir: Path, *settings: str) -> SimpleNamespace:
    """See `on_gpu.unlimited`.

    Twice: in the first run cuDNN times its algorithms at step 4, which takes far more memory than a step; it keeps the
    plans for the second. (Only model=resnet has any to time, and only where it is not deterministic.) On the CPU once.
    """
    if "train.device=cpu" not in settings:
        on_gpu.unlimited(run_dir / "first", *settings)
    return on_gpu.unlimited(run_dir / "second", *settings)


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
    return f"{size / on_gpu.MIB:.1f} MiB"
