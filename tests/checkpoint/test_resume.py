"""A run that was stopped and resumed ends bit-identical to an uninterrupted one."""

import functools
import tempfile
import time
from pathlib import Path

import helpers
import pytest
import runs
from runs import end

from trainapp.errors import UserError
from trainapp.training import loop

# All cross the end of an epoch: the data set is small or the batch is large.
CASES = {
    "mlp": (*runs.MODELS["mlp"], "batch.global_size=400", "batch.micro_size=150"),
    "resnet": (*runs.MODELS["resnet"], "batch.global_size=400", "batch.micro_size=150", "train.ema=0.5"),
    "gpt": (*runs.MODELS["gpt"], "batch.global_size=60", "batch.micro_size=25"),
    "gpt_varying": (*runs.MODELS["gpt"], "data.min_length=2", "batch.global_size=60", "batch.micro_size=25"),
    "sgd": (*runs.MODELS["mlp"], "optimizer=sgd"),
    "fp16": (*runs.MODELS["mlp"], "precision=fp16", "precision.growth_interval=2"),
}
TIMES = ("samples_per_second", "tokens_per_second", "mfu", "data_wait", "memory/")


def losses(run_dir):
    """Everything in metrics.jsonl except measurements of this process."""
    return [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in helpers.metrics(run_dir)]


@functools.cache
def whole(case):
    """The uninterrupted run."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        runs.run(run_dir, *CASES[case], "train.max_steps=6", "every.eval=4")
        return end(run_dir), losses(run_dir), helpers.evaluations(run_dir)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "stop", "first", "second"),
    [
        ("mlp", 2, 0, 0),
        ("mlp", 5, 2, 0),
        ("resnet", 2, 0, 0),
        ("resnet", 5, 0, 2),
        ("gpt", 3, 0, 0),
        ("gpt", 2, 2, 0),
        ("gpt_varying", 2, 0, 2),
        ("sgd", 2, 0, 0),
        ("fp16", 3, 0, 0),
    ],
)
def test_resumed_is_uninterrupted_bit_for_bit(tmp_path, case, stop, first, second):
    """Weights, buffers, optimizer, average, loss scale, generators, losses and evaluations; first, second: workers."""
    expected, lines, evaluations = whole(case)
    overrides = (*CASES[case], "train.max_steps=6", "every.eval=4")
    runs.run_until(tmp_path / "b", stop, *overrides, f"data.num_workers={first}")
    stopped = runs.saved(tmp_path / "b", stop)
    assert stopped["progress"]["step"] == stop
    runs.run(tmp_path / "b", *overrides, f"data.num_workers={second}")
    assert runs.differences(end(tmp_path / "b"), expected) == []
    assert losses(tmp_path / "b") == lines
    assert helpers.evaluations(tmp_path / "b") == evaluations
    assert runs.differences(stopped["model"], expected["model"]) != []


@pytest.mark.parametrize("case", ["mlp", "gpt"])
def test_stopped_at_every_step(tmp_path, case):
    """A separate process for each step: the same losses."""
    _, lines, _ = whole(case)
    for stop in range(1, 7):
        runs.run_until(tmp_path / "b", stop, *CASES[case], "train.max_steps=6", "every.eval=4")
    assert losses(tmp_path / "b") == lines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "lost"), [("mlp", "consumed"), ("resnet", "epoch"), ("mlp", "optimizer"), ("resnet", "buffers")]
)
def test_each_part_of_the_state_is_needed(tmp_path, case, lost):
    """Negative controls: with one part of the state lost, the result differs."""
    expected, _, _ = whole(case)
    stop = 5  # in the middle of the second epoch
    overrides = (*CASES[case], "train.max_steps=6", "every.eval=4")
    runs.run_until(tmp_path / "b", stop, *overrides)
    for lose in (None, lost):
        run = runs.prepare(tmp_path / "b", *overrides, "every.save=null", "checkpointing.save=false")
        state = run.state
        if lose in ("consumed", "epoch"):
            setattr(state.progress, lose, 0)
        elif lose == "optimizer":
            state.optimizer.state[next(state.model.parameters())]["exp_avg"].zero_()
        elif lose == "buffers":
            for name, buffer in state.model.named_buffers():
                if name.endswith("running_mean"):
                    buffer.zero_()
        loop.train(run)
        run.tracker.close()
        same = runs.differences(state.tensors()["model"], expected["model"]) == []
        assert same == (lose is None)


@pytest.mark.slow
def test_the_tail_of_a_killed_process_is_done_again(tmp_path):
    """Lines and events after the last checkpoint belong to steps that the resumed run repeats."""
    overrides = (*runs.MODELS["mlp"], "train.max_steps=8", "every.eval=2")
    runs.run(tmp_path / "a", *overrides)
    runs.run_until(tmp_path / "b", 3, *overrides)
    time.sleep(1.1)
    run = runs.prepare(tmp_path / "b", *overrides)
    for _ in range(3):
        loop.train_step(run)
        loop.evaluate(run)
    run.tracker.close()  # the process dies without saving
    with (tmp_path / "b" / "metrics.jsonl").open("a") as file:
        file.write('\0\0\0\n{"step": 7, "sam')  # zeros after a power failure; the middle of a line
    time.sleep(1.1)  # event files are read in the order of their names, which have a resolution of one second
    runs.run(tmp_path / "b", *overrides)
    assert losses(tmp_path / "b") == losses(tmp_path / "a")
    assert [line["step"] for line in helpers.metrics(tmp_path / "b")] == list(range(1, 9))
    assert helpers.evaluations(tmp_path / "b") == helpers.evaluations(tmp_path / "a")
    assert event_steps(tmp_path / "b") == list(range(1, 9))


@pytest.mark.slow
def test_a_run_that_died_before_its_first_checkpoint_starts_again(tmp_path):
    run = runs.prepare(tmp_path, *runs.MODELS["mlp"])
    for _ in range(3):
        loop.train_step(run)
    run.tracker.close()
    time.sleep(1.1)  # event files are read in the order of their names, which have a resolution of one second
    runs.run(tmp_path, *runs.MODELS["mlp"])
    assert [line["step"] for line in helpers.metrics(tmp_path)] == [1, 2, 3, 4]
    assert event_steps(tmp_path) == [1, 2, 3, 4]


def event_steps(run_dir):
    """The steps of the loss in the event files, repeated ones twice."""
    return [event.step for event in helpers._events(run_dir).Scalars("train/loss")]


@pytest.mark.slow
def test_from_another_runs_checkpoint_into_a_new_directory(tmp_path):
    overrides = (*runs.MODELS["mlp"], "train.max_steps=6")
    runs.run(tmp_path / "a", *overrides, "every.save=2", "checkpointing.keep_last=3")
    run_dir = tmp_path / "b"
    runs.run(run_dir, *overrides, f"checkpointing.resume={runs.checkpoint(tmp_path / 'a', 2)}")
    assert runs.differences(end(run_dir), end(tmp_path / "a")) == []
    assert [line["step"] for line in helpers.metrics(run_dir)] == [3, 4, 5, 6]


@pytest.mark.slow
def test_another_branch_from_an_older_checkpoint_keeps_its_own(tmp_path):
    """In the same directory: the new branch's checkpoints outlive the old branch's, and resuming uses them."""
    overrides = (*runs.MODELS["mlp"], "train.max_steps=10")
    runs.run(tmp_path, *overrides, "every.save=2", "checkpointing.keep_last=9")
    older = runs.checkpoint(tmp_path, 4)
    runs.run_until(tmp_path, 5, *overrides, f"checkpointing.resume={older}")
    assert runs.checkpoint(tmp_path, 5).is_dir()
    run = runs.closed(tmp_path, *overrides)
    assert run.state.progress.step == 5


def test_resume_none_starts_anew(tmp_path):
    runs.run_until(tmp_path, 2, *runs.MODELS["mlp"])
    run = runs.closed(tmp_path, *runs.MODELS["mlp"], "checkpointing.resume=none")
    assert run.state.progress.step == 0


@pytest.mark.slow
@pytest.mark.parametrize("change", ["batch.global_size=1000", "data.drop_last=true"])
def test_another_batch_in_the_middle_of_an_epoch(tmp_path, change):
    """The rest of the epoch may be less than a batch, or empty."""
    runs.run_until(tmp_path, 89, *runs.MODELS["mlp"], "train.max_steps=92")  # 13 samples before the end of the epoch
    runs.run(tmp_path, *runs.MODELS["mlp"], "train.max_steps=92", change)
    assert helpers.result(tmp_path)["steps"] == 92


@pytest.mark.parametrize(
    ("change", "named"), [("model.width=32", "layers.0.0.weight"), ("optimizer=sgd", "it was saved with")]
)
def test_a_checkpoint_that_does_not_fit(tmp_path, change, named):
    runs.run_until(tmp_path, 1, *runs.MODELS["mlp"])
    with pytest.raises(UserError, match="does not fit this configuration") as caught:
        runs.prepare(tmp_path, *runs.MODELS["mlp"], change)
    assert "step_00000001" in str(caught.value)
    assert named in str(caught.value)
