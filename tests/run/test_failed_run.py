"""What a run that cannot continue leaves behind."""

import json

import pytest
import runs

from trainapp.errors import TrainingStopped
from trainapp.report.run_files import state_of
from trainapp.run.result import read

MLP = runs.MODELS["mlp"]


def test_its_result_says_why_and_the_next_start_removes_it(tmp_path):
    diverging = ("optimizer.lr=1e9", "train.grad_clip=null", "schedule=constant", "train.max_steps=30")
    with pytest.raises(TrainingStopped):
        runs.run(tmp_path, *MLP, *diverging)
    facts = json.loads((tmp_path / "result.json").read_text())
    assert "is not finite" in facts["failed"]
    assert state_of(facts) == "failed"
    assert read(tmp_path) is None
    assert 0 < facts["steps"] < 30

    runs.run(tmp_path, *MLP, *diverging, "train.max_steps=1", "checkpointing.resume=none")
    assert state_of(json.loads((tmp_path / "result.json").read_text())) == "finished"
