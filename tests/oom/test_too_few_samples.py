"""A micro-batch that the model cannot run, as BatchNorm cannot run a single value per channel: no later one has so few.

The step is rolled back as after an out-of-memory error, so that the run is bit for bit one that knew it from the start.
"""

import json

import pytest
import runs
import torch
from faults import Fault
from harness import Record, Recorded
from torch import nn

from trainapp.errors import TrainingStopped
from trainapp.oom import error_kinds
from trainapp.sizes.failures import ErrorKind

from .conftest import peak_of, prepared, tiny

NORMED = (*runs.own_model("own_models.NormedPoint"), "data=digits", "user_packages=[own_models]")
GROUPED = (
    *runs.own_model("own_models.Grouped"),
    *NORMED[-2:],
    "batch.global_size=64",
    "batch.micro_size=auto",
    "oom.grow=true",
)
DECLARED = (*runs.own_model("own_models.NormedPair"), *NORMED[-2:])
ODD = {"batch.global_size": 17, "batch.micro_size": 2}
ONE = "Expected more than 1 value per channel when training, got input size torch.Size([1, 8, 1, 1])"


OUT_OF_MEMORY = ErrorKind.OUT_OF_MEMORY
TOO_FEW = ErrorKind.TOO_FEW_SAMPLES


def failures(recorded: Recorded) -> list[tuple[int, ErrorKind, int, int]]:
    """Of each failure its step, its kind, and the sizes before and after."""
    return [(f.step, f.kind, f.recovery.old_size, f.recovery.new_size) for f in recorded.failures]


def as_if_known(run_dir, changes) -> Record:
    """The record of a run whose model declares that it needs two samples."""
    recorded = Recorded(tiny(run_dir, *DECLARED, changes=changes))
    assert not recorded.failures
    return recorded.record()


def test_a_remainder_of_one_joins_another_micro_batch(tmp_path, caplog):
    recorded = Recorded(tiny(tmp_path / "run", *NORMED, changes=ODD))
    assert failures(recorded) == [(1, TOO_FEW, 2, 2)]
    first_step = [indices for step, _, indices in recorded.fetched if step == 0]
    assert [len(indices) for indices in first_step] == [3] * 5 + [2]
    assert runs.differences(recorded.record(), as_if_known(tmp_path / "known", ODD)) == []
    (line,) = [text for text in caplog.messages if "retrying" in text]
    assert line == (
        f"the model cannot run a single sample at step 1 in forward (norm) ({ONE}): from now on every micro-batch "
        "of this shape has at least 2 samples; retrying the step with micro-batch 2"
    )
    assert not (tmp_path / "run" / "oom").exists()
    assert recorded.result.oom_restarts == 0


def test_only_the_last_step_of_an_epoch_leaves_one(tmp_path):
    """1437 digits in steps of 64 leave 29, which are odd: known only then."""
    changes = {"batch.global_size": 64, "batch.micro_size": 2, "train.max_steps": 24}
    recorded = Recorded(tiny(tmp_path / "run", *NORMED, changes=changes))
    assert failures(recorded) == [(23, TOO_FEW, 2, 2)]
    assert runs.differences(recorded.record(), as_if_known(tmp_path / "known", changes)) == []


def test_a_replay_of_the_schedule_is_the_same(tmp_path):
    recorded = Recorded(tiny(tmp_path / "run", *NORMED, changes=ODD))
    schedule = json.loads((tmp_path / "run" / "result.json").read_text())["micro_schedule"]
    assert schedule == {"1": 2}
    again = Recorded(tiny(tmp_path / "again", *NORMED, schedule={1: 2}, changes=ODD))
    assert runs.differences(recorded.record(), again.record()) == []


def test_the_search_comes_back_up_and_a_resume_knows_why(tmp_path):
    """Memory runs out above 2 samples; 16, 8 and 2 come down to 1 with 17 samples, of which one is left over."""
    saving = {"checkpointing.save": True, "checkpointing.resume": "auto", "train.max_steps": 2}
    changes = {"batch.global_size": 17, "batch.micro_size": "auto", "schedule.shape": "constant", **saving}
    fault = Fault("forward", 1, 0, above=2)
    first = Recorded(tiny(tmp_path / "run", *NORMED, changes=changes), fault)
    assert failures(first) == [
        (1, OUT_OF_MEMORY, 17, 8),
        (1, OUT_OF_MEMORY, 8, 4),
        (1, OUT_OF_MEMORY, 4, 2),
        (1, TOO_FEW, 2, 2),
    ]
    assert first.result.oom_restarts == 3
    second = Recorded(tiny(tmp_path / "run", *NORMED, changes={**changes, "train.max_steps": 4}))
    assert second.failures == []
    assert second.result.oom_restarts == 3
    known = {**changes, "checkpointing.save": False, "checkpointing.resume": "none", "train.max_steps": 4}
    wanted = as_if_known(tmp_path / "known", {**known, "batch.micro_size": 2})
    assert runs.differences(second.record().state, wanted.state) == []


def test_where_the_smallest_that_runs_does_not_fit_memory_ends_the_run(tmp_path, caplog):
    fault = Fault("forward", 1, 0, above=1)
    with pytest.raises(TrainingStopped) as caught:
        Recorded(tiny(tmp_path, *NORMED, changes={"batch.micro_size": "auto"}), fault)
    first, *table = str(caught.value).splitlines()
    assert first == f"out of memory in forward with micro-batch 2: the model cannot run fewer samples ({ONE})."
    assert any(line.startswith("parameters") for line in table)
    assert [text.rpartition("micro-batch ")[2] for text in caplog.messages if "retrying" in text] == [
        "16 -> 8, retrying the step",
        "8 -> 4, retrying the step",
        "4 -> 2, retrying the step",
        "2 -> 1, retrying the step",
        "2",
    ]


def test_a_size_of_the_users_that_the_model_cannot_run_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as caught:
        Recorded(tiny(tmp_path, *NORMED, changes={"batch.micro_size": 1}))
    assert any("use batch.micro_size=2" in note for note in caught.value.__notes__)


def test_a_step_of_one_sample_is_an_error(tmp_path):
    """An epoch of 1437 digits ends on one of them."""
    changes = {"batch.global_size": 4, "train.max_steps": 361, "every.log": None}
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as caught:
        Recorded(tiny(tmp_path, *NORMED, changes=changes))
    assert any("data.drop_last=true" in note for note in caught.value.__notes__)


def test_an_error_that_more_samples_do_not_help_is_the_users(tmp_path, caplog):
    """In the remainder of the first step, so that it might be for its few samples."""
    changes = {"batch.global_size": 20, "batch.micro_size": 8}
    bad = prepared(tiny(tmp_path / "a", *NORMED, changes=changes))
    bad.close()
    last = int(list(bad.batches.share(bad.state.progress).numbers)[-1])
    with pytest.raises(ValueError, match="this digit is refused"):
        Recorded(tiny(tmp_path / "b", *NORMED, f"+model.bad={last}", changes=changes))
    assert sum("retrying" in text for text in caplog.messages) <= 3


QUADS = (*runs.own_model("own_models.Quads"), *NORMED[-2:])
FOURS = {"batch.global_size": 16, "batch.micro_size": "auto"}


@pytest.mark.slow
def test_a_model_that_needs_four_samples_is_not_split_further(tmp_path):
    recorded = Recorded(tiny(tmp_path, *QUADS, changes=FOURS), Fault("forward", 1, 0, above=4))
    assert failures(recorded) == [(1, OUT_OF_MEMORY, 16, 8), (1, OUT_OF_MEMORY, 8, 4)]


@pytest.mark.slow
def test_a_size_that_a_schedule_sets_too_small_is_doubled_until_the_model_runs(tmp_path):
    recorded = Recorded(tiny(tmp_path, *QUADS, schedule={1: 4, 3: 1}, changes=FOURS))
    assert failures(recorded) == [(3, TOO_FEW, 1, 2), (3, TOO_FEW, 2, 4)]
    assert {len(indices) % 4 for _, _, indices in recorded.fetched} == {0}


def test_a_larger_size_that_the_model_cannot_run_is_left(tmp_path, caplog):
    """The search tries sizes of its own, which a model that groups its samples refuses: that costs one retried step."""
    needed = peak_of(tmp_path / "24", GROUPED, 24)
    changes = {"memory.limit": needed - 1000, "train.max_steps": 8}
    recorded = Recorded(tiny(tmp_path / "run", *GROUPED, changes=changes))
    sizes = [(failure.kind, failure.recovery.old_size, failure.recovery.new_size) for failure in recorded.failures]
    *out_of_memory, (kind, rejected, instead) = sizes
    assert [size for _, size, _ in out_of_memory] == [64, 32]
    assert kind is ErrorKind.SIZE_REJECTED
    assert 8 < rejected < 32
    assert instead == 8
    assert f"the model cannot run micro-batch {rejected} at step " in caplog.text
    assert "(Batch size should be a multiple of 8): going back to micro-batch 8, which has run" in caplog.text
    assert recorded.result.oom_restarts == 2
    assert recorded.result.steps == 8
    replay = Recorded(tiny(tmp_path / "replay", *GROUPED, schedule=recorded.result.micro_schedule, changes=changes))
    assert runs.differences(recorded.record(), replay.record()) == []


EVALUATED = (
    *runs.own_model("own_models.GroupedAlways"),
    *("data=digits", "user_packages=[own_models]", "every.eval=2", "train.check_loss=false", "batch.global_size=16"),
)


@pytest.mark.parametrize(("group", "size", "samples"), [(8, "12", 12), (16, "auto", 8)])
def test_a_number_of_samples_that_the_model_refuses_in_evaluation_is_named(tmp_path, group, size, samples):
    """Of the first micro-batch, or of the rest: 360 digits by 32 leave 8."""
    with pytest.raises(AssertionError, match="Batch size should be a multiple") as caught:
        runs.run(tmp_path, *EVALUATED, f"+model.group={group}", f"batch.eval_micro_size={size}")
    (note,) = [note for note in caught.value.__notes__ if "evaluation" in note]
    assert note.startswith(f"in an evaluation micro-batch of {samples} samples (batch.eval_micro_size={size}, batch.gl")
    assert "set batch.eval_micro_size to one that divides the number of samples" in note


def test_an_error_of_an_evaluation_in_the_size_of_training_is_not_for_its_number(tmp_path):
    with pytest.raises(ZeroDivisionError) as caught:
        runs.run(
            tmp_path, *EVALUATED, "+model.group=8", "batch.eval_micro_size=16", "task=own_models.fails_in_evaluation"
        )
    assert not any("evaluation" in note for note in caught.value.__notes__)


def test_a_derivative_in_an_evaluation_is_advised_to_enable_gradients(tmp_path):
    """Whatever the number of samples."""
    with pytest.raises(RuntimeError, match="does not require grad") as caught:
        runs.run(tmp_path, *EVALUATED, "+model.group=1", "batch.eval_micro_size=12", "task=own_models.penalised")
    advice, step = caught.value.__notes__
    assert "an evaluation runs without gradients" in advice
    assert "with torch.enable_grad():" in advice
    assert step == "at step 2"


def test_an_error_of_an_evaluation_that_no_number_of_samples_causes_has_no_advice(tmp_path):
    with pytest.raises(RuntimeError, match="dtype") as caught:
        runs.run(tmp_path, *EVALUATED, "+model.group=1", "batch.eval_micro_size=12", "task=own_models.of_floats")
    assert caught.value.__notes__ == ["at step 2"]


@pytest.mark.parametrize(
    "compute",
    [
        lambda: nn.Conv1d(1, 1, 1)(torch.ones(1, 1, 2, dtype=torch.float64)),
        lambda: nn.Linear(2, 2)(torch.ones(1, 2, dtype=torch.float64)),
    ],
)
def test_torchs_errors_about_dtypes_are_of_any_number_of_samples(compute):
    with pytest.raises(RuntimeError) as caught:
        compute()
    assert error_kinds._OF_ANY_NUMBER.search(str(caught.value))
    assert not error_kinds._OF_ANY_NUMBER.search("the batch sizes of input and state should be the same")


def test_a_number_of_samples_that_the_model_refuses_in_a_prediction_is_named(tmp_path):
    runs.run(tmp_path / "run", *EVALUATED, "+model.group=8", "batch.eval_micro_size=8", "train.max_steps=2")
    with pytest.raises(AssertionError, match="Batch size should be a multiple") as caught:
        runs.infer("predict", tmp_path, tmp_path / "run", "user_packages=[own_models]", "predict.batch_size=12")
    advice, step = caught.value.__notes__
    assert advice.startswith("in an evaluation micro-batch of 12 samples (predict.batch_size=12): ")
    assert "set predict.batch_size to one that divides" in advice
    assert step == "at step 2"
