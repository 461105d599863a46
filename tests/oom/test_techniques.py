"""With a technique in force, an out-of-memory error costs one retried step: bit for bit the replay of the schedule."""

import functools
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import runs
import torch

from .conftest import tiny
from .inject import Injector, Recorded, logged

pytestmark = pytest.mark.usefixtures("without_pictures")

# Dropout: a step cut in another way has other bits.
GPT = (*runs.MODELS["gpt"], "data.min_length=12")
TECHNIQUES = {
    "loss in chunks": ("memory.loss_chunk=5",),
    "loss in chunks, bf16": ("memory.loss_chunk=5", "precision=bf16"),
    "loss in chunks, checkpointing": ("memory.loss_chunk=5", "activation_checkpointing=full"),
    "frozen": ("model.freeze=[layers.0.mlp,norm]",),
    "bf16 states": ("optimizer=adamw_bf16",),
    "bf16 weights": ("optimizer=adamw_bf16", "precision=bf16_pure", "train.ema=null"),
    "everything": (
        *("optimizer=adamw_bf16", "precision=bf16_pure", "train.ema=null"),
        *("memory.loss_chunk=5", "activation_checkpointing=full", "model.freeze=[norm]"),
    ),
    "8 bits": ("optimizer=adamw_8bit", "model.width=64", "data.vocab_size=128"),  # large enough to be quantized
    "in backward": ("optimizer.in_backward=true", "train.grad_clip=null"),
    "adafactor": ("optimizer=adafactor",),
    "muon": ("optimizer=muon",),
    "on the host": ("optimizer.offload=true",),
}
if find_spec("torchao") is not None:
    TECHNIQUES |= {kind: (f"precision={kind}",) for kind in ("int8", "fp8")}
PLACES = [("forward", 2), ("loss", 3), ("backward", 2)]
NIGHTLY = pytest.mark.nightly
# With each push each technique once, in a place in turn.
CELLS = [
    pytest.param(technique, *place, marks=() if number % 3 == turn else NIGHTLY)
    for number, technique in enumerate(TECHNIQUES)
    for turn, place in enumerate(PLACES)
]


def recorded(run_dir: Path, overrides, schedule=None, injector=None, changes=None) -> Recorded:
    return Recorded(tiny(run_dir, *GPT, *overrides, schedule=schedule, changes=changes), injector)


@functools.cache
def configured(technique: str, *schedule: tuple[int, int]) -> tuple[dict, list]:
    """The state and logged numbers of the run that switches sizes by configuration."""
    with tempfile.TemporaryDirectory() as folder:
        run = recorded(Path(folder), TECHNIQUES[technique], dict(schedule))
        assert not run.failures
        return run.state(), logged(Path(folder))


@pytest.mark.slow
@pytest.mark.parametrize(("technique", "phase", "operation"), CELLS)
def test_a_failure_is_the_replay_of_its_schedule(tmp_path, technique, phase, operation):
    injector = Injector(phase, 2, operation)
    failed = recorded(tmp_path / "failed", TECHNIQUES[technique], injector=injector)
    assert (injector.fired, [f.phase for f in failed.failures]) == (1, [phase])
    state, losses = configured(technique, *failed.run.sizes.micro_schedule().items())
    assert runs.differences(failed.state(), state) == []
    assert logged(tmp_path / "failed") == losses
    # Negative control: the schedule one step late.
    late, _ = configured(technique, (1, 8), (3, 4))
    assert runs.differences(failed.state()["tensors"]["model"], late["tensors"]["model"]) != []


@pytest.mark.slow
@pytest.mark.parametrize(
    "technique", [pytest.param(name, marks=() if name == "everything" else NIGHTLY) for name in TECHNIQUES]
)
def test_a_real_limit(tmp_path, technique):
    own = TECHNIQUES[technique]
    peak = recorded(tmp_path / "peak", own, changes={"batch.micro_size": 5}).run.memory.peak
    failed = recorded(tmp_path / "failed", own, changes={"batch.micro_size": 16, "memory.limit": peak})
    assert failed.failures
    assert failed.run.memory.peak <= peak
    schedule = failed.run.sizes.micro_schedule()
    again = recorded(tmp_path / "again", own, schedule, changes={"batch.micro_size": 16})
    assert runs.differences(failed.state(), again.state()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "technique", [pytest.param(name, marks=() if name == "8 bits" else NIGHTLY) for name in TECHNIQUES]
)
def test_resumed(tmp_path, technique):
    """Three steps, then three more from the checkpoint, equal six."""
    own, six = TECHNIQUES[technique], {"train.max_steps": 6, "schedule.shape": "constant"}
    saving = {**six, "checkpointing.save": True, "checkpointing.resume": "auto"}
    whole = recorded(tmp_path / "whole", own, changes=six)
    recorded(tmp_path / "run", own, changes={**saving, "train.max_steps": 3})
    parts = recorded(tmp_path / "run", own, changes=saving)
    assert parts.run.state.progress.step == 6
    assert torch.equal(runs.weights(parts.run.state.model), runs.weights(whole.run.state.model))
