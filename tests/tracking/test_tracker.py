import helpers
import pytest
import runs

from trainapp.tracking.tracker import Tracker

LOG = {"loss": 1.5, "samples_per_second": 10.0, "memory/peak": 100, "memory/limit": 200}


def test_the_event_file_and_the_lines_say_the_same(tmp_path):
    """Each number of each log step; 32-bit floats in the event file."""
    runs.run(tmp_path, *runs.MODELS["mlp"], "train.max_steps=5", "every.log=2", "every.eval=2")
    lines, scalars = helpers.metrics(tmp_path), helpers.scalars(tmp_path)
    assert [line["step"] for line in lines] == [2, 4, 5]
    assert [line["samples"] for line in lines] == [32, 64, 80]
    compared = 0
    for line in lines:
        for name, value in line.items():
            if name not in ("step", "samples"):
                tag = name if "/" in name else f"train/{name}"
                assert scalars[tag][line["step"]] == pytest.approx(value, rel=1e-6)
                compared += 1
    assert compared >= 3 * 25
    for line in helpers.evaluations(tmp_path):
        for name in ("loss", "accuracy"):
            assert scalars[f"eval/{name}"][line["step"]] == pytest.approx(line[name], rel=1e-6)


def test_what_is_recorded_beside_memory(tmp_path):
    runs.run(tmp_path, *runs.MODELS["mlp"], "batch.micro_size=4")
    line = helpers.metrics(tmp_path)[-1]
    assert 0 < line["loss"] < 10
    assert 0 <= line["accuracy"] <= 1
    assert line["grad_norm"] > 0
    assert line["samples_per_second"] > 0
    assert 0 <= line["data_wait"] < 1
    assert line["epoch"] == 64 / 1437
    assert (line["batch/global_size"], line["batch/micro_size"], line["batch/accumulation"]) == (16, 4, 4)
    assert line["lr"] == pytest.approx(3e-3 * 0.25)  # the last step of one warm-up step and three of the cosine


def test_the_loss_is_recorded_at_full_precision(tmp_path):
    """Read back, it is exactly the number in the loop."""
    run = runs.prepare(tmp_path, *runs.MODELS["mlp"], "batch.micro_size=4")
    totals = runs.accumulate(run, True)
    run.tracker.close()
    runs.run(tmp_path / "again", *runs.MODELS["mlp"], "batch.micro_size=4")
    assert helpers.metrics(tmp_path / "again")[0]["loss"] == totals.means()["loss"]


def test_the_configuration_is_there_as_text(tmp_path):
    runs.run(tmp_path, *runs.MODELS["mlp"])
    ((step, text),) = helpers.texts(tmp_path)["config"]
    assert step == 0
    assert '"width": 16' in text
    assert '"global_size": 16' in text


def test_going_on_drops_the_lines_that_come_again(tmp_path):
    tracker = Tracker(tmp_path, 0, 10, {})
    for step in (1, 2, 3):
        tracker.log(step, step, LOG, None)
        tracker.evaluated(step, step, {"loss": 1.0})
    tracker.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed while writing
    tracker = Tracker(tmp_path, 2, 10, {})
    tracker.log(3, 3, {**LOG, "loss": 2.5}, None)
    tracker.close()
    assert [(line["step"], line["loss"]) for line in helpers.metrics(tmp_path)] == [(1, 1.5), (2, 1.5), (3, 2.5)]
    assert [line["step"] for line in helpers.evaluations(tmp_path)] == [1, 2]
    assert helpers.scalars(tmp_path)["train/loss"] == {1: 1.5, 2: 1.5, 3: 2.5}


def test_a_line_that_cannot_be_read_does_not_stop_a_run(tmp_path):
    """After a power failure a file may contain zeros."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n\0\0\0\n{"step": 2}\n')
    Tracker(tmp_path, 2, 10, {}).close()
    assert [line["step"] for line in helpers.metrics(tmp_path)] == [1, 2]


def test_plain_lines_where_there_is_no_terminal(tmp_path, caplog):
    caplog.set_level("INFO")
    runs.run(tmp_path, *runs.MODELS["mlp"], "every.log=2")
    shown = [r.getMessage() for r in caplog.records if r.name == "trainapp.tracking.terminal"]
    assert len(shown) == 2
    assert shown[0].startswith("step 2/4 | loss ")
    for part in ("accuracy", "samples/s", "memory", "left"):
        assert part in shown[0]
