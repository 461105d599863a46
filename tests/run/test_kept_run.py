"""A plan leaves the directory of a run as it is: Hydra would write its configuration over the run's."""

import json
import os

import pytest
from helpers import PLAN_FILES, files, run_cli, train
from runs import MODELS, TINY

from trainapp.run import kept_run, lock

GPT = (*MODELS["gpt"], "train.device=cpu", "plan.levers=false")


def contents(folder):
    """Every file with its bytes and its time."""
    return {name: ((folder / name).read_bytes(), (folder / name).stat().st_mtime_ns) for name in files(folder)}


def refused(done, setting):
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"trainapp: mode=plan with {setting}=")
    assert done.stderr.count("\n") == 1
    return True


@pytest.mark.slow
def test_a_plan_in_a_runs_directory_is_refused_and_changes_nothing(tmp_path):
    train(tmp_path / "run", *TINY, *MODELS["gpt"], "train.max_steps=2")
    before = contents(tmp_path / "run")
    assert refused(run_cli("mode=plan", *GPT, "hydra.run.dir=run", cwd=tmp_path), "hydra.run.dir")
    assert contents(tmp_path / "run") == before
    train(tmp_path / "run", *TINY, *MODELS["gpt"], "train.max_steps=3")  # and the run can continue
    assert contents(tmp_path / "run") != before  # else the comparison above would say nothing


@pytest.mark.parametrize("left", ["mode: train\n", "mode: eval\n", "model: {}\n", "{not yaml", ""])
def test_a_run_that_was_killed_at_its_start_counts_too(tmp_path, left):
    """Its configuration is all that there is of it."""
    (tmp_path / "run/.hydra").mkdir(parents=True)
    (tmp_path / "run/.hydra/config.yaml").write_text(left)
    assert refused(run_cli("mode=plan", *GPT, "hydra.run.dir=run", cwd=tmp_path), "hydra.run.dir")
    assert files(tmp_path / "run") == {".hydra/config.yaml"}


@pytest.mark.slow
def test_a_plans_directory_can_be_planned_in_again_and_then_trained_in(tmp_path):
    for size in (1, 2):
        train(tmp_path / "here", "mode=plan", *GPT, f"batch.micro_size={size}")
    assert "micro_size: 2" in (tmp_path / "here/.plan/config.yaml").read_text()
    assert files(tmp_path / "here") == {*PLAN_FILES, "plan.json", "plan.png"}
    train(tmp_path / "here", *TINY, *MODELS["gpt"], "train.max_steps=1")
    assert refused(run_cli("mode=plan", *GPT, "hydra.run.dir=here", cwd=tmp_path), "hydra.run.dir")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["mode=plan", "mode=plan,train", "+mode='plan',eval"])
def test_a_sweep_of_plans_over_a_sweep_of_runs_is_refused(tmp_path, mode):
    sweep = ("-m", *TINY, *MODELS["gpt"], "train.max_steps=1", "train.seed=1,2", "hydra.sweep.dir=sweep")
    done = run_cli(*sweep, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    before = contents(tmp_path / "sweep")
    done = run_cli("-m", mode, *GPT, "train.seed=3,4", "hydra.sweep.dir=sweep", cwd=tmp_path)
    assert refused(done, "hydra.sweep.dir")
    assert contents(tmp_path / "sweep") == before


@pytest.fixture
def recipes(tmp_path):
    """A folder with experiments that train, and that plan."""
    folder = tmp_path / "recipes/experiment"
    folder.mkdir(parents=True)
    for mode in ("train", "plan"):
        (folder / f"{mode}s.yaml").write_text(f"# @package _global_\nmode: {mode}\n")
    return "--config-dir=recipes"


def refused_in_the_table(done, *jobs):
    """Exit code 2, and a row with the reason for each of these jobs."""
    assert done.returncode == 2, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if " refused " in line]
    assert [row[0] for row in rows] == list(jobs), done.stdout
    return True


@pytest.mark.slow
@pytest.mark.parametrize("experiments", ["plans", "plans,trains"])
def test_whatever_chose_the_mode_no_file_of_a_run_is_written_over(tmp_path, recipes, experiments):
    """An experiment's file may be swept: then only the jobs themselves are plans."""
    one = (*TINY, *MODELS["gpt"], "train.max_steps=1")
    train(tmp_path / "sweep/0", *one)
    before = contents(tmp_path / "sweep/0")
    done = run_cli("-m", recipes, f"experiment={experiments}", *one, "hydra.sweep.dir=sweep", cwd=tmp_path)
    if experiments == "plans":
        assert refused(done, "hydra.sweep.dir")
        assert contents(tmp_path / "sweep/0") == before
        return
    assert refused_in_the_table(done, "0")
    after = contents(tmp_path / "sweep/0")
    assert after.keys() - before.keys() == PLAN_FILES
    assert {name: after[name] for name in before} == before
    assert (tmp_path / "sweep/1/result.json").exists()


@pytest.mark.slow
def test_a_single_plan_that_an_experiment_asks_for(tmp_path, recipes):
    train(tmp_path / "run", *TINY, *MODELS["gpt"], "train.max_steps=1")
    before = contents(tmp_path / "run")
    done = run_cli(recipes, "experiment=plans", *GPT, "hydra.run.dir=run", cwd=tmp_path)
    assert refused(done, "hydra.run.dir")
    assert contents(tmp_path / "run") == before


@pytest.mark.slow
def test_a_run_and_a_plan_in_one_directory_of_a_sweep(tmp_path):
    one = (*TINY, *MODELS["gpt"], "train.max_steps=1", "plan.levers=false")
    into = ("hydra.sweep.dir=sweep", "hydra.sweep.subdir=same")
    done = run_cli("-m", "mode=train,plan", *one, *into, cwd=tmp_path)
    assert refused_in_the_table(done, "1")
    assert "this directory holds a run" in done.stdout
    assert "mode: train" in (tmp_path / "sweep/same/.hydra/config.yaml").read_text()
    assert not (tmp_path / "sweep/same/plan.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("left", ["metrics.jsonl", "tensorboard", "trainapp.log"])
def test_a_run_whose_configuration_hydra_did_not_write(tmp_path, left):
    """As with hydra.output_subdir=null."""
    train(tmp_path / "sweep/run", *TINY, *MODELS["gpt"], "train.max_steps=1", "hydra.output_subdir=null")
    (tmp_path / "killed").mkdir()
    (tmp_path / "sweep/run" / left).rename(tmp_path / "killed" / left)
    for folder in ("sweep/run", "killed"):
        assert refused(run_cli("mode=plan", *GPT, f"hydra.run.dir={folder}", cwd=tmp_path), "hydra.run.dir")
    done = run_cli("-m", "mode=plan", *GPT, "hydra.sweep.dir=sweep", cwd=tmp_path)
    assert refused(done, "hydra.sweep.dir")


@pytest.mark.slow
def test_nothing_is_written_into_a_directory_that_another_run_holds(tmp_path):
    """But Hydra's own account of the plan."""
    train(tmp_path / "sweep/0", "mode=plan", *GPT)
    before = contents(tmp_path / "sweep/0")
    lock.acquire(tmp_path / "sweep/0")
    try:
        done = run_cli("-m", "mode=plan", *GPT, "model.width=16,32", "hydra.sweep.dir=sweep", cwd=tmp_path)
    finally:
        lock.release(tmp_path / "sweep/0")
    assert refused_in_the_table(done, "0")
    assert "another run is using this directory" in done.stdout
    assert "model.width=16" in done.stdout  # the refused job's own override
    assert contents(tmp_path / "sweep/0")["plan.json"] == before["plan.json"]
    assert json.loads((tmp_path / "sweep/refused_0.json").read_text())["certainty"] == "refused"
    assert json.loads((tmp_path / "sweep/1/plan.json").read_text())["certainty"] == "exact"


@pytest.mark.slow
def test_what_was_taken_for_a_run_is_named(tmp_path):
    (tmp_path / "mine/checkpoints").mkdir(parents=True)
    done = run_cli("mode=plan", *GPT, "hydra.run.dir=mine", cwd=tmp_path)
    assert refused(done, "hydra.run.dir")
    assert "holds a run (it has checkpoints), " in done.stderr
    (tmp_path / "sweep/0/.hydra").mkdir(parents=True)
    (tmp_path / "sweep/0/.hydra/config.yaml").write_text("mode: train\n")
    done = run_cli("-m", "mode=plan", *GPT, "hydra.sweep.dir=sweep", cwd=tmp_path)
    assert refused(done, "hydra.sweep.dir")
    assert "holds runs (sweep/0 has .hydra/config.yaml), " in done.stderr


def test_a_large_tree_is_not_searched(tmp_path, monkeypatch):
    """A sweep's directory may be a home directory."""
    (tmp_path / "a/b/c/d/checkpoints").mkdir(parents=True)
    assert kept_run.runs_below(tmp_path) == {}
    assert kept_run.runs_below(tmp_path / "a") == {tmp_path / "a/b/c/d": "checkpoints"}
    for number in range(2000):
        (tmp_path / str(number)).mkdir()
    opened, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (opened.append(path), scandir(path))[1])
    kept_run.runs_below(tmp_path)
    assert 1 <= len(opened) <= 1001


@pytest.mark.slow
def test_a_run_too_deep_for_that_is_kept_all_the_same(tmp_path):
    """By its own job."""
    deep = tmp_path / "sweep/a/b/c/d"
    train(deep, *TINY, *MODELS["gpt"], "train.max_steps=1")
    before = contents(deep)
    into = ("hydra.sweep.dir=sweep", "hydra.sweep.subdir=a/b/c/d")
    assert refused_in_the_table(run_cli("-m", "mode=plan", *GPT, *into, cwd=tmp_path), "0")
    after = contents(deep)
    assert after.keys() - before.keys() == PLAN_FILES
    assert {name: after[name] for name in before} == before
