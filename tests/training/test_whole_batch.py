"""A task with `whole_batch = True`: its batch is never split, in training and evaluation; memory that lacks says so."""

import pytest
import runs
from helpers import metrics

from trainapp.errors import TrainingStopped, UserError
from trainapp.losses.contrastive import require_uncut
from trainapp.planning import planner

OWN = ("model=mlp", "user_packages=[own_tasks]", "model._target_=own_tasks.Encoder", "~model.depth", "model.width=16")
OWN = (*OWN, "model.dropout=0.0", "+model.norm=false", "data=digits", "objective=min loss")
WHOLE = (*OWN, "task=own_tasks.Whole")


def test_it_is_never_cut(tmp_path):
    """The last step of an epoch has fewer samples."""
    run = runs.run_until(tmp_path, 4, *WHOLE, "batch.global_size=600", "every.eval=4")
    share = run.batches.samples
    expected = [600] * (share // 600) + [share % 600] * bool(share % 600)
    assert run.task.unchecked.sizes == (expected * 4)[:4]
    assert run.sizes.evaluation.size == min(600, run.eval_sets[""].samples)
    lines = metrics(tmp_path)
    assert all(line["batch/accumulation"] == 1 for line in lines)


def test_its_draws_are_those_of_the_whole_batch(tmp_path, caplog):
    """A permutation of its samples depends on no micro-batch: there is none."""
    result = runs.run(tmp_path, *OWN, "task=own_tasks.Shuffled", "train.max_steps=2")
    assert result.depends_on_micro_batch == []
    assert "randperm" not in caplog.text


@pytest.mark.parametrize(
    "override", ["batch.micro_size=8", "accumulation.steps=2", "batch.micro_schedule={1: 16, 3: 8}"]
)
def test_settings_that_would_cut_it_are_refused(tmp_path, override):
    message = runs.refusal(tmp_path, *WHOLE, override)
    assert message.startswith("task=own_tasks.Whole has whole_batch=True: its batch is never split; remove")


@pytest.mark.slow
def test_where_memory_lacks_it_says_what_helps(tmp_path):
    limited = (*WHOLE, "batch.global_size=512", "memory.limit=700KiB", "checkpointing=off")
    with pytest.raises(TrainingStopped) as stopped:
        runs.run(tmp_path, *limited)
    told = "its loss needs the whole batch (whole_batch=True), which is never split; a smaller batch.global_size helps"
    assert told in str(stopped.value)
    assert runs.run(tmp_path / "smaller", *limited, "batch.global_size=64").steps == 4  # negative control


def test_it_is_planned_as_a_whole():
    config = runs.configure("unused", *WHOLE, "batch.global_size=64", "plan.techniques=false")
    facts, _ = planner.plan(config)
    assert (facts["micro_size"], facts["largest_micro_size"]) == (64, 64)


def test_several_ranks_are_refused(tmp_path):
    message = r"but 2 ranks would each compute the loss of a part of it.* or an embedding loss"
    with pytest.raises(UserError, match=message):
        require_uncut(runs.configure(tmp_path, *WHOLE), 2, 1000)
