"""A plan leaves the directory of a run as it is: Hydra would write its configuration over the run's."""

import pytest
from helpers import files, run_cli, train
from runs import MODELS, TINY

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


def test_a_plan_in_a_runs_directory_is_refused_and_changes_nothing(tmp_path):
    train(tmp_path / "run", *TINY, *MODELS["gpt"], "train.max_steps=2")
    before = contents(tmp_path / "run")
    assert refused(run_cli("mode=plan", *GPT, "hydra.run.dir=run", cwd=tmp_path), "hydra.run.dir")
    assert contents(tmp_path / "run") == before
    train(tmp_path / "run", *TINY, *MODELS["gpt"], "train.max_steps=3")  # and the run can go on
    assert contents(tmp_path / "run") != before  # else the comparison above would say nothing


@pytest.mark.parametrize("left", ["mode: train\n", "mode: eval\n", "model: {}\n", "{not yaml", ""])
def test_a_run_that_was_killed_at_its_start_counts_too(tmp_path, left):
    """Its configuration is all that there is of it."""
    (tmp_path / "run/.hydra").mkdir(parents=True)
    (tmp_path / "run/.hydra/config.yaml").write_text(left)
    assert refused(run_cli("mode=plan", *GPT, "hydra.run.dir=run", cwd=tmp_path), "hydra.run.dir")
    assert files(tmp_path / "run") == {".hydra/config.yaml"}


def test_a_plans_directory_can_be_planned_in_again_and_then_trained_in(tmp_path):
    for size in (1, 2):
        train(tmp_path / "here", "mode=plan", *GPT, f"batch.micro_size={size}")
    assert "micro_size: 2" in (tmp_path / "here/.hydra/config.yaml").read_text()
    train(tmp_path / "here", *TINY, *MODELS["gpt"], "train.max_steps=1")
    assert refused(run_cli("mode=plan", *GPT, "hydra.run.dir=here", cwd=tmp_path), "hydra.run.dir")


@pytest.mark.parametrize("mode", ["mode=plan", "mode=plan,train", "+mode='plan',eval"])
def test_a_sweep_of_plans_over_a_sweep_of_runs_is_refused(tmp_path, mode):
    sweep = ("-m", *TINY, *MODELS["gpt"], "train.max_steps=1", "train.seed=1,2", "hydra.sweep.dir=sweep")
    done = run_cli(*sweep, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    before = contents(tmp_path / "sweep")
    done = run_cli("-m", mode, *GPT, "train.seed=3,4", "hydra.sweep.dir=sweep", cwd=tmp_path)
    assert refused(done, "hydra.sweep.dir")
    assert contents(tmp_path / "sweep") == before
