"""A run whose length changes at a resume: schedule, cadences and total follow from the present position."""

import pytest
import runs
from helpers import metrics

from trainapp.training.session import Session

EPOCHS = 4
DATA = (
    "model=mlp",
    "model.width=4",
    "data=synthetic_images",
    "data.image_shape=[1,4,4]",
    "data.val_size=4",
    "train.max_steps=null",
    f"train.max_epochs={EPOCHS}",
    "schedule.shape=linear",
    "schedule.warmup=0",
    "data.on_change=next_epoch",
)
SAVED_AT = 8  # two steps of the second of 4 epochs, 6 steps each


@pytest.mark.parametrize("size", [32, 320])
def test_schedule_and_end_follow_the_new_data(tmp_path, size):
    runs.run_until(tmp_path, SAVED_AT, *DATA, "data.size=96", "every.save=50 percent")
    total = SAVED_AT + 2 * (size // 16)  # epochs 2 and 3
    session = runs.prepare(tmp_path, *DATA, f"data.size={size}", "every.save=50 percent")
    session.tracker.close()
    assert (session.limits.length.total_steps, session.tracker.progress.total) == (total, total)
    assert session.limits.save.steps == total // 2
    assert session.state.update.schedule(total) == 0.0
    assert session.state.update.schedule(total - 1) == pytest.approx(1 / total)
    result = runs.run(tmp_path, *DATA, f"data.size={size}")
    assert result.steps == total
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, total + 1))
    assert all(line["lr"] > 0 for line in lines)
    epochs = [line["epoch"] for line in lines]
    assert epochs == sorted(epochs)
    assert epochs[SAVED_AT] == pytest.approx(2 + 16 / size)
    assert epochs[-1] == EPOCHS


def test_a_second_resume_keeps_the_length(tmp_path):
    """The data is by then what the checkpoint has: nothing tells that it had changed before."""
    runs.run_until(tmp_path, SAVED_AT, *DATA, "data.size=96")
    runs.run_until(tmp_path, SAVED_AT + 1, *DATA, "data.size=32")
    session = runs.prepare(tmp_path, *DATA, "data.size=32")
    session.tracker.close()
    assert session.limits.length.total_steps == SAVED_AT + 4


def test_another_global_batch_at_a_resume_is_measured_as_well(tmp_path):
    runs.run_until(tmp_path, SAVED_AT, *DATA, "data.size=96")
    result = runs.run(tmp_path, *DATA, "data.size=96", "batch.global_size=32")
    assert result.steps == SAVED_AT + 2 + 2 * 3
    assert metrics(tmp_path)[-1]["lr"] > 0


def test_skipped_steps_do_not_change_the_length_of_a_resumed_run(tmp_path):
    session = runs.prepare(tmp_path, *DATA, "data.size=96")
    session.tracker.close()
    before = session.limits.length
    progress = session.state.progress
    progress.step, progress.skipped, progress.epoch, progress.consumed = 5, 3, 1, 32
    session.measure_length()
    assert session.limits.length == before
    assert before.total_steps == 24


def test_without_measuring_the_rate_ends_early(tmp_path, monkeypatch):
    """Negative control."""
    monkeypatch.setattr(Session, "measure_length", lambda self: None)
    runs.run_until(tmp_path, SAVED_AT, *DATA, "data.size=96")
    runs.run(tmp_path, *DATA, "data.size=32")
    assert metrics(tmp_path)[-1]["lr"] == 0.0
