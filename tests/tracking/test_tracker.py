"""What the tracker writes: lines, events, the configuration, a line on the terminal."""

import logging
import time

import helpers
import pytest
import runs

from trainapp.tracking.loggers import TensorBoard
from trainapp.tracking.tracker import Tracker

LOG = {"loss": 1.5, "samples_per_second": 10.0, "memory/peak": 100, "memory/limit": 200}


def test_what_a_run_records(tmp_path, caplog):
    """Each number of each log step and evaluation in the lines and, as 32-bit floats, in the event file."""
    chosen = (*runs.MODELS["mlp"], "train.max_steps=5", "every.log=2", "every.eval=2", "batch.micro_size=4")
    with caplog.at_level(logging.INFO):
        runs.run(tmp_path, *chosen)
    lines, scalars = helpers.metrics(tmp_path), helpers.scalars(tmp_path)
    assert [(line["step"], line["samples"]) for line in lines] == [(2, 32), (4, 64), (5, 80)]
    for line in lines:
        compared = {name: value for name, value in line.items() if name not in ("step", "samples")}
        assert len(compared) >= 25
        for name, value in compared.items():
            tag = name if "/" in name else f"train/{name}"
            assert scalars[tag][line["step"]] == pytest.approx(value, rel=1e-6)
    for line in helpers.evaluations(tmp_path):
        for name in ("loss", "accuracy"):
            assert scalars[f"eval/{name}"][line["step"]] == pytest.approx(line[name], rel=1e-6)
    line = lines[-1]
    assert 0 < line["loss"] < 10
    assert 0 <= line["accuracy"] <= 1
    assert line["grad_norm"] > 0
    assert line["samples_per_second"] > 0
    assert 0 <= line["data_wait"] < 1
    assert line["epoch"] == 80 / 1437
    assert (line["batch/global_size"], line["batch/micro_size"], line["batch/accumulation"]) == (16, 4, 4)
    ((step, text),) = helpers.texts(tmp_path)["config"]
    assert step == 0
    assert '"width": 16' in text
    shown = [r.getMessage() for r in caplog.records if r.name == "trainapp.tracking.terminal"]
    assert len(shown) == 3
    assert shown[0].startswith("step 2/5 | loss ")
    assert all(part in shown[0] for part in ("accuracy", "samples/s", "memory", "left"))


def test_the_loss_is_recorded_at_full_precision(tmp_path):
    """Read back, it is exactly the number in the loop."""
    run = runs.prepare(tmp_path, *runs.MODELS["mlp"], "batch.micro_size=4")
    totals = runs.accumulate(run, True)
    run.tracker.close()
    runs.run(tmp_path / "again", *runs.MODELS["mlp"], "batch.micro_size=4")
    assert helpers.metrics(tmp_path / "again")[0]["loss"] == totals.means()["loss"]


def test_a_resumed_run_drops_the_lines_that_come_again(tmp_path):
    """Also what a killed process has half written, and zeros, which a power failure may leave."""
    tracker = Tracker(tmp_path, 0, 10, {}, loggers={"tensorboard": TensorBoard()})
    for step in (1, 2, 3):
        tracker.log(step, step, LOG, None)
        tracker.evaluated(step, step, {"loss": 1.0})
    tracker.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('\0\0\0\n{"step": 4, "lo')
    time.sleep(1.1)  # event files are read in the order of their names, which have a resolution of one second
    tracker = Tracker(tmp_path, 2, 10, {}, loggers={"tensorboard": TensorBoard()})
    tracker.log(3, 3, {**LOG, "loss": 2.5}, None)
    tracker.close()
    assert [(line["step"], line["loss"]) for line in helpers.metrics(tmp_path)] == [(1, 1.5), (2, 1.5), (3, 2.5)]
    assert [line["step"] for line in helpers.evaluations(tmp_path)] == [1, 2]
    assert helpers.scalars(tmp_path)["train/loss"] == {1: 1.5, 2: 1.5, 3: 2.5}
