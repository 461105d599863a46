"""Runs over streams: recovery, resume, epochs, what is refused, a plan, Hugging Face's streaming data sets."""

import functools
import json
import os

import helpers
import pytest
import runs
from faults import Fault
from harness import Recorded

from trainapp.data.sets.digits import Digits
from trainapp.data.stream import Stream
from trainapp.errors import UserError

STREAM = ("model=mlp", "model.width=16", "user_packages=[own_streams]", "train.max_steps=9", "data.num_workers=0")


def of(kind, *overrides):
    return (*STREAM, f"data._target_=own_streams.{kind}", "~data.augment", *overrides)


def finished(run_dir, *overrides, faults=()):
    """What the last checkpoint of a whole run holds."""
    recorded = Recorded(runs.configure(run_dir, *overrides), *faults)
    assert len(recorded.failures) == len(faults)
    return runs.saved(run_dir, recorded.run.state.progress.step)


def different(a, b):
    keys = ("model", "optimizer", "stateful", "progress")
    return runs.differences({k: a[k] for k in keys}, {k: b[k] for k in keys})


def test_a_retried_step_has_the_same_samples_though_collate_takes_them_apart(tmp_path):
    """Equal to the run that was told to use the smaller size from that step on. Other streams: zoo."""
    recovered = finished(tmp_path / "a", *of("Popping", "oom.grow=false"), faults=[Fault("backward", 6, 3)])
    replayed = finished(tmp_path / "b", *of("Popping", "batch.micro_schedule={1: 16, 6: 8}"))
    assert different(recovered, replayed) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Hungry", "HungryWithState"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_fails_is_read_again(tmp_path, kind, workers):
    """From the last sample that was trained: it has the samples of a stream that does not fail."""
    texts = of(kind, "oom.grow=false", f"data.num_workers={workers}", "train.max_steps=5")
    ended = runs.run(tmp_path / "a", *texts)
    assert (ended.oom_restarts, ended.samples) == (1, 50 + 16)
    whole = finished(tmp_path / "b", *of("Plain", "train.max_steps=5"))
    assert runs.differences(runs.saved(tmp_path / "a", 5)["model"], whole["model"]) == []


def test_evaluation_and_checkpoints_follow_the_epochs(tmp_path):
    """Epochs of 50 samples end in steps 4 and 8; the run ends in step 9."""
    overrides = ("every.eval=1 epochs", "every.save=2 epochs", "checkpointing.keep_last=9")
    ended = runs.run(tmp_path, *of("Stateful", *overrides))
    assert [line["step"] for line in helpers.evaluations(tmp_path)] == [4, 8, 9]
    saved = {int(path.name[-1]) for path in (tmp_path / "checkpoints").glob("step_*")}
    assert saved == {4, 8, 9}  # 4 has the best evaluation until then
    assert [line["epoch"] for line in helpers.metrics(tmp_path)] == [0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert ended.samples == 50 + 50 + 16


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_intervals_that_an_endless_stream_never_completes_are_named_at_the_start(tmp_path, caplog):
    """Nothing is evaluated or saved before the end of the run, silently until now."""
    runs.run(tmp_path, *of("Endless", "every.eval=1 epochs", "every.save=1 epochs", "checkpointing.keep_last=9"))
    assert [line["step"] for line in helpers.evaluations(tmp_path)] == [9]
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == ["step_00000009"]
    (text,) = [text for text in warnings_of(caplog) if "epoch" in text]
    stream = "every.eval=1 epochs, every.save=1 epochs: data=own_streams.Endless is a stream without `__len__`, so the "
    assert text.startswith(stream + "length of an epoch is not known before the first one ends")
    assert "ends within train.max_steps=9, ignore this, or give it `__len__`; if it is longer or endless, this" in text
    assert "due only at the run's end: set every.eval and every.save in" in text


@pytest.mark.parametrize("overrides", [("every.eval=10 percent", "every.save=10 samples"), ("every.save=null",)])
def test_other_intervals_of_a_stream_need_no_warning(tmp_path, caplog, overrides):
    runs.run(tmp_path, *of("Endless", *overrides))
    assert not any("epoch" in text for text in warnings_of(caplog))


def test_a_stream_that_has_completed_an_epoch_needs_no_warning(tmp_path, caplog):
    overrides = of("Stateful", "every.save=1 epochs")
    runs.run_until(tmp_path, 5, *overrides).close()
    caplog.clear()
    runs.run(tmp_path, *overrides)
    assert not any("the length of an epoch" in text for text in warnings_of(caplog))


def test_a_stream_that_tells_its_length_needs_no_warning(tmp_path, caplog):
    runs.run(tmp_path, *of("TellsItsLength", "every.save=1 epochs"))
    assert not any("the length of an epoch" in text for text in warnings_of(caplog))


def test_reading_a_stream_counts_as_waiting_for_data(tmp_path):
    """On the old code `data_wait` was 0."""
    runs.run(tmp_path, *of("Slow", "train.max_steps=3", "every.log=3"))
    (line,) = helpers.metrics(tmp_path)
    assert 0.5 < line["data_wait"] <= 1


def test_a_stream_may_have_indexed_validation_data(tmp_path):
    runs.run(tmp_path, *of("indexed_validation", "every.eval=9"))
    assert len(helpers.evaluations(tmp_path)) == 1


@pytest.mark.slow
def test_an_evaluation_of_a_stream_that_runs_out_of_memory_begins_its_set_again(tmp_path):
    overrides = of("Stateful", "every.eval=9")
    finished(tmp_path / "a", *overrides)
    finished(tmp_path / "b", *overrides, "batch.eval_micro_size=6", faults=[Fault("evaluate", 9, 4)])
    (a,), (b,) = (helpers.evaluations(tmp_path / name) for name in ("a", "b"))
    assert b["accuracy"] == a["accuracy"]
    assert b["loss"] == pytest.approx(a["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            of("Plain", "train.max_steps=null", "train.max_epochs=3"),
            r"train\.max_steps=null: .* is a stream, .* set train",
        ),
        (of("Plain", "data.drop_last=true"), r"data\.drop_last, data\.sampling\.weights: .* is a stream"),
        (of("Plain", "every.log=1 epochs"), r"every\.log=1 epochs: a stream's epochs have no known length"),
        (of("Plain", "schedule.warmup=1 epochs"), r"schedule\.warmup=1 epochs: a stream's epochs have no known length"),
    ],
)
def test_what_a_stream_cannot_do(tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        runs.run(tmp_path, *overrides)


def test_shards_on_other_ranks_continue_with_the_next_epoch(tmp_path, monkeypatch, caplog):
    runs.run_until(tmp_path, 2, *of("Sharded", "data.num_workers=2")).close()
    load = Stream.load_state_dict
    monkeypatch.setattr(Stream, "load_state_dict", lambda self, state: load(self, state | {"world": 2}))
    with pytest.raises(UserError, match=r"data\.on_change=refuse: each of the 2 ranks that read the stream"):
        runs.prepare(tmp_path, *of("Sharded", "data.num_workers=2"))
    run = runs.prepare(tmp_path, *of("Sharded", "data.num_workers=2", "data.on_change=next_epoch"))
    assert "training continues with epoch 1" in caplog.text
    assert (run.state.progress.epoch, run.state.progress.consumed) == (1, 0)
    (micro,) = run.batches.micro_batches(run.state.progress, [16])
    assert micro.data["number"].tolist() == list(range(16))  # in turn from both shards
    run.close()


@pytest.fixture
def rows(tmp_path):
    """Three JSON files with 50 digits."""
    digits = Digits("train")
    for number in range(3):
        lines = []
        for index in range(number, 50, 3):
            sample = digits[index]
            lines.append(json.dumps({"inputs": sample["inputs"].flatten().tolist(), "targets": int(sample["targets"])}))
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path / "*.jsonl"


def hugging_face(rows, *overrides):
    shapes = ("+model.image_shape=[1,8,8]", "+model.num_classes=10")
    return of("from_json", f"+data.files={rows}", "task=classification", *shapes, *overrides)


@pytest.mark.parametrize(("buffer", "workers", "skips"), [(0, 0, False), (0, 2, False), (20, 0, True), (20, 1, True)])
def test_streams_of_hugging_face(tmp_path, rows, caplog, buffer, workers, skips):
    """Resumed twice; a shuffle buffer's state does not hold the buffer, so samples are skipped instead."""
    pytest.importorskip("datasets")
    caplog.set_level("INFO")
    overrides = hugging_face(rows, f"+data.buffer={buffer}", f"data.num_workers={workers}")
    whole = finished(tmp_path / "whole", *overrides)
    for stop in (3, 6):
        runs.run_until(tmp_path / "parts", stop, *overrides).close()
    assert different(whole, finished(tmp_path / "parts", *overrides)) == []
    assert ("are read again and skipped" in caplog.text) is skips
    if workers == 1:
        alone = finished(tmp_path / "alone", *hugging_face(rows, f"+data.buffer={buffer}"))
        assert different(whole, alone) == []


@pytest.fixture
def command(tmp_path):
    """Runs the command line, where `own_streams` can be imported."""
    env = {"PYTHONPATH": os.pathsep.join([str(helpers.ROOT / "tests/helpers"), os.environ.get("PYTHONPATH", "")])}
    return functools.partial(helpers.train, env=env, timeout=200)


@pytest.mark.slow
def test_a_plan_and_a_resume_with_another_number_of_workers(tmp_path, command):
    overrides = (*runs.TINY, *of("Sharded", "every.eval=1 epochs", "schedule=constant"))
    runs.run_until(tmp_path / "run", 5, *overrides)
    assert runs.run(tmp_path / "run", *overrides, "data.num_workers=1").samples == 116
    command(tmp_path / "plan", *overrides, "mode=plan")
    assert json.loads((tmp_path / "plan/plan.json").read_text())["largest_micro_size"] == 16


@pytest.mark.slow
def test_two_ranks(tmp_path, command):
    """Without parts the losses are those of one rank, and one rank may continue."""
    overrides = of("Stateful", "every.eval=1 epochs", "schedule=constant")
    runs.run(tmp_path / "one", *overrides)
    two = ("parallel=ddp", "parallel.devices=2", "parallel.timeout=60")
    command(tmp_path / "two", *runs.TINY, *overrides, *two, "train.max_steps=5")
    runs.run(tmp_path / "two", *overrides)
    losses = [[line["loss"] for line in helpers.metrics(tmp_path / name)] for name in ("one", "two")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    one, parts = ({e["step"]: e["loss"] for e in helpers.evaluations(tmp_path / name)} for name in ("one", "two"))
    assert {step: parts[step] for step in one} == pytest.approx(one, rel=1e-4)
