"""What advice says of optimizers with less state counts what their step needs."""

import re

import pytest

from trainapp.errors import TrainingStopped, UserError
from trainapp.memory.kinds import MemoryKind

from .conftest import MODELS, tiny
from .inject import Recorded

pytestmark = pytest.mark.usefixtures("without_pictures")

# 4.9 MiB of state in AdamW, and hardly any activations. In bf16 or 4 bits its step needs 6 or 10 MiB in passing.
HEAVY = (*MODELS["mlp"], "model.width=768", "model.dropout=0", "train.ema=null", "batch.micro_size=1")


def peak_of(run_dir, *overrides):
    return Recorded(tiny(run_dir, *HEAVY, *overrides)).run.memory.peak


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.98, 0.5], ids=["in the first step", "before any batch"])
def test_an_optimizer_whose_step_takes_what_its_state_saves_is_not_offered(tmp_path, share):
    peak = peak_of(tmp_path / "peak")
    with pytest.raises((TrainingStopped, UserError)) as caught:
        Recorded(tiny(tmp_path / "run", *HEAVY, changes={"memory.limit": round(share * peak)}))
    advice = str(caught.value)
    assert "optimizer=sgd optimizer.momentum=0" in advice
    assert "optimizer=adamw_" not in advice.replace("precision=bf16_pure optimizer=adamw_bf16", "")
    for optimizer in ("adamw_bf16", "adamw_4bit"):
        assert peak_of(tmp_path / optimizer, f"optimizer={optimizer}") > 0.98 * peak


@pytest.mark.slow
def test_one_that_helps_is_offered_with_what_it_saves(tmp_path):
    """Less than its state saves: its step needs more than the activations that are gone by then."""
    wide = (*MODELS["gpt"], "model.width=256", "model.depth=2", "model.dropout=0", "model.context_length=64")
    wide = (*wide, "data.min_length=null", "train.ema=null", "batch.micro_size=1", "train.grad_clip=null")
    run = Recorded(tiny(tmp_path / "peak", *wide)).run
    peak, state = run.memory.peak, run.meter.static[MemoryKind.OPTIMIZER_STATE]
    less = Recorded(tiny(tmp_path / "less", *wide, "optimizer=adamw_8bit")).run.memory.peak
    with pytest.raises(TrainingStopped) as caught:
        Recorded(tiny(tmp_path / "run", *wide, changes={"memory.limit": peak - 2000}))
    found = re.search(r"([\d.]+) MiB  optimizer=adamw_8bit:", str(caught.value))
    assert found is not None, str(caught.value)
    promised = float(found[1]) * 2**20
    assert 0.5 * (peak - less) < promised <= 1.02 * (peak - less) < 0.7 * state
