"""What a run that cannot continue leaves behind."""

import json

import pytest
import runs

from trainapp.errors import OutOfMemory, TrainingStopped
from trainapp.report.run_files import state_of
from trainapp.run.result import read

MLP = runs.MODELS["mlp"]


def test_its_result_says_why_and_the_next_start_removes_it(tmp_path):
    diverging = ("optimizer.lr=1e9", "train.grad_clip=null", "schedule=constant", "train.max_steps=30")
    with pytest.raises(TrainingStopped):
        runs.run(tmp_path, *MLP, *diverging)
    facts = json.loads((tmp_path / "result.json").read_text())
    assert "is not finite" in facts["failed"]
    assert facts["error_kind"] == "not_finite"
    assert state_of(facts) == "failed"
    assert read(tmp_path) is None
    assert 0 < facts["steps"] < 30

    runs.run(tmp_path, *MLP, *diverging, "train.max_steps=1", "checkpointing.resume=none")
    assert state_of(json.loads((tmp_path / "result.json").read_text())) == "finished"


def failed_result(run_dir, *overrides: str) -> dict:
    """The result.json of a run that fails."""
    with pytest.raises(Exception):  # noqa: B017  # its kind is what the test is about
        runs.run(run_dir, *MLP, *overrides)
    return json.loads((run_dir / "result.json").read_text())


@pytest.mark.parametrize("oom", ["oom.enabled=true", "oom.enabled=false"])
def test_its_kind_is_out_of_memory_whatever_the_message_begins_with(tmp_path, oom):
    facts = failed_result(tmp_path, "batch.micro_size=1", "memory.limit=100KiB", oom, "model.width=64")
    assert facts["error_kind"] == "out_of_memory"
    assert facts["failed"].startswith("out of memory") == (oom == "oom.enabled=true")


def test_its_kind_is_that_of_an_exception_also_if_its_message_mentions_memory(tmp_path, monkeypatch):
    def fails(*_):
        raise TypeError("out of memory, it says")

    monkeypatch.setattr("trainapp.models.mlp.MLP.forward", fails)
    facts = failed_result(tmp_path)
    assert (facts["error_kind"], facts["failed"]) == ("exception", "TypeError: out of memory, it says")


def test_one_that_could_not_be_built_for_want_of_memory_says_so_unless_it_continues_another(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("CUDA error: out of memory")

    with monkeypatch.context() as broken:
        broken.setattr("trainapp.run.prepare.build.build", fails)
        facts = failed_result(tmp_path)
    assert facts["error_kind"] == "out_of_memory"
    assert facts["failed"].startswith("out of memory while building the run")

    runs.run(tmp_path, *MLP)
    finished = (tmp_path / "result.json").read_text()
    monkeypatch.setattr("trainapp.run.prepare.build.build", fails)
    with pytest.raises(OutOfMemory):
        runs.run(tmp_path, *MLP, "train.max_steps=5")
    assert (tmp_path / "result.json").read_text() == finished
