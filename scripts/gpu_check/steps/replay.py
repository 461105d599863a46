"""A run that ran out of memory, and the run that follows its `micro_schedule` with enough memory."""

from pathlib import Path
from types import SimpleNamespace

import torch
from gpu import on_gpu

from .. import jobs
from ..table import Table

STEPS = 6
MODELS = ("mlp", "gpt", "resnet")  # the gpt has dropout: masks depend on the cut
SHARES = (0.5, 0.3, 0.2, 0.12)  # of what a step needs, until an error occurs
ROUNDING = 1e-4  # relative distance of the final weights


def deterministic(table: Table, device: str, folder: Path) -> None:
    """With deterministic kernels: bit for bit, and a control that shows that the comparison can fail."""
    changed: dict[str, torch.Tensor] = {}
    for model in MODELS:
        expected = "0 of the final weights differ, after at least 1 error"
        with table.attempt(model, expected):
            settings, first, weights = ran_out(device, folder / model, model, "train.deterministic=true")
            changed[model] = weights
            on_gpu.replayed(folder / model / "replay", first, *settings)
            differ = int((weights != jobs.final_weights(folder / model / "replay", STEPS)).sum())
            got = f"{differ} of {weights.numel()}, after {jobs.errors(first.oom_restarts)}"
            table.expect(model, expected, got, differ == 0 and first.oom_restarts > 0)
    with table.attempt("control: gpt without the schedule", "weights differ"):
        on_gpu.launched(folder / "control", *settings_of(device, "gpt", "train.deterministic=true"))
        differ = int((changed["gpt"] != jobs.final_weights(folder / "control", STEPS)).sum())
        table.expect("control: gpt without the schedule", "weights differ", f"{differ} differ", differ > 0)


def default(table: Table, device: str, folder: Path) -> None:
    """With the default kernels, which may add in any order: equal to rounding."""
    for model in MODELS:
        expected = f"a relative distance of at most {ROUNDING:g}, after at least 1 error"
        with table.attempt(model, expected):
            settings, first, weights = ran_out(device, folder / model, model)
            on_gpu.replayed(folder / model / "replay", first, *settings)
            other = jobs.final_weights(folder / model / "replay", STEPS)
            distance = float((weights - other).norm() / other.norm())
            table.expect(
                model,
                expected,
                f"{distance:.1e}, {int((weights != other).sum())} of {weights.numel()} differ, after "
                f"{jobs.errors(first.oom_restarts)}",
                distance <= ROUNDING and first.oom_restarts > 0,
            )


def settings_of(device: str, model: str, *more: str) -> tuple[str, ...]:
    """Of all runs of a comparison."""
    return jobs.overrides(device, model, f"train.max_steps={STEPS}", *more)


def ran_out(device: str, folder: Path, model: str, *more: str) -> tuple[tuple[str, ...], SimpleNamespace, torch.Tensor]:
    """Settings, result and final weights of a run under the first limit that causes an error."""
    settings = settings_of(device, model, *more)
    free = jobs.unlimited(folder / "free", *settings)
    for share in SHARES:
        run_dir = folder / f"limited_{share}"
        result = on_gpu.launched(run_dir, *settings, f"memory.limit={on_gpu.limit_between(free, share)}")
        if result.oom_restarts:
            break
    return settings, result, jobs.final_weights(run_dir, STEPS)
