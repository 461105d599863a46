"""What the tracker writes: lines, events, the configuration, a line on the terminal."""

import logging

import helpers
import pytest
import runs


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
