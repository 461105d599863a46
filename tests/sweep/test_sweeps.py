"""Sweeps by the command line: what they leave, how they continue, and what is refused before anything runs.

Each job is a process that imports torch, and so is the check of a new sweep: 2.5 s each. Tests have as few as show it.
"""

import collections
import csv
import json
import re
import shlex
import signal
import subprocess
import sys

import psutil
import pytest
import runs
import yaml
from helpers import environment, lines, lines_in, metrics, result, run_cli, train, wait_until

pytestmark = pytest.mark.slow
QUICK = (*runs.TINY, *runs.MODELS["mlp"], "tracker=[]", "train.max_steps=4", "every.eval=2")
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


def starts(sweep):
    """How often each job of a sweep was started, by number."""
    events = lines(sweep / "sweep.jsonl")
    return dict(collections.Counter(event["number"] for event in events if event["event"] == "start"))


def table(sweep):
    """The lines of leaderboard.csv, by job."""
    with open(sweep / "leaderboard.csv", newline="") as file:
        return {row["job"]: row for row in csv.DictReader(file)}


def states(sweep):
    """The state of each job in leaderboard.csv, in the order of their numbers."""
    rows = table(sweep)
    return [rows[job]["state"] for job in sorted(rows)]


def config_of(run):
    """The composed configuration of a run."""
    return yaml.safe_load((run / ".hydra/config.yaml").read_text())


def run_sweep(cwd, *overrides, status=0, **options):
    """Run a sweep in `sweep/`, which must end with this status. Return what it has printed."""
    done = run_cli(*SWEEP, *overrides, cwd=cwd, **options)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout if status != 2 else done.stderr


def continue_sweep(cwd, *overrides, status=0):
    """Continue the sweep in `sweep/`, which must end with this status. Return what it has printed."""
    done = run_cli("continue", "sweep", *overrides, cwd=cwd)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout if status != 2 else done.stderr


def start(cwd, *arguments):
    """Start a command, to send it a signal, or to read what it prints meanwhile."""
    command = [sys.executable, "-m", "trainapp", *arguments]
    unbuffered = {**environment(), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command, cwd=cwd, env=unbuffered, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_a_failed_job_stays_alone_and_runs_again_when_asked(tmp_path):
    (tmp_path / "mine.py").write_text(NET)
    (tmp_path / "configs").mkdir()
    sweep = tmp_path / "sweep"
    done = run_cli("--config-dir=configs", *SWEEP, *MINE, "every.save=2", "model.width=4,5", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "job 1 failed: TypeError: five is too many; see sweep/1/console.log" in done.stdout
    assert "Traceback" in (sweep / "1/console.log").read_text()
    assert result(sweep / "1")["error_kind"] == "exception"
    assert states(sweep) == ["finished", "failed"]
    rows = table(sweep)
    assert [rows[job]["model.width"] for job in "01"] == ["4", "5"]
    assert float(rows["0"]["best_objective"]) == result(sweep / "0")["best_objective"]
    assert rows["1"]["error"] == "TypeError: five is too many"

    (tmp_path / "mended").touch()
    continue_sweep(tmp_path, status=1)
    assert starts(sweep) == {0: 1, 1: 1}
    printed = continue_sweep(tmp_path, "sweep.retry_failed=true")
    assert starts(sweep) == {0: 1, 1: 2}
    assert states(sweep) == ["finished", "finished"]

    # The command that evaluates the best one.
    best = max(table(sweep).values(), key=lambda row: float(row["best_objective"]))
    assert f"best: job {best['job']}" in printed
    (command,) = [line for line in printed.splitlines() if "mode=eval" in line]
    evaluated = run_cli(*shlex.split(command.split("python -m trainapp ")[1]), cwd=tmp_path)
    assert f"(best {float(best['best_objective']):.4f}" in evaluated.stdout, evaluated.stderr


@pytest.mark.timeout(300)
def test_a_sweep_continues_where_it_was_as_if_nothing_had_happened(tmp_path):
    """Stopped by Ctrl-C in its first job, and killed in its second, which outlives it."""
    (tmp_path / "mine.py").write_text(NET)
    sweep = tmp_path / "sweep"
    settings = (*QUICK, *MINE, "train.max_steps=200", "every.eval=50")

    with start(tmp_path, "-m", *settings, "train.seed=0,1", "hydra.sweep.dir=sweep") as process:
        wait_until(lambda: lines_in(sweep / "0/metrics.jsonl") > 60, process)
        process.send_signal(signal.SIGINT)
        printed = process.communicate(timeout=60)[0]
    assert process.returncode == 75, printed
    assert "SIGINT: the running jobs save and end" in printed
    assert printed.endswith("Continue with:\n  python -m trainapp continue sweep\n")
    assert 50 < result(sweep / "0")["steps"] < 200

    with start(tmp_path, "continue", "sweep") as process:
        wait_until(lambda: lines_in(sweep / "1/metrics.jsonl") > 10, process)
        job_processes = psutil.Process(process.pid).children(recursive=True)
        for job_process in job_processes:  # the job waits until the sweep has found it, however slowly that starts
            job_process.suspend()
        process.kill()
    with start(tmp_path, "continue", "sweep") as process:
        for line in process.stdout:
            if "job 1 still runs" in line:
                for job_process in job_processes:
                    job_process.resume()
    assert process.returncode == 0
    assert starts(sweep) == {0: 2, 1: 1}
    for job in (0, 1):
        undisturbed = tmp_path / f"undisturbed{job}"
        train(undisturbed, *settings, f"train.seed={job}", cwd=tmp_path)
        assert lines(sweep / f"{job}/evaluations.jsonl") == lines(undisturbed / "evaluations.jsonl")
        assert [line["loss"] for line in metrics(sweep / str(job))] == [line["loss"] for line in metrics(undisturbed)]

    assert "starts" not in continue_sweep(tmp_path)


def test_what_could_not_start_is_named_before_anything_runs(tmp_path):
    message = run_sweep(tmp_path, "model.width=4,-1", "optimizer.lr=0.1,0", "train.seed=x,1", status=2)
    assert "these jobs could not start" in message
    assert "model.width=-1 optimizer.lr=0.1 train.seed=1: model.width=-1: must be greater than 0" in message
    both = "model.width=4 optimizer.lr=0 train.seed=1, model.width=-1 optimizer.lr=0 train.seed=1"  # one message
    assert f"{both}: optimizer.lr=0: must be greater than 0" in message
    assert "train.seed=x: must be a valid integer" in message
    assert "Traceback" not in message
    assert not list((tmp_path / "sweep").iterdir())  # no trace of a sweep: another one may be started there


def test_jobs_of_a_sweep_read_the_same_files(tmp_path):
    (tmp_path / "experiment").mkdir()
    for name in ("one", "two"):
        (tmp_path / f"experiment/{name}.yaml").write_text("# @package _global_\ntrain: {max_steps: 2}\n")
    settings = ("--config-dir", ".", "-m", *QUICK[:2], "model=mlp", "experiment=one,two", "hydra.sweep.dir=sweep")
    assert run_cli(*settings, "train.seed=0", "sweep.trials=1", cwd=tmp_path).returncode == 0
    (tmp_path / "experiment/two.yaml").write_text("# @package _global_\ntrain: {max_steps: 3}\n")
    changed = run_cli(*settings, "train.seed=0", cwd=tmp_path)  # the first job is not affected
    assert changed.returncode == 1
    assert "job 1 failed: the configuration has changed since the sweep began" in changed.stdout
    (tmp_path / "experiment/one.yaml").write_text("# @package _global_\ntrain: {max_steps: 3}\n")
    assert "train.max_steps: 2 before, 3 now" in continue_sweep(tmp_path, status=2)


def test_a_grid_may_grow_and_nothing_else_may_change(tmp_path):
    sweep = tmp_path / "sweep"
    run_sweep(tmp_path, "train.seed=choice(0)")
    message = run_sweep(tmp_path, "train.seed=0", status=2)  # not swept any more
    assert "this directory belongs to another sweep" in message
    message = run_sweep(tmp_path, "train.seed=1,0", "train.max_steps=5", status=2)
    assert "train.max_steps: 4 before, 5 now" in message

    run_sweep(tmp_path, "train.seed=1,0", "sweep.trials=1")
    assert starts(sweep) == {0: 1}
    continue_sweep(tmp_path, "sweep.trials=2")
    assert starts(sweep) == {0: 1, 1: 1}
    assert {job: row["train.seed"] for job, row in table(sweep).items()} == {"0": "0", "1": "1"}
    assert "sweep of 2 jobs" in continue_sweep(tmp_path)  # it stays


def test_halving_pauses_runs_and_the_best_resumes_exactly(tmp_path):
    """The better of two at a half of their length; the first is paused there, since it is alone."""
    sweep = tmp_path / "sweep"
    halving = ("sweep.pruner=halving", "sweep.eta=2", "sweep.rungs=1")
    printed = run_sweep(tmp_path, *halving, "train.max_steps=8", "optimizer.lr=0.02,1e-9")
    assert "job 0 paused at step 4" in printed
    assert starts(sweep) == {0: 2, 1: 1}
    assert states(sweep) == ["finished", "paused"]
    paused = result(sweep / "1")
    assert (paused["steps"], paused["ended"], paused["stopped"]["signal"]) == (4, "sweep.pruner", "sweep.pruner")

    alone = tmp_path / "alone"
    train(alone, *QUICK, "train.max_steps=8", "optimizer.lr=0.02")
    for name in ("evaluations.jsonl", "metrics.jsonl"):
        losses_of_job = [line["loss"] for line in lines(sweep / "0" / name)]
        losses_alone = [line["loss"] for line in lines(alone / name)]
        assert losses_of_job == losses_alone

    # One that was paused may be taken up by hand, too.
    assert run_cli("continue", "sweep/1", cwd=tmp_path).returncode == 0
    assert result(sweep / "1")["steps"] == 8


def test_tpe_on_two_slots_with_what_does_not_fit(tmp_path):
    """Wide models do not fit in half of the limit, and the sampler learns it."""
    pytest.importorskip("optuna")
    sweep = tmp_path / "sweep"
    sampled = ("sweep.sampler=tpe", "sweep.trials=3", "model.width=int(tag(log,interval(4,4096)))")
    run_sweep(tmp_path, *sampled, "sweep.parallel=2", "memory.limit=4MiB", timeout=200)
    rows = table(sweep).values()
    assert {row["state"] for row in rows} == {"finished", "infeasible"}
    assert min(int(row["model.width"]) for row in rows if row["state"] == "infeasible") > 200
    assert config_of(sweep / "0")["memory"]["limit"] == 2 * 2**20
    assert all(event["threads"] == 1 for event in lines(sweep / "sweep.jsonl") if event["event"] == "start")


@pytest.mark.timeout(180)
def test_jobs_share_a_device_where_their_plans_fit(tmp_path):
    """Of 3.6 MiB (nine tenths of the limit), they need 1.7 and 0.3; a third does not fit at all."""
    (tmp_path / "mine.py").write_text(NET)
    sweep = tmp_path / "sweep"
    packing = ("sweep.pack=true", "sweep.parallel=3", "memory.limit=4MiB")
    long = ("train.max_steps=300", "every.eval=10")  # the first runs while the second is planned
    run_sweep(tmp_path, *MINE, *packing, *long, "model.width=300,100,4096", timeout=150)
    assert states(sweep) == ["finished", "finished", "infeasible"]
    rows = table(sweep)
    assert re.search(r"by its plan at micro-batch 1: it needs \d+\.\d MiB", rows["2"]["error"])
    assert not (sweep / "2/.hydra").exists()
    events = [(event["event"], event.get("number")) for event in lines(sweep / "sweep.jsonl")]
    assert events.index(("start", 1)) < events.index(("end", 0))
    limits = [config_of(sweep / job)["memory"]["limit"] for job in "01"]
    assert [limit / 2**20 for limit in limits] == pytest.approx([1.7, 0.3], abs=0.1)
    assert [rows[job]["oom_restarts"] for job in "01"] == ["0", "0"]


def test_jobs_are_composed_as_hydra_composes_them(tmp_path):
    """With a folder of configurations, groups, added and removed settings, and Hydra's resolvers."""
    (tmp_path / "configs/experiment").mkdir(parents=True)
    (tmp_path / "configs/experiment/mine.yaml").write_text(
        "# @package _global_\n"
        "hydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      precision: bf16,fp32\n"
        "user_packages:\n  - p${hydra:job.num}\n  - y${now:%Y}\n"
        "sweep:\n  seed: 3\n"
    )
    settings = (
        "--config-dir=configs",
        "experiment=mine",
        *QUICK,
        "~data.drop_last",
        "++data.augment=false",
        "+data@eval.hard=digits",
        "train.max_steps=1",
        "every.eval=null",
        "hydra.sweep.subdir=${hydra:job.num}_${model.width}",
    )
    by_sweeper = {}
    for name, sweeper in (("trainapp", ()), ("basic", ("hydra/sweeper=basic",))):
        done = run_cli(*settings, *sweeper, f"hydra.sweep.dir={name}", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        by_sweeper[name] = {job: config_of(tmp_path / name / job) for job in ("0_16", "1_16")}
    assert by_sweeper["trainapp"] == by_sweeper["basic"]


def test_through_a_launcher_of_hydra(tmp_path):
    """submitit's local mode: a job in a process that the launcher starts, one at a time in each of two slots."""
    (tmp_path / "mine.py").write_text(NET)
    submitit = ("hydra/launcher=submitit_local", "hydra.launcher.timeout_min=2", "sweep.parallel=2")
    run_sweep(tmp_path, *submitit, *MINE, "model.width=4,5", status=1)
    assert states(tmp_path / "sweep") == ["finished", "failed"]
    assert table(tmp_path / "sweep")["1"]["error"] == "TypeError: five is too many"


def test_another_sweeper_of_hydra_has_the_table(tmp_path):
    run_sweep(tmp_path, "hydra/sweeper=basic", "train.seed=0,1")
    assert set(table(tmp_path / "sweep")) == {"0", "1"}


def test_another_sweeper_of_hydra_must_look_in_the_right_direction(tmp_path):
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins/seeker.py").write_text(
        "from hydra._internal.core_plugins.basic_sweeper import BasicSweeper\n"
        "class Seeker(BasicSweeper):\n"
        "    def __init__(self, direction, params=None):\n"
        "        super().__init__(None)\n"
    )
    seeker = (*SWEEP, "hydra.sweeper._target_=hydra_plugins.seeker.Seeker", "train.seed=0")
    wrong = run_cli(*seeker, "+hydra.sweeper.direction=minimize", cwd=tmp_path)
    assert wrong.returncode != 0
    assert "the objective of these runs is max accuracy; set hydra.sweeper.direction=maximize" in wrong.stderr
    right = run_cli(*seeker, "+hydra.sweeper.direction=maximize", cwd=tmp_path)
    assert right.returncode == 0, right.stderr


def test_plans_have_a_table_of_their_own(tmp_path):
    settings = ("-m", *runs.MODELS["gpt"], "train.device=cpu", "plan.techniques=false", "mode=plan")
    done = run_cli(*settings, "model.width=16,32", "hydra.sweep.dir=sweep", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "largest micro-batch" in done.stdout
    assert re.findall(r"^(\d)  .*model.width=(\d+)", done.stdout, re.MULTILINE) == [("0", "16"), ("1", "32")]
    peaks = [json.loads((tmp_path / f"sweep/{job}/plan.json").read_text())["peak_bytes"] for job in (0, 1)]
    assert peaks[0] < peaks[1]


def test_a_sweep_ends_at_its_time_limit(tmp_path):
    (tmp_path / "mine.py").write_text(NET)
    endless = (*MINE, "train.max_steps=100000", "every.eval=null", "train.seed=0,1")
    printed = run_sweep(tmp_path, *endless, "sweep.max_time=20s", status=75)
    assert "sweep.max_time: the running jobs save and end" in printed
    assert (tmp_path / "sweep/0/checkpoints").exists()
    assert not (tmp_path / "sweep/1").exists()


def test_a_sweep_ends_at_its_number_of_failures(tmp_path):
    (tmp_path / "mine.py").write_text(NET)
    printed = run_sweep(tmp_path, *MINE, "model.width=5,4", "sweep.max_failures=1", status=1)
    assert "sweep.max_failures=1: no more jobs were started" in printed
    assert starts(tmp_path / "sweep") == {0: 1}


def test_a_run_is_continued_by_its_directory(tmp_path):
    run = tmp_path / "folder/run"
    train(run, *QUICK, "train.max_epochs=1", "train.max_steps=null", cwd=tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    longer = run_cli("continue", str(run), "train.max_epochs=2", cwd=elsewhere)
    assert longer.returncode == 0, longer.stderr
    assert result(run)["steps"] == 180
    nothing = run_cli("continue", str(tmp_path), cwd=elsewhere)
    assert nothing.returncode == 2
    assert "neither a sweep nor a run" in nothing.stderr


def test_a_run_is_run_again_by_its_directory_with_other_settings(tmp_path):
    train(tmp_path / "folder/run", *QUICK, cwd=tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    settings = ("train.seed=5", "model=resnet", "model.width=4")
    again = run_cli("rerun", "../folder/run", *settings, "hydra.run.dir=second", cwd=elsewhere)
    assert again.returncode == 0, again.stderr
    overrides = yaml.safe_load((elsewhere / "second/.hydra/overrides.yaml").read_text())
    assert {*settings, "train.max_steps=4"} <= set(overrides)
    assert "model=mlp" not in overrides
    both = run_cli("leaderboard", str(tmp_path), cwd=elsewhere)
    assert both.returncode == 0, both.stderr
    assert set(table(tmp_path)) == {"folder/run", "elsewhere/second"}
