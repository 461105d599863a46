"""Sweeps: a directory per job, failures that stay in their job, counters that restart."""

import pytest
from helpers import incidents, metrics, result, run_cli
from runs import TINY

SWEEP = ("-m", *TINY, "train.max_steps=2", "checkpointing=off")


def sweeps(cwd):
    """The directories of the sweeps started in `cwd`."""
    return sorted((cwd / "outputs/multirun").glob("*/*"))


def jobs(sweep):
    """The directories of a sweep's jobs, in order."""
    return sorted((path for path in sweep.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))


FRAGILE = """
import gc, weakref
from trainapp.models.mlp import MLP
from trainapp.validation import PositiveInt

before = []


class Fragile(MLP):
    def __init__(self, image_shape, num_classes, width: PositiveInt, depth, dropout):
        super().__init__(image_shape, num_classes, width=width, depth=depth, dropout=dropout)
        gc.collect()
        print("ALIVE", sum(model() is not None for model in before), "of", len(before))
        before.append(weakref.ref(self))
        self.broken = width == 5
        if width == 6:
            raise TypeError("six is too many")

    def forward(self, images):
        try:
            return super().forward(images) if not self.broken else {}[5]
        except KeyError as error:
            raise TypeError("five is too many") from error
"""


@pytest.mark.slow
def test_a_failing_job_leaves_its_trace_in_its_own_log_and_the_rest_go_on(tmp_path):
    """It leaves its model to the garbage collector: Hydra keeps the error, but not the frames that raised it."""
    (tmp_path / "mine.py").write_text(FRAGILE)
    mine = ("model=mlp", "model._target_=mine.Fragile", "user_packages=[mine]")
    done = run_cli(*SWEEP, *mine, "model.width=4,5,6,-6,7", cwd=tmp_path)
    assert done.returncode != 0
    alive = [line for line in done.stdout.splitlines() if line.startswith("ALIVE")]
    assert alive == [f"ALIVE 0 of {number}" for number in range(4)]
    (sweep,) = sweeps(tmp_path)
    folders = jobs(sweep)
    logs = [(folder / "trainapp.log").read_text() for folder in folders]
    steps = [result(folder)["steps"] if (folder / "result.json").exists() else None for folder in folders]
    assert steps == [2, None, None, None, 2]
    assert "Traceback" in logs[1]
    assert 'raise TypeError("five is too many") from error' in logs[1]
    assert "KeyError: 5" in logs[1]
    # A user's mistake needs no traceback, in a sweep either.
    assert "model.width=-6: must be greater than 0" in logs[3]
    assert "Traceback" not in logs[3]
    assert not any("Traceback" in logs[job] or "five" in logs[job] for job in (0, 4))


@pytest.mark.slow
def test_memory_counters_do_not_leak_from_job_to_job(tmp_path):
    wide = ("model=mlp", "batch.global_size=512")
    done = run_cli(*SWEEP, *wide, "memory.limit=2.5MiB,null,1GiB,2.5MiB", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (sweep,) = sweeps(tmp_path)
    scarce, plenty, large, again = jobs(sweep)
    for folder in (scarce, again):  # also where an earlier job's peak is higher
        assert result(folder)["oom_restarts"] == len(incidents(folder)) >= 1
        assert result(folder)["micro_size"] < 512
        assert result(folder)["peak_memory_bytes"] <= 2.5 * 2**20
    for folder in (plenty, large):
        assert result(folder)["oom_restarts"] == 0
        assert result(folder)["micro_size"] == 512
        assert [line["memory/out_of_memory_count"] for line in metrics(folder)] == [0, 0]
    # Without the low limit it is 3.1 MiB: in both later jobs the peak is that of all samples at once.
    assert result(plenty)["peak_memory_bytes"] > 2.5 * 2**20
    assert result(large)["peak_memory_bytes"] == result(plenty)["peak_memory_bytes"]
