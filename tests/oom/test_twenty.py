"""The same limit gives the same outcome, run after run: size, restarts and weights."""

import hashlib

import pytest
import torch
from helpers import result, train

from .test_limits import COMMON, LIMITS, MODELS


def outcome(run_dir, cache, model: str) -> tuple:
    """A run in a process of its own."""
    overrides = [part for part in COMMON if not part.startswith("checkpointing")]
    overrides += ["train.max_steps=9", "every.log=null", "every.eval=null", "every.save=null", "oom.grow=true"]
    train(
        run_dir,
        *MODELS[model],
        *overrides,
        f"memory.limit={LIMITS[model]}",
        env={"TRAINAPP_CACHE": str(cache), "PYTHONHASHSEED": "random"},
    )
    (path,) = (run_dir / "checkpoints").glob("step_*/*.pt")
    saved = torch.load(path, weights_only=True)
    digest = hashlib.sha256()
    for name, tensor in sorted(saved["model"].items()):
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    found = result(run_dir)
    return found["micro_size"], found["oom_restarts"], tuple(found["micro_schedule"].items()), digest.hexdigest()


def alike(tmp_path, model: str, times: int) -> None:
    outcomes = [outcome(tmp_path / f"run{i}", tmp_path / f"cache{i}", model) for i in range(times)]
    assert outcomes[0][1] >= 1
    assert len(set(outcomes)) == 1, outcomes


@pytest.mark.parametrize("model", MODELS)
def test_three_times_alike(tmp_path, model):
    alike(tmp_path, model, 3)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", MODELS)
def test_twenty_times_alike(tmp_path, model):
    alike(tmp_path, model, 20)
