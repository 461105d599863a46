"""The table at the end of a multirun of plans."""

import json
import os

import pytest
from helpers import run_cli
from omegaconf import OmegaConf
from runs import MODELS

from trainapp.errors import Reported
from trainapp.launch.plan_table import PlanTable
from trainapp.planning.answer import complete
from trainapp.units import bytes_text

GPT = (*MODELS["gpt"], "train.device=cpu", "plan.levers=false")
SWEEP = ("-m", "mode=plan", *GPT, "hydra.sweep.dir=sweep")
REFUSAL = complete({"certainty": "refused", "reason": "too large"})


def rows(done):
    """The lines of the table, without its header."""
    lines = done.stdout.splitlines()
    (first,) = [number for number, line in enumerate(lines) if line.startswith("job ")]
    return lines[first + 1 :]


@pytest.mark.slow
def test_a_refused_configuration_is_a_row_with_its_reason(tmp_path):
    done = run_cli(*SWEEP, "model.width=16,17,-1", cwd=tmp_path)
    assert done.returncode == 2
    facts = json.loads((tmp_path / "sweep/0/plan.json").read_text())
    fits, refused, invalid = rows(done)
    assert fits.split() == ["0", *bytes_text(facts["peak_bytes"]).split(), "exact", "64", "40", "model.width=16"]
    # Once by the planner's process and once by the configuration's own rules.
    assert refused.split()[:6] == ["1", "-", "refused", "-", "-", "model.width=17"]
    assert refused.endswith("  model.width=17 must be divisible by model.heads=2")
    assert invalid.endswith("model.width=-1  model.width=-1: must be greater than 0")
    assert done.stderr == "trainapp: mode=plan: 2 of 3 configurations refused, see the table\n"
    assert done.stdout.count("must be") == 2  # each reason once


@pytest.mark.slow
def test_plans_of_an_earlier_sweep_are_not_in_the_table(tmp_path):
    for widths in ("16,32", "8"):
        done = run_cli(*SWEEP, f"model.width={widths}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert [row.split()[0] for row in rows(done)] == ["0"]
    assert "model.width=8" in rows(done)[0]  # with a single job all of its overrides
    assert (tmp_path / "sweep/1/plan.json").exists()


def sweep_of(folder, mode):
    """What Hydra passes to its callbacks at a sweep's start, and for its job 0."""
    hydra = {"sweep": {"dir": str(folder)}, "job": {"num": 0}, "runtime": {"output_dir": str(folder / "0")}}
    return OmegaConf.create({"mode": mode, "hydra": hydra})


@pytest.mark.parametrize("foreign", ['{"plan": "of another program"}', "[1]", "no json", json.dumps(REFUSAL)])
def test_files_that_are_no_plans_of_this_sweep(tmp_path, capsys, foreign):
    """Written while it runs: by another program, or by another sweep with the same directory."""
    table, config = PlanTable(), sweep_of(tmp_path, "plan")
    table.on_multirun_start(config)
    table.on_job_start(config, task_function=None)
    for name in ("1/plan.json", "refused_1.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(foreign)
    if foreign != json.dumps(REFUSAL):
        (tmp_path / "0").mkdir()
        (tmp_path / "0/plan.json").write_text(foreign)
    table.on_job_end(config, job_return=None)
    table.on_multirun_end(config)
    assert capsys.readouterr().out == ""
    (tmp_path / "0").mkdir(exist_ok=True)  # the same, with a job's own file: it is in the table
    (tmp_path / "0/plan.json").write_text(json.dumps(REFUSAL))
    table.on_job_end(config, job_return=None)
    with pytest.raises(Reported):
        table.on_multirun_end(config)
    assert "too large" in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["train", "plan"])
def test_the_directory_of_a_sweep_is_not_searched(tmp_path, monkeypatch, mode):
    """It may be a home directory, as with hydra.sweep.dir=."""
    for number in range(20):
        (tmp_path / "files" / str(number)).mkdir(parents=True)
    listed = []
    scandir, listdir = os.scandir, os.listdir
    monkeypatch.setattr(os, "scandir", lambda path=".": (listed.append(path), scandir(path))[1])
    monkeypatch.setattr(os, "listdir", lambda path=".": (listed.append(path), listdir(path))[1])
    table, config = PlanTable(), sweep_of(tmp_path, mode)
    table.on_multirun_start(config)
    table.on_job_start(config, task_function=None)
    table.on_job_end(config, job_return=None)
    table.on_multirun_end(config)
    assert not [path for path in map(str, listed) if not path.startswith(f"{tmp_path}/.plans-")]


@pytest.mark.slow
def test_jobs_in_processes_of_their_own(tmp_path):
    """As a launcher such as submitit starts them."""
    submitit = ("hydra/launcher=submitit_local", "hydra.launcher.timeout_min=2")
    done = run_cli(*SWEEP, *submitit, "model.width=16,17", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert [row.split()[0] for row in rows(done)] == ["0", "1"]
    assert done.stderr.endswith("trainapp: mode=plan: 1 of 2 configurations refused, see the table\n")
    assert {path.name for path in (tmp_path / "sweep").iterdir()} == {"0", "1", "multirun.yaml", ".submitit"}


@pytest.mark.slow
def test_jobs_outside_the_sweeps_directory(tmp_path):
    elsewhere = f"hydra.sweep.subdir={tmp_path}/elsewhere/${{hydra:job.num}}"
    done = run_cli(*SWEEP, elsewhere, "model.width=16,32", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [row.split()[0] for row in rows(done)] == ["0", "1"]
