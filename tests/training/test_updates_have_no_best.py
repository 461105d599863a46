"""With several updates and `objective=auto` no evaluation is better than another: the last checkpoint counts, and what
compares evaluations is refused.
"""

import csv
import os
import re

import helpers
import pytest
import runs
from helpers import run_cli
from test_updates import DISCRIMINATOR, GENERATOR, PARTS, TESTS

import trainapp
from trainapp.run.result import result_of

# Evaluated by the generator's loss, which grows while the discriminator learns faster.
LENGTH = ("train.max_steps=8", "every.eval=2", "every.save=2")
PARTS = (*(part for part in PARTS if not part.startswith("task=")), *LENGTH)
TWO = f"updates=[{DISCRIMINATOR.replace('0.02', '0.1')}, {GENERATOR.replace('0.05', '0.001')}]"
GAN = (*PARTS, TWO)
NO_BEST = "with several updates no single metric says which evaluation is best"
SET_OBJECTIVE = "set objective to choose one, such as objective='min loss'"
FEW = "checkpointing.keep_last=1"


def checkpoints(run_dir):
    """Names of files and folders in the run's folder of checkpoints."""
    return sorted(os.listdir(run_dir / "checkpoints"))


def load(run_dir, which="best"):
    return trainapp.load(run_dir, which, user_packages=["zoo"]).state_dict()


def test_the_last_checkpoint_counts(tmp_path, caplog, capsys):
    caplog.set_level("INFO", "trainapp")
    ended = runs.run(tmp_path, *GAN, FEW)
    losses = [line["loss"] for line in helpers.evaluations(tmp_path)]
    assert min(losses) < losses[-1]  # otherwise the last would be the best anyway
    assert (ended.objective, ended.metric, ended.direction) == (losses[-1], "loss", None)
    found = helpers.result(tmp_path)
    assert (found["best_objective"], found["best_step"], found["direction"]) == (None, None, None)
    assert found["objective"] == losses[-1]
    assert checkpoints(tmp_path) == ["step_00000008"]
    (line,) = [message for message in caplog.messages if NO_BEST in message]
    assert line.endswith(f"{NO_BEST}, so the last checkpoint counts; {SET_OBJECTIVE}")
    shown = capsys.readouterr().out
    assert re.search(rf"^eval loss +{losses[-1]:.4f}$", shown, re.MULTILINE)
    assert runs.differences(load(tmp_path), load(tmp_path, "last")) == []
    page = (tmp_path / "report.html").read_text()
    assert "at step" not in page.partition('"tiles"')[2].partition("]]")[0]


@pytest.mark.slow
def test_a_run_of_an_earlier_version_has_none_either(tmp_path):
    """It chose one: in `checkpoints/best` and in the state of the run."""
    chosen = runs.run(tmp_path / "a", *GAN, "objective=min loss", "checkpointing.keep_last=9")
    assert 0 < chosen.best_step < 8
    named = ("user_packages=[zoo]", f"checkpointing.resume={tmp_path / 'a'}")
    assert runs.run(tmp_path / "b", "mode=eval", *named).best_step == chosen.best_step
    assert runs.run(tmp_path / "c", "mode=eval", *named, "objective=auto").best_step is None

    runs.run(tmp_path / "d", *GAN, "checkpointing.keep_last=9")
    (tmp_path / "d/checkpoints/best").write_text("step_00000002\n")
    assert runs.differences(load(tmp_path / "d"), load(tmp_path / "d", "last")) == []
    assert runs.differences(load(tmp_path / "d"), load(tmp_path / "d", runs.checkpoint(tmp_path / "d", 2))) != []


def test_an_objective_chooses_one(tmp_path, caplog):
    caplog.set_level("INFO", "trainapp")
    ended = runs.run(tmp_path, *GAN, FEW, "objective=min loss")
    losses = {line["step"]: line["loss"] for line in helpers.evaluations(tmp_path)}
    best = min(losses, key=losses.get)
    assert (ended.best_step, ended.best_objective, ended.direction) == (best, losses[best], "min")
    assert checkpoints(tmp_path) == ["best", f"step_{best:08d}", "step_00000008"]
    assert runs.differences(load(tmp_path), load(tmp_path, runs.checkpoint(tmp_path, best))) == []
    assert NO_BEST not in caplog.text


def test_a_single_update_has_a_best(tmp_path):
    one = DISCRIMINATOR.replace("[discriminator]", "['*']")
    assert runs.run(tmp_path, *PARTS, f"updates=[{one}]").best_step > 0


def test_the_only_value_is_that_of_the_last_evaluation(tmp_path):
    """Whether an earlier one was a number is not known."""
    run = runs.closed(tmp_path, *GAN)
    run.state.progress.objective = float("nan")
    assert result_of(run).objective_note == "nan at the last evaluation"


def test_what_follows_the_best_is_refused(tmp_path):
    schedule = (*(own for own in GAN if own != "schedule=constant"), "schedule=plateau")
    plateau = "schedule._target_=torch.optim.lr_scheduler.ReduceLROnPlateau with objective=auto"
    assert runs.refusal(tmp_path / "a", *schedule) == f"{plateau}: {NO_BEST}; {SET_OBJECTIVE}"
    assert runs.run(tmp_path / "b", *schedule, "objective=min loss").steps == 8
    assert runs.run(tmp_path / "c", *GAN, "stopping.patience=9", "stopping.metric=min loss").best_step is None


SWEEP = ("-m", *runs.TINY, *GAN, "tracker=[]", "hydra.sweep.dir=sweep", "train.max_steps=2", "every.save=null")


def sweep(folder, *overrides):
    env = {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    return run_cli(*SWEEP, *overrides, cwd=folder, env=env)


@pytest.mark.slow
@pytest.mark.parametrize("compares", ["sweep.pruner=halving", "sweep.sampler=tpe", "sweep.storage=x"])
def test_a_sweep_that_compares_runs_is_refused(tmp_path, compares):
    if "tpe" in compares:
        pytest.importorskip("optuna")
    done = sweep(tmp_path, "optimizer.lr=0.1,0.2", compares)
    assert done.returncode == 2
    assert f"{compares} with objective=auto: {NO_BEST}; {SET_OBJECTIVE}" in done.stderr
    assert not (tmp_path / "sweep/0").exists()


@pytest.mark.slow
def test_a_grid_is_not_ranked(tmp_path):
    """Over two seeds, of which the table has the mean of the last evaluations."""
    done = sweep(tmp_path, "train.seed=0,1", "sweep.parallel=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"not ranked: 0, 1: {NO_BEST}; {SET_OBJECTIVE}" in done.stdout
    assert "best: job" not in done.stdout
    with open(tmp_path / "sweep/leaderboard.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["rank"], row["state"], row["best_objective"]) for row in rows] == [("", "finished", "")] * 2
    mean = sum(float(row["objective"]) for row in rows) / 2
    assert re.search(rf"^-  0,1  -  +{mean:.4g}", done.stdout, re.MULTILINE), done.stdout
