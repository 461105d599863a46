"""Where no micro-batch fits on some rank, all turn on the same technique, in place or restarted by the launcher."""

import json

import pytest
from faults import Fault, environment, fired
from helpers import metrics, result
from runs import differences

from .launching import SABOTAGED, checkpoint, launch

pytestmark = pytest.mark.slow

SELECTIVE = "activation_checkpointing=selective"
ONE_SAMPLE = ("batch.micro_size=1", "oom.grow=false", "schedule=constant")


def climbed(tmp_path, *overrides: str, rank: int = 1):
    """The directory of a run that climbs in step 4, after the checkpoint of step 2."""
    fault = Fault("backward", 4, 20, rank=rank)
    overrides = ("parallel.vote_on_oom=always", *overrides)
    ended = launch(tmp_path / "run", *SABOTAGED, *ONE_SAMPLE, *overrides, env=environment(tmp_path, fault))
    assert fired(tmp_path, fault) == 1
    assert ended.code == 0, ended.text
    assert f"{SELECTIVE} turned on (oom.techniques=same" in ended.text
    return tmp_path / "run"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_it_is_a_run_resumed_with_the_technique(tmp_path, strategy):
    run_dir = climbed(tmp_path, f"parallel={strategy}")
    (entry,) = result(run_dir)["turned_on"]
    assert (entry["attempt"], entry["settings"]) == (3, SELECTIVE)

    chosen = (f"parallel={strategy}", *ONE_SAMPLE, *SABOTAGED)
    for settings in (("train.max_steps=2",), (SELECTIVE,)):
        ended = launch(tmp_path / "known", *chosen, *settings, env=environment(tmp_path))
        assert ended.code == 0, ended.text
    assert differences(checkpoint(run_dir, 6), checkpoint(tmp_path / "known", 6)) == []
    assert [line["loss"] for line in metrics(run_dir)] == [line["loss"] for line in metrics(tmp_path / "known")]


def test_workers_that_cannot_vote_pass_the_technique_on(tmp_path):
    run_dir = climbed(tmp_path, "parallel=ddp", "parallel.vote_on_oom=never")
    (entry,) = result(run_dir)["turned_on"]
    assert (entry["attempt"], entry["settings"]) == (3, SELECTIVE)
    assert result(run_dir)["oom_restarts"] == 1


def test_a_killed_worker_after_it_keeps_the_technique(tmp_path):
    """From the checkpoint of step 4, which was saved with it."""
    faults = [Fault("backward", 2, 20), Fault("backward", 5, 20, kind="kill", rank=1)]
    settings = ("parallel=ddp", *ONE_SAMPLE, *SABOTAGED)
    ended = launch(tmp_path / "run", *settings, env=environment(tmp_path, *faults))
    assert [fired(tmp_path, fault) for fault in faults] == [1, 1]
    assert ended.code == 0, ended.text
    assert f"{SELECTIVE} stays turned on, as in the checkpoint" in (tmp_path / "run" / "trainapp.log").read_text()
    assert [entry["attempt"] for entry in json.loads((tmp_path / "run" / "result.json").read_text())["turned_on"]] == [
        1
    ]
