"""Sweeps by the command line: what they leave, how they continue, and what is refused before anything runs."""

import collections
import csv
import json
import re
import shlex
import signal
import subprocess
import sys

import pytest
import yaml
from helpers import environment, lines, lines_in, metrics, result, run_cli, train, wait_until
from runs import MODELS, TINY

pytestmark = pytest.mark.slow
QUICK = (*TINY, *MODELS["mlp"], "tracker=[]", "train.max_steps=4", "every.eval=2")
SWEEP = ("-m", *QUICK, "hydra.sweep.dir=sweep")
MINE = ("model._target_=mine.Net", "user_packages=[mine]")
# Five is too many until a file says that it was mended; a training step takes 10 ms.
NET = """import os, time
from trainapp.models.mlp import MLP
class Net(MLP):
    def __init__(self, image_shape, num_classes, width: int, depth, dropout):
        super().__init__(image_shape, num_classes, width=width, depth=depth, dropout=dropout)
        self.is_broken = width == 5 and not os.path.exists("mended")
    def forward(self, images):
        if self.is_broken:
            raise TypeError("five is too many")
        time.sleep(0.01 * self.training)
        return super().forward(images)
"""


def journal(folder, event):
    """The events of a kind: how many of each job."""
    return collections.Counter(line["number"] for line in lines(folder / "sweep.jsonl") if line["event"] == event)


def table(folder):
    """The lines of leaderboard.csv, by job."""
    with open(folder / "leaderboard.csv", newline="") as file:
        return {row["job"]: row for row in csv.DictReader(file)}


def start(cwd, *arguments):
    command = [sys.executable, "-m", "trainapp", *arguments]
    return subprocess.Popen(
        command, cwd=cwd, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_a_failed_job_stays_alone_and_runs_again_when_asked(tmp_path):
    """Over two seeds, of which the table has mean and standard deviation."""
    (tmp_path / "mine.py").write_text(NET)
    (tmp_path / "own").mkdir()
    given = ("--config-dir=own", *SWEEP, *MINE, "model.width=4,5", "train.seed=0,1", "sweep.parallel=2")
    done = run_cli(*given, cwd=tmp_path)
    assert done.returncode == 1
    assert "job 2 failed: TypeError: five is too many; see sweep/2/console.log" in done.stdout
    assert "Traceback" in (tmp_path / "sweep/2/console.log").read_text()
    rows = table(tmp_path / "sweep")
    assert [rows[job]["state"] for job in "0123"] == ["finished", "finished", "failed", "failed"]
    assert [(rows[job]["model.width"], rows[job]["train.seed"]) for job in "0123"] == [
        ("4", "0"),
        ("4", "1"),
        ("5", "0"),
        ("5", "1"),
    ]
    assert float(rows["1"]["best_objective"]) == result(tmp_path / "sweep/1")["best_objective"]
    assert rows["3"]["error"] == "TypeError: five is too many"

    (tmp_path / "mended").touch()
    again = run_cli("continue", "sweep", cwd=tmp_path)
    assert (again.returncode, journal(tmp_path / "sweep", "start")) == (1, {0: 1, 1: 1, 2: 1, 3: 1})
    last = run_cli("continue", "sweep", "sweep.retry_failed=true", cwd=tmp_path)
    assert last.returncode == 0, last.stdout + last.stderr
    assert journal(tmp_path / "sweep", "start") == {0: 1, 1: 1, 2: 2, 3: 2}
    own = [result(tmp_path / f"sweep/{job}")["best_objective"] for job in (2, 3)]
    mean, spread = sum(own) / 2, abs(own[0] - own[1]) / 2**0.5
    assert f"2,3  {mean:.4g} ± {spread:.2g}" in last.stdout
    best = max(table(tmp_path / "sweep").values(), key=lambda row: float(row["best_objective"]))
    assert f"best: job {best['job']}" in last.stdout
    command = next(line for line in last.stdout.splitlines() if "mode=eval" in line).split("python -m trainapp ")[1]
    evaluated = run_cli(*shlex.split(command), cwd=tmp_path)
    assert f"(best {float(best['best_objective']):.4f}" in evaluated.stdout, evaluated.stderr


@pytest.mark.timeout(180)
def test_a_sweep_continues_where_it_was_as_if_nothing_had_happened(tmp_path):
    """Stopped by Ctrl-C in its first job, and killed in its second, which outlives it."""
    (tmp_path / "mine.py").write_text(NET)
    given = (*SWEEP[:-1], *MINE, "train.max_steps=200", "every.eval=50", "train.seed=0,1,2")
    whole = run_cli(*given, "hydra.sweep.dir=undisturbed", cwd=tmp_path)
    assert whole.returncode == 0, whole.stdout

    with start(tmp_path, *given, "hydra.sweep.dir=sweep") as process:
        wait_until(lambda: lines_in(tmp_path / "sweep/0/metrics.jsonl") > 60, process)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[0]
    assert process.returncode == 75, said
    assert "SIGINT: the running jobs save and end" in said
    assert said.endswith("Continue with:\n  python -m trainapp continue sweep\n")
    steps = result(tmp_path / "sweep/0")["steps"]
    assert 50 < steps < 200

    with start(tmp_path, "continue", "sweep") as process:
        wait_until(lambda: lines_in(tmp_path / "sweep/1/metrics.jsonl") > 10, process)
        process.kill()
    done = run_cli("continue", "sweep", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "job 1 still runs" in done.stdout
    assert journal(tmp_path / "sweep", "trial") == {0: 1, 1: 1, 2: 1}
    assert journal(tmp_path / "sweep", "start") == {0: 2, 1: 1, 2: 1}
    for job in range(3):
        own, undisturbed = (tmp_path / name / str(job) for name in ("sweep", "undisturbed"))
        assert lines(own / "evaluations.jsonl") == lines(undisturbed / "evaluations.jsonl")
        assert [line["loss"] for line in metrics(own)] == [line["loss"] for line in metrics(undisturbed)]

    over = run_cli("continue", "sweep", cwd=tmp_path)
    assert (over.returncode, "starts" in over.stdout) == (0, False)


def test_what_could_not_start_is_named_before_anything_runs(tmp_path):
    wrong = ("model.width=4,-1", "optimizer.lr=0.1,0", "train.seed=x,1")
    done = run_cli(*SWEEP, *wrong, cwd=tmp_path)
    assert done.returncode == 2
    assert "these jobs could not start" in done.stderr
    assert "model.width=-1 optimizer.lr=0.1 train.seed=1: model.width=-1: must be greater than 0" in done.stderr
    both = "model.width=4 optimizer.lr=0 train.seed=1, model.width=-1 optimizer.lr=0 train.seed=1"  # one message
    assert f"{both}: optimizer.lr=0: must be greater than 0" in done.stderr
    assert "train.seed=x: must be a valid integer" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "sweep").glob("*/"))
    again = run_cli(*SWEEP, "model.width=4", "train.max_steps=1", cwd=tmp_path)  # it left no trace of a sweep
    assert again.returncode == 0, again.stderr


def test_jobs_of_a_sweep_read_the_same_files(tmp_path):
    (tmp_path / "experiment").mkdir()
    for name in ("one", "two"):
        (tmp_path / f"experiment/{name}.yaml").write_text("# @package _global_\ntrain: {max_steps: 2}\n")
    given = ("--config-dir", ".", "-m", *QUICK[:2], "model=mlp", "experiment=one,two", "hydra.sweep.dir=sweep")
    assert run_cli(*given, "train.seed=0", "sweep.trials=1", cwd=tmp_path).returncode == 0
    (tmp_path / "experiment/two.yaml").write_text("# @package _global_\ntrain: {max_steps: 3}\n")
    changed = run_cli(*given, "train.seed=0", cwd=tmp_path)  # the first job is not affected
    assert changed.returncode == 1
    assert "job 1 failed: the configuration has changed since the sweep began" in changed.stdout
    (tmp_path / "experiment/one.yaml").write_text("# @package _global_\ntrain: {max_steps: 3}\n")
    refused = run_cli("continue", "sweep", cwd=tmp_path)
    assert refused.returncode == 2
    assert "train.max_steps: 2 before, 3 now" in refused.stderr


def test_a_grid_may_grow_and_nothing_else_may_change(tmp_path):
    assert run_cli(*SWEEP, "train.seed=0", cwd=tmp_path).returncode == 0
    grown = run_cli(*SWEEP, "train.seed=0,1", cwd=tmp_path)
    assert grown.returncode == 2  # a setting that was not swept
    assert "train.seed: 0 before, 0, 1 now" in grown.stderr
    first = run_cli(*SWEEP[:-1], "train.seed=choice(0)", "hydra.sweep.dir=grid", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    grown = run_cli(*SWEEP[:-1], "train.seed=1,0", "hydra.sweep.dir=grid", cwd=tmp_path)
    assert grown.returncode == 0, grown.stderr
    assert journal(tmp_path / "grid", "start") == {0: 1, 1: 1}
    assert {job: row["train.seed"] for job, row in table(tmp_path / "grid").items()} == {"0": "0", "1": "1"}
    other = run_cli(*SWEEP[:-1], "train.seed=1,0", "hydra.sweep.dir=grid", "train.max_steps=5", cwd=tmp_path)
    assert other.returncode == 2
    assert "train.max_steps: 4 before, 5 now" in other.stderr
    assert "this directory belongs to another sweep" in other.stderr
    random = ("hydra.sweep.dir=random", "sweep.sampler=random", "train.seed=range(9)", "sweep.trials=1")
    assert run_cli(*SWEEP[:-1], *random, cwd=tmp_path).returncode == 0
    more = run_cli("continue", "random", "sweep.trials=2", cwd=tmp_path)
    assert more.returncode == 0, more.stderr
    assert "sweep of 2 jobs" in run_cli("continue", "random", cwd=tmp_path).stdout  # it stays


def test_halving_pauses_runs_and_the_best_goes_on_exactly(tmp_path):
    """The better of two at a half of their length; the first is paused there, since it is alone."""
    given = ("sweep.pruner=halving", "sweep.eta=2", "sweep.rungs=1", "train.max_steps=8", "optimizer.lr=0.02,1e-9")
    done = run_cli(*SWEEP, *given, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert journal(tmp_path / "sweep", "start") == {0: 2, 1: 1}
    assert "job 0 paused at step 4" in done.stdout
    assert {job: row["state"] for job, row in table(tmp_path / "sweep").items()} == {"0": "finished", "1": "paused"}
    paused = result(tmp_path / "sweep/1")
    assert (paused["steps"], paused["ended"], paused["stopped"]["signal"]) == (4, "sweep.pruner", "sweep.pruner")
    train(tmp_path / "alone", *QUICK, "train.max_steps=8", "optimizer.lr=0.02")
    for name in ("evaluations.jsonl", "metrics.jsonl"):
        losses = [
            [line["loss"] for line in lines(folder / name)] for folder in (tmp_path / "sweep/0", tmp_path / "alone")
        ]
        assert losses[0] == losses[1]
    # One that was paused may be taken up by hand, too.
    assert run_cli("continue", "sweep/1", cwd=tmp_path).returncode == 0
    assert result(tmp_path / "sweep/1")["steps"] == 8


def test_tpe_on_two_slots_with_what_does_not_fit(tmp_path):
    """Wide models do not fit in half of the limit, and the sampler learns it."""
    pytest.importorskip("optuna")
    given = ("sweep.sampler=tpe", "sweep.trials=5", "sweep.parallel=2", "model.width=int(tag(log,interval(4,4096)))")
    done = run_cli(*SWEEP, *given, "memory.limit=4MiB", cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = table(tmp_path / "sweep")
    assert {row["state"] for row in rows.values()} == {"finished", "infeasible"}
    assert min(int(r["model.width"]) for r in rows.values() if r["state"] == "infeasible") > 200
    config = yaml.safe_load((tmp_path / "sweep/0/.hydra/config.yaml").read_text())
    assert config["memory"]["limit"] == 2 * 2**20
    assert all(line["threads"] == 1 for line in lines(tmp_path / "sweep/sweep.jsonl") if line["event"] == "start")


@pytest.mark.timeout(180)
def test_jobs_share_a_device_where_their_plans_fit(tmp_path):
    """Of 3.6 MiB (nine tenths of the limit), they need 3.7, 1.7 and 0.3: the first has it alone."""
    (tmp_path / "mine.py").write_text(NET)
    given = (*MINE, "model.width=455,300,100,4096", "train.max_steps=300", "sweep.pack=true", "sweep.parallel=3")
    done = run_cli(*SWEEP, *given, "memory.limit=4MiB", cwd=tmp_path, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = table(tmp_path / "sweep")
    assert [rows[job]["state"] for job in "0123"] == ["finished", "finished", "finished", "infeasible"]
    assert re.search(r"by its plan at micro-batch 1: it needs \d+\.\d MiB", rows["3"]["error"])
    assert not (tmp_path / "sweep/3/.hydra").exists()
    events = [(line["event"], line.get("number")) for line in lines(tmp_path / "sweep/sweep.jsonl")]
    at = {event: place for place, event in enumerate(events)}
    assert at["start", 0] < at["end", 0] < at["start", 1] < at["start", 2] < at["end", 1]
    configs = [yaml.safe_load((tmp_path / f"sweep/{job}/.hydra/config.yaml").read_text()) for job in range(3)]
    limits = [config["memory"]["limit"] for config in configs]
    assert limits[0] == "4MiB"
    assert [limit / 2**20 for limit in limits[1:]] == pytest.approx([1.7, 0.3], abs=0.1)
    assert [rows[job]["oom_restarts"] for job in "012"] == ["0", "0", "0"]


def test_jobs_are_composed_as_hydra_composes_them(tmp_path):
    """With a folder of configurations, groups, added and removed settings, and Hydra's resolvers."""
    (tmp_path / "own/experiment").mkdir(parents=True)
    own = "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      model.width: 4,8\n"
    (tmp_path / "own/experiment/mine.yaml").write_text(
        own + "user_packages:\n  - p${hydra:job.num}\n  - y${now:%Y}\nsweep:\n  seed: 3\n"
    )
    given = (
        "--config-dir=own",
        "experiment=mine",
        *(text for text in QUICK if text != "model.width=16"),
        "~data.drop_last",
        "++data.augment=false",
        "+data@eval.hard=digits",
        "train.max_steps=1",
    )
    given = (*given, "precision=bf16,fp32", "hydra.sweep.subdir=${hydra:job.num}_${model.width}", "every.eval=null")
    found = []
    for name, more in (("trainapp", ()), ("basic", ("hydra/sweeper=basic",))):
        done = run_cli(*given, *more, f"hydra.sweep.dir={name}", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(
            {
                path.parts[-3]: yaml.safe_load(path.read_text())
                for path in (tmp_path / name).glob("*/.hydra/config.yaml")
            }
        )
    assert sorted(found[0]) == ["0_4", "1_4", "2_8", "3_8"]
    assert found[0] == found[1]


def test_through_a_launcher_of_hydra(tmp_path):
    """submitit's local mode: a job in a process that the launcher starts, one at a time in each of two slots."""
    (tmp_path / "mine.py").write_text(NET)
    submitit = ("hydra/launcher=submitit_local", "hydra.launcher.timeout_min=2", "sweep.parallel=2")
    done = run_cli(*SWEEP, *submitit, *MINE, "model.width=4,5,6", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    rows = table(tmp_path / "sweep")
    assert [rows[job]["state"] for job in "012"] == ["finished", "failed", "finished"]
    assert rows["1"]["error"] == "TypeError: five is too many"


def test_another_sweeper_of_hydra_has_the_table_and_must_look_in_the_right_direction(tmp_path):
    done = run_cli(*SWEEP, "hydra/sweeper=basic", "train.seed=0,1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert set(table(tmp_path / "sweep")) == {"0", "1"}
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins/seeker.py").write_text(
        "from hydra._internal.core_plugins.basic_sweeper import BasicSweeper\n"
        "class Seeker(BasicSweeper):\n"
        "    def __init__(self, direction, params=None):\n"
        "        super().__init__(None)\n"
    )
    own = ("hydra.sweeper._target_=hydra_plugins.seeker.Seeker", "train.seed=0,1")
    wrong = run_cli(*SWEEP[:-1], *own, "+hydra.sweeper.direction=minimize", "hydra.sweep.dir=w", cwd=tmp_path)
    assert wrong.returncode != 0
    assert "the objective of these runs is max accuracy; set hydra.sweeper.direction=maximize" in wrong.stderr
    right = run_cli(*SWEEP[:-1], *own, "+hydra.sweeper.direction=maximize", "hydra.sweep.dir=r", cwd=tmp_path)
    assert right.returncode == 0, right.stderr


def test_plans_have_a_table_of_their_own(tmp_path):
    given = ("-m", *MODELS["gpt"], "train.device=cpu", "plan.techniques=false", "mode=plan", "model.width=16,32")
    done = run_cli(*given, "hydra.sweep.dir=sweep", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "largest micro-batch" in done.stdout
    assert re.findall(r"^(\d)  .*model.width=(\d+)", done.stdout, re.MULTILINE) == [("0", "16"), ("1", "32")]
    peaks = [json.loads((tmp_path / f"sweep/{job}/plan.json").read_text())["peak_bytes"] for job in (0, 1)]
    assert peaks[0] < peaks[1]


def test_limits_of_a_sweep(tmp_path):
    """By time, and by the number of failures; both are continued by the same command."""
    (tmp_path / "mine.py").write_text(NET)
    long = (*MINE, "train.max_steps=100000", "train.seed=0,1", "sweep.max_time=12s", "every.eval=null")
    done = run_cli(*SWEEP, *long, cwd=tmp_path)
    assert done.returncode == 75, done.stdout
    assert "sweep.max_time: the running jobs save and end" in done.stdout
    assert (tmp_path / "sweep/0/checkpoints").exists()
    assert not (tmp_path / "sweep/1").exists()
    given = (*MINE, "model.width=5,4", "sweep.max_failures=1", "hydra.sweep.dir=failing")
    assert run_cli(*SWEEP[:-1], *given, cwd=tmp_path).returncode == 1
    assert journal(tmp_path / "failing", "start") == {0: 1}


def test_a_run_is_continued_and_run_again_by_its_directory(tmp_path):
    (tmp_path / "own").mkdir()
    train(tmp_path / "own/run", *QUICK, "train.max_epochs=1", "train.max_steps=null", cwd=tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    longer = run_cli("continue", str(tmp_path / "own/run"), "train.max_epochs=2", cwd=elsewhere)
    assert longer.returncode == 0, longer.stderr
    assert result(tmp_path / "own/run")["steps"] == 180
    again = run_cli(
        "rerun", "../own/run", "train.seed=5", "model=resnet", "model.width=4", "hydra.run.dir=second", cwd=elsewhere
    )
    assert again.returncode == 0, again.stderr
    given = yaml.safe_load((elsewhere / "second/.hydra/overrides.yaml").read_text())
    assert {"train.seed=5", "model=resnet", "model.width=4", "train.max_epochs=2"} <= set(given)
    assert "model=mlp" not in given
    both = run_cli("leaderboard", str(tmp_path), cwd=elsewhere)
    assert both.returncode == 0, both.stderr
    assert {"own/run", "elsewhere/second"} == set(table(tmp_path))
    nothing = run_cli("continue", str(tmp_path), cwd=elsewhere)
    assert nothing.returncode == 2
    assert "neither a sweep nor a run" in nothing.stderr
