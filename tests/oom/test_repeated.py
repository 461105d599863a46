"""The same limit gives the same outcome every time: size, restarts and weights."""

import dataclasses
import hashlib

import pytest
import runs
from helpers import result, train

from trainapp.run import runner

from .conftest import composed
from .test_limits import COMMON, LIMITS, MODELS

CHANGES = ("train.max_steps=9", "every.log=null", "every.eval=null", "every.save=null")


def settings(model: str) -> tuple[str, ...]:
    """A run that hits its limit, searches, and saves its last step."""
    common = [part for part in COMMON if not part.startswith("checkpointing")]
    return (*MODELS[model], *common, *CHANGES, "oom.grow=true", f"memory.limit={LIMITS[model]}")


def in_a_process(run_dir, cache, model: str) -> tuple:
    """A run in a separate process."""
    train(run_dir, *settings(model), env={"TRAINAPP_CACHE": str(cache), "PYTHONHASHSEED": "random"})
    return outcome(run_dir)


def here(run_dir, cache, model: str) -> tuple:
    """A run in this process."""
    runner.run(dataclasses.replace(composed(*settings(model)), run_dir=str(run_dir)))
    return outcome(run_dir)


def outcome(run_dir) -> tuple:
    """Size, restarts, sizes used and a digest of the weights."""
    (path,) = (run_dir / "checkpoints").glob("step_*")
    digest = hashlib.sha256()
    for name, tensor in sorted(runs.tensors(path)["model"].items()):
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    found = result(run_dir)
    return found["micro_size"], found["oom_restarts"], tuple(found["micro_schedule"].items()), digest.hexdigest()


def alike(tmp_path, model: str, times: int, run) -> None:
    outcomes = [run(tmp_path / f"run{i}", tmp_path / f"cache{i}", model) for i in range(times)]
    assert outcomes[0][1] >= 1
    assert len(set(outcomes)) == 1, outcomes


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_twice_alike(tmp_path, model):
    alike(tmp_path, model, 2, here)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_two_processes_alike(tmp_path, model):
    """Each with a hash seed of its own."""
    alike(tmp_path, model, 2, in_a_process)
