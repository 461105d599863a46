"""Workers that die, freeze or are stopped, full disks: through the real launcher, nothing is lost."""

import json
import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from faults import Fault, environment, fired
from helpers import metrics, result
from runs import differences

from trainapp.files import LOG
from trainapp.signals import TO_BE_CONTINUED

from .launching import SABOTAGED, Ended, Launched, checkpoint, command, launch

pytestmark = pytest.mark.slow

DDP = ("parallel=ddp", *SABOTAGED)


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Path:
    """The undisturbed run."""
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    ended = launch(run_dir, *DDP, env={"TRAINAPP_CACHE": str(run_dir / "cache"), **environment(run_dir)})
    assert ended.code == 0, ended.text
    return run_dir


def struck(tmp_path: Path, *overrides: str, faults: Sequence[Fault], code: int = 0) -> Ended:
    """Run in "run" until the end; each of the faults must strike. Return how it ended."""
    ended = launch(tmp_path / "run", *overrides, env=environment(tmp_path, *faults))
    assert [fired(tmp_path, fault) for fault in faults] == [fault.times for fault in faults]
    assert ended.code == code, ended.text
    return ended


def last(run_dir: Path) -> int:
    """Return the step of the newest checkpoint."""
    return max(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step_*"))


def test_killed_workers_are_started_again(reference, tmp_path):
    # In the backward of step 4, and inside the save of step 6 (shards written, no manifest yet): from 2, then from 4.
    faults = [Fault("backward", 4, 20, kind="kill", rank=1), Fault("manifest", 6, kind="kill")]
    struck(tmp_path, *DDP, faults=faults)
    assert differences(checkpoint(tmp_path / "run", 6), checkpoint(reference, 6)) == []
    log = (tmp_path / "run" / "trainapp.log").read_text()
    assert re.findall(r"resumed from \S+step_0*(\d+):", log) == ["2", "4"]
    assert [line["loss"] for line in metrics(tmp_path / "run")] == [line["loss"] for line in metrics(reference)]


def test_restarts_are_bounded(tmp_path):
    faults = [Fault("backward", step, kind="io error", rank=1) for step in (2, 3, 4)]  # another step each time
    ended = launch(tmp_path / "run", *DDP, "parallel.max_restarts=1", env=environment(tmp_path, *faults))
    assert [fired(tmp_path, fault) for fault in faults] == [1, 1, 0]
    assert ended.code == 1
    message = "rank 1 failed (exit code 1) after 1 restarts: OSError: injected failure (at step 3); its log is in"
    assert message in ended.text
    assert "in strike" in (tmp_path / "run" / "ranks" / "rank_1.log").read_text()  # the traceback


def test_an_error_of_code_ends_the_run_at_once(tmp_path):
    """With its traceback, though three restarts are allowed; the checkpoints of before stay."""
    fault = Fault("backward", 4, kind="exception", rank=1, times=9)
    ended = launch(tmp_path / "run", *DDP, env=environment(tmp_path, fault))
    assert fired(tmp_path, fault) == 1
    assert ended.code == 1
    message = (
        "an error that a restart would repeat: ValueError: out of memory, says the user (at step 4); its log is in"
    )
    assert ended.text.count(message) == 1
    assert "in strike" in ended.text.partition(message)[0]  # the traceback
    assert "in strike" in (tmp_path / "run" / "ranks" / "rank_1.log").read_text()
    assert last(tmp_path / "run") == 2
    assert not list((tmp_path / "run" / "ranks").glob("*.error"))


@pytest.mark.nightly
def test_a_worker_that_is_killed_again_at_the_same_step_is_restarted(reference, tmp_path):
    """What kills it may be gone; the other rank's error, a lost connection, counts for nothing."""
    struck(tmp_path, *DDP, faults=[Fault("backward", 4, kind="kill", rank=1, times=2)])
    assert differences(checkpoint(tmp_path / "run", 6), checkpoint(reference, 6)) == []


# A rank that runs out of memory without votes exits with a code of its own, and all workers restart.


@pytest.fixture(scope="module")
def restarted(tmp_path_factory) -> tuple[Path, str]:
    """The directory of a run whose rank 1 has run out of memory in step 3, and its output."""
    folder = tmp_path_factory.mktemp("restarted")
    fault = Fault("backward", 3, 20, rank=1)
    variables = {"TRAINAPP_CACHE": str(folder / "cache"), **environment(folder, fault)}
    ended = launch(folder / "run", *DDP, "parallel.vote_on_oom=never", env=variables)
    assert fired(folder, fault) == 1
    assert ended.code == 0, ended.text
    return folder / "run", ended.text


def test_without_votes_all_restart_from_the_last_checkpoint(reference, restarted):
    """At half the micro-batch, for the shape that failed."""
    run_dir, output = restarted
    assert re.search(r"exitcode *: 82", output)
    log = (run_dir / "ranks" / "rank_1.log").read_text()
    assert "all ranks restart from the last checkpoint with micro-batch 2 instead of 4" in log
    assert "ranks do not vote with parallel.vote_on_oom=never" in log
    peer = (run_dir / LOG).read_text()
    assert "rank 0: ends, since another rank has run out of memory" in peer
    schedule = result(run_dir)["micro_schedule"]
    assert (schedule["3"], sorted(schedule["4"].values())) == (2, [2, 4])
    assert result(run_dir)["oom_restarts"] == 1
    assert not (run_dir / "restart.json").exists()
    for line, expected in zip(metrics(run_dir), metrics(reference), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_without_votes_the_report_names_the_rank(restarted):
    run_dir, _ = restarted
    (report,) = (run_dir / "oom").glob("*.json")
    assert json.loads(report.read_text())["rank"] == 1
    assert "rank_1" in report.name


def test_what_is_written_down_replays_a_restart(reference, restarted, tmp_path):
    run_dir, _ = restarted
    schedule = json.dumps(result(run_dir)["micro_schedule"])
    again = launch(tmp_path / "again", *DDP, f"batch.micro_schedule='{schedule}'", env=environment(tmp_path))
    assert again.code == 0, again.text
    assert result(tmp_path / "again")["oom_restarts"] == 0
    assert differences(checkpoint(run_dir, 6), checkpoint(tmp_path / "again", 6)) == []
    assert differences(checkpoint(run_dir, 6), checkpoint(reference, 6)) != []  # negative control


@pytest.mark.nightly
def test_restarts_for_training_and_for_evaluation_do_not_undo_each_other(tmp_path):
    """No checkpoint holds the first one's size when the second comes: it would fail again, for ever."""
    faults = [Fault("backward", 1, 20, rank=1), Fault("evaluate", 1, 20)]
    fsdp = ("parallel=fsdp", *SABOTAGED, "parallel.vote_on_oom=never", "parallel.max_restarts=0", "every.eval=1")
    struck(tmp_path, *fsdp, "every.save=6", "data.min_length=9", faults=faults)
    facts = result(tmp_path / "run")
    assert (facts["oom_restarts"], facts["micro_size"], facts["steps"]) == (2, 2, 6)


def test_out_of_memory_recovered_in_place_names_its_rank(tmp_path):
    struck(tmp_path, *DDP, "data.min_length=9", faults=[Fault("backward", 3, 20, rank=1)])
    folder = tmp_path / "run" / "oom"
    assert sorted(path.name for path in folder.iterdir()) == [f"001_step_3_rank_1.{kind}" for kind in ("json", "png")]
    assert (folder / "001_step_3_rank_1.png").read_bytes().startswith(b"\x89PNG")
    assert "rank 1 ran out of memory at step 3" in (tmp_path / "run" / "trainapp.log").read_text()
    assert result(tmp_path / "run")["oom_restarts"] == 1


@pytest.mark.parametrize(
    ("to", "number"),
    [
        ("launcher", signal.SIGTERM),
        pytest.param("terminal", signal.SIGINT, marks=pytest.mark.nightly),
        pytest.param("launcher", signal.SIGUSR1, marks=pytest.mark.nightly),
        pytest.param("rank 1", signal.SIGTERM, marks=pytest.mark.nightly),
    ],
)
def test_a_signal_stops_all_and_the_same_command_goes_on(reference, tmp_path, to, number):
    run_dir = tmp_path / "run"
    slow = Fault("forward", 3, kind="slow")
    words = command(run_dir, *DDP, "every.save=null")
    with Launched(words, tmp_path, environment(tmp_path, slow)) as launched:
        launched.wait_for(slow.marker(tmp_path, 0))
        if to == "terminal":  # Ctrl-C goes to all of its processes
            os.killpg(launched.process.pid, number)
        else:
            os.kill(launched.process.pid if to == "launcher" else launched.workers()[int(to[-1])], number)
        ended = launched.end(30)
    assert ended.code == TO_BE_CONTINUED, ended.text
    assert ended.orphans == []
    (saved,) = (run_dir / "checkpoints").glob("step_*")  # one save: of this step, or of the next if a rank had begun it
    assert saved.name in ("step_00000003", "step_00000004")
    assert f"hydra.run.dir={run_dir}" in ended.text  # the command to resume
    if to == "terminal" or number == signal.SIGUSR1:
        return  # one resume per kind of target is enough
    again = launch(run_dir, *DDP, "every.save=null", env=environment(tmp_path, slow))
    assert again.code == 0, again.text
    assert differences(checkpoint(run_dir, 6), checkpoint(reference, 6)) == []


@pytest.mark.parametrize("asynchronous", ["false", pytest.param("true", marks=pytest.mark.nightly)])
def test_a_disk_that_is_full_on_one_rank(tmp_path, asynchronous):
    fault = Fault("save", 4, kind="disk full", rank=1)
    # A shard larger than the rank may write.
    wide = ("model.width=64", f"checkpointing.asynchronous={asynchronous}")
    ended = struck(tmp_path, *SABOTAGED, "parallel=fsdp", *wide, faults=[fault], code=1)
    assert "the checkpoint of step 4 could not be written to" in ended.text
    assert "rank 1" in ended.text
    assert re.search(r"is the disk full\?|File too large", ended.text)  # before Python 3.14 torch hides the latter
    assert "step_00000002" in ended.text  # the last intact one
    assert last(tmp_path / "run") == 2
    assert checkpoint(tmp_path / "run", 2)
    assert not list((tmp_path / "run" / "checkpoints").glob(".tmp*"))


def test_a_loss_that_is_not_a_number_stops_all(tmp_path):
    ended = struck(tmp_path, *DDP, faults=[Fault("forward", 3, 30, kind="nan", rank=1)], code=1)
    assert "step 3: the loss is not finite" in ended.text
    assert ended.text.count("is not finite") == 1  # reported once, not retried
    assert last(tmp_path / "run") == 2


@pytest.mark.nightly
def test_a_peer_that_vanishes(tmp_path):
    fault = Fault("backward", 4, 20, kind="freeze", rank=1)
    ended = struck(tmp_path, *DDP, "parallel.timeout=10", "parallel.max_restarts=0", faults=[fault], code=1)
    assert "rank 0 failed" in ended.text
    # 10 s, plus torch's 30 s for a process to exit before it is killed
    assert time.time() - fault.marker(tmp_path, 0).stat().st_mtime < 70
    assert last(tmp_path / "run") == 2
    assert checkpoint(tmp_path / "run", 2)
    assert not list((tmp_path / "run" / "checkpoints").glob("step_00000004"))


@pytest.mark.nightly
def test_killed_anywhere(tmp_path):
    """With FSDP and saves in the background; test_killed_workers_are_started_again has DDP and saves that wait."""
    overrides = (*SABOTAGED, "parallel=fsdp", "checkpointing.asynchronous=true")
    undisturbed = launch(tmp_path / "undisturbed", *overrides, env=environment(tmp_path))
    assert undisturbed.code == 0
    faults = [Fault("save", 4, kind="kill", rank=1), Fault("commit", 5, kind="kill", rank=1)]
    struck(tmp_path, *overrides, faults=faults)
    assert differences(checkpoint(tmp_path / "run", 6), checkpoint(tmp_path / "undisturbed", 6)) == []
