"""A data set that has grown or shrunk since the checkpoint: refused, or continued with the next epoch. Schedule,
cadences and length follow from the present position.
"""

import helpers
import pytest
import runs

from trainapp.errors import UserError
from trainapp.run import resume
from trainapp.training import loop
from trainapp.training.session import Session

SMALL = ("model=mlp", "model.width=4", "data=synthetic_images", "data.image_shape=[1,4,4]", "data.val_size=4")
IMAGES = (*SMALL, "train.max_steps=20", "schedule=constant")
SAVED_AT = 4  # of six steps in an epoch of 96 samples


def trained_samples(run_dir, *overrides):
    """The indices that each step trained on, from the checkpoint to the end; and the run."""
    run = runs.prepare(run_dir, *IMAGES, *overrides)
    seen = []
    while not run.is_finished:
        seen.append((run.state.progress.epoch, run.batches.share(run.state.progress).numbers))
        loop.train_step(run)
    run.tracker.close()
    return seen, run


@pytest.mark.parametrize("size", [120, 72, 40])
def test_another_length_is_refused(tmp_path, size):
    runs.run_until(tmp_path, SAVED_AT, *IMAGES, "data.size=96")
    before = helpers.files(tmp_path)
    message = (
        rf"data\.on_change=refuse: the training data has {size} samples, but had 96 when .*step_00000004 was saved"
    )
    with pytest.raises(UserError, match=message):
        runs.prepare(tmp_path, *IMAGES, f"data.size={size}")
    assert helpers.files(tmp_path) == before


@pytest.mark.parametrize("size", [120, 72, 40])
def test_it_continues_with_the_next_epoch(tmp_path, caplog, size):
    """Every sample of the new data once per epoch, none of the old epoch twice."""
    runs.run_until(tmp_path, SAVED_AT, *IMAGES, "data.size=96")
    seen, run = trained_samples(tmp_path, f"data.size={size}", "data.on_change=next_epoch")
    assert "training continues with epoch 1, skipping 32 samples of the previous epoch" in caplog.text
    epochs = {}
    for epoch, indices in seen:
        epochs.setdefault(epoch, []).extend(indices)
    assert min(epochs) == 1
    complete = [indices for epoch, indices in epochs.items() if epoch < max(epochs)]
    assert len(complete) >= 1
    assert all(sorted(indices) == list(range(size)) for indices in complete)
    assert run.state.data_samples == size
    assert run.state.progress.samples == 64 + sum(len(indices) for _, indices in seen)


def test_without_the_rule_samples_repeat(tmp_path, monkeypatch):
    """Negative control: the rest of the epoch in a permutation of another length."""
    runs.run_until(tmp_path, SAVED_AT, *IMAGES, "data.size=96")
    run = runs.closed(tmp_path, *IMAGES, "data.size=96")
    first = {index for step in range(SAVED_AT) for index in run.batches.source.share(0, 16 * step, 16).numbers}
    monkeypatch.setattr(resume, "_follow_data", lambda *_: None)
    seen, _ = trained_samples(tmp_path, "data.size=120")
    rest = [index for epoch, indices in seen if epoch == 0 for index in indices]
    assert set(rest) & first
    assert set(range(120)) - set(rest) - first


def test_at_the_end_of_an_epoch_nothing_is_left_out(tmp_path, caplog):
    runs.run_until(tmp_path, 6, *IMAGES, "data.size=96")
    seen, _ = trained_samples(tmp_path, "data.size=120", "data.on_change=next_epoch")
    assert seen[0][0] == 1
    assert "had 96" in caplog.text
    assert "skipping" not in caplog.text


def test_the_new_length_is_saved(tmp_path):
    """Once accepted, the change is the run's own: the next resume needs no setting."""
    runs.run_until(tmp_path, SAVED_AT, *IMAGES, "data.size=96")
    runs.run_until(tmp_path, 7, *IMAGES, "data.size=120", "data.on_change=next_epoch")
    assert runs.saved(tmp_path, 7)["sampler"]["samples"] == 120
    seen, _ = trained_samples(tmp_path, "data.size=120")
    assert seen[0][0] == 1


def test_evaluation_and_export_do_not_ask(tmp_path):
    """They continue no epoch."""
    runs.run_until(tmp_path / "run", SAVED_AT, *IMAGES, "data.size=96")
    named = f"checkpointing.resume={tmp_path / 'run'}"
    for mode in ("eval", "export"):
        runs.run(tmp_path / mode, *IMAGES, "data.size=120", named, f"mode={mode}")


# The run's length

EPOCHS = 4
EPOCHS_OF_IMAGES = (
    *SMALL,
    *("train.max_steps=null", f"train.max_epochs={EPOCHS}", "schedule.shape=linear", "schedule.warmup=0"),
    "data.on_change=next_epoch",
)
LATER = 8  # two steps of the second of 4 epochs, 6 steps each


@pytest.mark.parametrize("size", [32, 320])
def test_schedule_and_end_follow_the_new_data(tmp_path, size):
    runs.run_until(tmp_path, LATER, *EPOCHS_OF_IMAGES, "data.size=96", "every.save=50 percent")
    total = LATER + 2 * (size // 16)  # epochs 2 and 3
    session = runs.closed(tmp_path, *EPOCHS_OF_IMAGES, f"data.size={size}", "every.save=50 percent")
    assert (session.limits.length.total_steps, session.tracker.progress.bar.total) == (total, total)
    assert session.limits.save.steps == total // 2
    assert session.state.update.schedule(total) == 0.0
    assert session.state.update.schedule(total - 1) == pytest.approx(1 / total)
    result = runs.run(tmp_path, *EPOCHS_OF_IMAGES, f"data.size={size}")
    assert result.steps == total
    lines = helpers.metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, total + 1))
    assert all(line["lr"] > 0 for line in lines)
    epochs = [line["epoch"] for line in lines]
    assert epochs == sorted(epochs)
    assert epochs[LATER] == pytest.approx(2 + 16 / size)
    assert epochs[-1] == EPOCHS


def test_a_second_resume_keeps_the_length(tmp_path):
    """The data is by then what the checkpoint has: nothing tells that it had changed before."""
    runs.run_until(tmp_path, LATER, *EPOCHS_OF_IMAGES, "data.size=96")
    runs.run_until(tmp_path, LATER + 1, *EPOCHS_OF_IMAGES, "data.size=32")
    session = runs.closed(tmp_path, *EPOCHS_OF_IMAGES, "data.size=32")
    assert session.limits.length.total_steps == LATER + 4


def test_another_global_batch_at_a_resume_is_measured_as_well(tmp_path):
    runs.run_until(tmp_path, LATER, *EPOCHS_OF_IMAGES, "data.size=96")
    result = runs.run(tmp_path, *EPOCHS_OF_IMAGES, "data.size=96", "batch.global_size=32")
    assert result.steps == LATER + 2 + 2 * 3
    assert helpers.metrics(tmp_path)[-1]["lr"] > 0


def test_skipped_steps_do_not_change_the_length_of_a_resumed_run(tmp_path):
    session = runs.closed(tmp_path, *EPOCHS_OF_IMAGES, "data.size=96")
    before = session.limits.length
    progress = session.state.progress
    progress.step, progress.skipped, progress.epoch, progress.consumed = 5, 3, 1, 32
    session.measure_length()
    assert session.limits.length == before
    assert before.total_steps == 24


def test_without_measuring_the_rate_ends_early(tmp_path, monkeypatch):
    """Negative control."""
    monkeypatch.setattr(Session, "measure_length", lambda self: None)
    runs.run_until(tmp_path, LATER, *EPOCHS_OF_IMAGES, "data.size=96")
    runs.run(tmp_path, *EPOCHS_OF_IMAGES, "data.size=32")
    assert helpers.metrics(tmp_path)[-1]["lr"] == 0.0
