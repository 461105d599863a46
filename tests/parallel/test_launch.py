"""One command starts all ranks: one directory, rank 0's log, the objective; torchrun and Slurm give the same."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from helpers import ROOT, environment, evaluations, metrics, result, scalars
from runs import differences

from .cell import Cell
from .launching import LAUNCHED, Launched, checkpoint, launch
from .pool import Pool, free_port
from .variants import train_counting_threads

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Path:
    """The undisturbed run of two ranks of DDP."""
    os.environ["TRAINAPP_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    ended = launch(run_dir, "parallel=ddp")
    assert ended.code == 0, ended.text
    return run_dir


def test_one_directory_and_one_log(reference):
    assert {path.name for path in reference.iterdir()} == {
        ".hydra", "checkpoints", "evaluations.jsonl", "metrics.jsonl", "ranks", "recipe.json", "report.html",
        "result.json", "tensorboard", "trainapp.log",
    }  # fmt: skip
    assert [path.name for path in (reference / "ranks").iterdir()] == ["rank_1.log"]
    log = (reference / "trainapp.log").read_text()
    assert log.count("parameters on cpu") == 1
    assert "x 2 ranks" in log
    assert [line["step"] for line in metrics(reference)] == [1, 2, 3, 4, 5, 6]
    assert len(list((reference / "tensorboard").iterdir())) == 1
    assert result(reference)["objective"] == evaluations(reference)[-1][result(reference)["metric"]]


def test_memory_of_every_rank(reference):
    tags = scalars(reference)
    for name in ("allocated", "reserved", "peak", "host_rss", "host_rss_peak"):
        for line in metrics(reference):
            least, most = line[f"memory/{name}_min"], line[f"memory/{name}_max"]
            assert 0 < least <= line[f"memory/{name}"] <= most
            # The line also has rank 0's value: if the extreme differs from it, it is rank 1's.
            for value, rank in ((least, f"memory/{name}_min_rank"), (most, f"memory/{name}_max_rank")):
                assert line[rank] == int(value != line[f"memory/{name}"])
        for which in ("min", "max", "min_rank", "max_rank"):
            assert sorted(tags[f"memory/{name}_{which}"]) == [1, 2, 3, 4, 5, 6]
    assert result(reference)["peak_memory_bytes"] == max(line["memory/peak_max"] for line in metrics(reference))


def complete(folder: Path, *overrides: str, starter: Sequence[str] = ()) -> None:
    """Run the command, which must succeed.

    Args:
        folder: where it is given.
        overrides: its arguments.
        starter: arguments of Python that start the program, such as torchrun.
    """
    with Launched([sys.executable, *starter, "-m", "trainapp", *overrides], folder) as launched:
        ended = launched.end()
    assert ended.code == 0, ended.text
    assert ended.orphans == []


def torchrun(ranks: int = 2) -> list[str]:
    return ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}"]


def assert_same_run(run_dir: Path, reference: Path) -> None:
    assert [line["loss"] for line in metrics(run_dir)] == [line["loss"] for line in metrics(reference)]
    assert differences(checkpoint(run_dir, 6), checkpoint(reference, 6)) == []
    assert sorted(path.name for path in run_dir.iterdir()) == sorted(path.name for path in reference.iterdir())
    assert [path.name for path in (run_dir / "ranks").iterdir()] == ["rank_1.log"]


def test_torchrun_gives_the_same_run(reference, tmp_path):
    complete(tmp_path, *LAUNCHED, "parallel=ddp", starter=torchrun())
    (run_dir,) = (tmp_path / "outputs" / "torchrun").iterdir()
    assert_same_run(run_dir, reference)


THREADS = 3  # of gloo, per group


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's /proc")
def test_no_thread_outlives_the_ranks(tmp_path):
    """A thread that still has a tensor to free when the interpreter exits aborts the process."""
    pool = Pool()  # workers of the shared one may hold groups of earlier cells
    cell = Cell(pool, tmp_path)
    try:
        after_ddp = cell.run(2, "parallel=ddp", function=train_counting_threads)
        after_fsdp = cell.run(2, "parallel=fsdp", function=train_counting_threads)
    finally:
        pool.close()
    assert after_ddp == [0, 0]
    # Torch's cache of sharded operations keeps the two groups of FSDP2's mesh, which have long been idle by then.
    assert max(after_fsdp) <= 2 * THREADS


def test_a_multirun_inside_torchrun_is_refused(tmp_path):
    words = [sys.executable, *torchrun(), "-m", "trainapp", "-m", *LAUNCHED, "parallel=ddp", "train.seed=1,2"]
    with Launched(words, tmp_path) as launched:
        ended = launched.end()
    assert ended.code != 0
    assert "python -m trainapp -m" in ended.text
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_fsdp_inside_torchrun_with_one_rank_is_refused(tmp_path):
    """Not silently a single device. Of parallel=single: tests/launch/test_environment.py."""
    overrides = [override for override in LAUNCHED if not override.startswith("parallel.")]
    starter = [sys.executable, *torchrun(ranks=1)]
    with Launched([*starter, "-m", "trainapp", *overrides, "parallel=fsdp"], tmp_path) as launched:
        ended = launched.end()
    message = "parallel=fsdp with WORLD_SIZE=1, as the launcher has set it: "
    assert ended.code != 0
    assert ended.text.count(f"trainapp: {message}") == 1, ended.text
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_slurm_gives_the_same_run(reference, tmp_path):
    job = str(free_port())
    started = []
    for rank in (0, 1):
        names = {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(rank), "SLURM_JOB_ID": job}
        names |= {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
        started.append(Launched([sys.executable, "-m", "trainapp", *LAUNCHED, "parallel=ddp"], tmp_path, names))
    with started[0], started[1]:
        ended = [launched.end() for launched in started]
    assert [e.code for e in ended] == [0, 0], ended[0].text + ended[1].text
    assert_same_run(tmp_path / "outputs" / "slurm" / f"{job}.0", reference)


@pytest.mark.parametrize("tasks", [2, pytest.param(1, marks=pytest.mark.nightly)])
def test_submitit_gives_the_same_run(reference, tmp_path, tasks):
    """Two tasks are the ranks of the sweep's job; a single task starts its workers itself."""
    submitit = ["hydra/launcher=submitit_local", f"hydra.launcher.tasks_per_node={tasks}", "hydra.sweep.dir=sweep"]
    complete(tmp_path, "-m", *LAUNCHED, "parallel=ddp", *submitit)
    assert_same_run(tmp_path / "sweep" / "0", reference)


def test_multirun_returns_the_objectives(tmp_path, reference):
    overrides = ["parallel=ddp", "train.seed=0,1", "every.eval=6", "hydra.sweep.dir=sweep", "train.max_steps=6"]
    complete(tmp_path, "-m", *LAUNCHED, *overrides)
    objectives = [result(tmp_path / "sweep" / str(job))["objective"] for job in (0, 1)]
    assert objectives[0] == result(reference)["objective"]
    assert objectives[1] != objectives[0]


def test_devices_auto_needs_gpus(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has GPUs")
    ended = launch(tmp_path / "run", "parallel=ddp", "parallel.devices=auto")
    assert ended.code == 2
    assert "parallel.devices=N" in ended.text


def test_single_inside_torchrun_is_refused(tmp_path):
    names = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
    command = [sys.executable, "-m", "trainapp", "parallel=single", "data=digits", "model=mlp"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(names), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "choose parallel=ddp or parallel=fsdp" in done.stderr


# The scripts that simulate two hosts and a Slurm on one machine, where permissions and tools allow


def needs(*tools):
    missing = [tool for tool in tools if shutil.which(tool) is None]
    return pytest.mark.skipif(os.geteuid() != 0 or bool(missing), reason=f"needs root and {', '.join(tools)}")


def script(name, folder, *overrides):
    done = subprocess.run(
        [ROOT / "scripts" / name, *overrides],
        cwd=folder,
        env=environment({"PYTHON": sys.executable, "TMPDIR": str(folder)}),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs("ip")
def test_two_hosts(tmp_path):
    settings = ("model=mlp", "train.max_epochs=null", "train.max_steps=4", "every.eval=null")
    assert "both nodes succeeded" in script("two_hosts", tmp_path, *settings)


@needs("slurmctld", "slurmd", "srun", "munged")
def test_one_slurm(tmp_path):
    output = script("one_slurm", tmp_path)
    assert "stopped, requeued, resumed from" in output
    assert "two jobs of two tasks succeeded" in output
