"""What a forward writes is rolled back on all ranks, also where only one of them ran out of memory.

The reference is a run on as many ranks that changes its size by `batch.micro_schedule`.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from faults import Fault
from runs import own_model

from trainapp.state.snapshot import Snapshot

from .cell import TINY, Cell
from .rank import Record, train

pytestmark = pytest.mark.slow

WRITING = (*TINY, "data=digits", "user_packages=[writing_models]", "train.max_steps=6")
CELLS = [  # what differs on ranks: parameters that are wrapped or sharded; the first write, and a later one
    *(("ddp", "TeacherSilent", 5), ("fsdp", "Teacher", 5), ("fsdp", "ExtraState", 5)),  # others: zoo/test_ranks.py
]


def runs_of(cell: Cell, spread: str, model: str, step: int, function=train) -> tuple[list[Record], list[Record]]:
    """By rank: a run in which rank 1 runs out of memory, and the run that switches sizes by configuration."""
    overrides = (f"parallel={spread}", *own_model(f"writing_models.{model}"))
    # `always`: at a validated size no rank votes, and the launcher restarts all workers.
    overrides = (*overrides, "parallel.vote_on_oom=always")
    wanted = cell.run(2, *overrides, tiny=WRITING, schedule={step: 2})
    fault = Fault("backward", step, 6, rank=1)
    return cell.run(2, *overrides, tiny=WRITING, faults=[fault], function=function), wanted


def differences(records: list[Record], wanted: list[Record]) -> list[int]:
    """The ranks whose weights differ in any bit."""
    return [
        rank for rank, (a, b) in enumerate(zip(records, wanted, strict=True)) if not torch.equal(a.weights, b.weights)
    ]


@pytest.mark.parametrize(("spread", "model", "step"), CELLS)
def test_recovered_as_configured(cell, spread, model, step):
    records, wanted = runs_of(cell, spread, model, step)
    assert differences(records, wanted) == []
    for record, other in zip(records, wanted, strict=True):
        assert record.losses == other.losses
        assert record.sizes == other.sizes
        assert len(record.failures) == 1


def train_blindly(rank: int, *arguments) -> Record:
    """A wrong variant: no write of a parameter is noticed."""
    with mock.patch.object(Snapshot, "_written", return_value=[]):
        return train(rank, *arguments)


def test_without_noticing_writes_the_cell_fails(cell):
    assert differences(*runs_of(cell, "ddp", "Teacher", 1, train_blindly)) != []


def trained(cell: Cell, spread: str, model: str) -> Record:
    """The first rank's record of a run whose steps are one micro-batch on each rank."""
    overrides = (f"parallel={spread}", *own_model(f"writing_models.{model}"), "batch.micro_size=64")
    return cell.run(2, *overrides, "train.check_loss=false", tiny=WRITING)[0]


def messages_about_ranks(record: Record) -> list[str]:
    return [message for message in record.log if "differ between ranks" in message]


def test_buffers_that_differ_between_ranks_are_named(cell):
    (message,) = messages_about_ranks(trained(cell, "ddp", "Codebook"))
    assert "the forward writes model.mean, which differ between ranks" in message
    assert messages_about_ranks(trained(cell, "ddp", "ReducedCodebook")) == []


@pytest.mark.parametrize(("task", "names"), [("ByTask", "task.replay.by_class"), ("counts", "")])
def test_a_replay_buffer_of_each_rank_is_named(cell, task, names):
    record = cell.run(
        2,
        *("parallel=ddp", *own_model("own_replays.Held"), f"task=own_replays.{task}", "batch.micro_size=64"),
        *("train.check_loss=false", "user_packages=[own_replays]", "objective=min loss", "train.max_steps=2"),
        tiny=WRITING,
    )[0]
    messages = [message for message in record.log if "and each rank its own" in message]
    assert len(messages) == bool(names)
    assert all(f"the forward writes {names}, " in message for message in messages)


def test_parameters_that_differ_between_ranks_are_refused(cell):
    record = trained(cell, "ddp", "ActNorm")
    assert "the forward writes the parameters model.shift, and each rank from its own samples" in record.error


@pytest.mark.parametrize("every", ["every.log=1", "every.log=null"], ids=["at a logged step", "at a save"])
def test_a_first_write_after_many_steps_is_compared_too(cell, every):
    """As an embedding's with `max_norm`, once its codes have grown: of rows that only one rank has read."""
    overrides = ("parallel=ddp", *own_model("writing_models.LateActNorm"), "batch.micro_size=64", every)
    record = cell.run(2, *overrides, "train.check_loss=false", "every.save=6", "checkpointing=standard", tiny=WRITING)[
        0
    ]
    assert "the forward writes the parameters model.shift, and each rank from its own samples" in record.error


def test_writes_to_gathered_copies_are_refused(cell):
    record = trained(cell, "fsdp", "TeacherInRoot")
    assert "the forward writes teacher.weight, teacher.bias, of which it has gathered copies" in record.error


NO_DECAY = "optimizer.weight_decay=null"


def test_an_optimizer_that_assigns_data_of_shards_is_refused(cell):
    """They are lost. With DDP they are not."""
    own = (*own_model("writing_models.AnnealsInTraining"), "optimizer._target_=writing_models.Assigning", NO_DECAY)
    record = cell.run(2, "parallel=fsdp", *own, "train.check_loss=false", tiny=WRITING)[0]
    assert "the optimizer's step assigns to a parameter's `data`" in record.error
    assert cell.run(2, "parallel=ddp", *own, "train.check_loss=false", tiny=WRITING)[0].error is None


def resumed(cell: Cell, folder: Path, model: str, *overrides: str) -> dict[str, Any]:
    """The values in the last checkpoint of a run that was interrupted, and ends as one that was not."""
    overrides = (*own_model(f"writing_models.{model}"), *overrides, "checkpointing=standard", "every.save=3")
    wanted = cell.run(2, *overrides, tiny=WRITING, run_dir=folder / "whole")
    for steps in (3, 6):
        records = cell.run(2, *overrides, f"train.max_steps={steps}", tiny=WRITING, run_dir=folder / "resumed")
    assert [record.error for record in records] == [None, None]
    assert differences(records, wanted) == []
    return torch.load(folder / "resumed/checkpoints/step_00000006/values.pt", weights_only=True)


@pytest.mark.parametrize("model", ["ExtraState", "Generators"])
def test_each_rank_resumes_with_its_own_state(cell, tmp_path, model):
    """The means in the model's queue are those of a rank's own samples."""
    saved = resumed(cell, tmp_path, model, "parallel=ddp")["stateful"]
    assert len(saved) == (2 if model == "ExtraState" else 1)  # the generators of both ranks have drawn as often


@pytest.mark.parametrize("spread", ["ddp", "fsdp"])
def test_a_frozen_base_that_forwards_write_is_resumed(cell, tmp_path, spread):
    """Whole or in shards, and its shards do not all change alike."""
    pytest.importorskip("peft", reason="needs the extra trainapp[peft]")
    adapter = ("adapter=lora", "adapter.targets=[linear]")
    saved = resumed(cell, tmp_path, "TeacherOfBase", f"parallel={spread}", *adapter)["model_values"]
    assert saved["written"] == ["teacher.bias", "teacher.weight"]


@pytest.mark.parametrize("spread", ["ddp", "fsdp"])
def test_an_evaluation_leaves_each_rank_its_rows(cell, spread):
    """Those of declared buffers, which hold a rank's own samples."""
    overrides = (f"parallel={spread}", *own_model("writing_models.Declares"), "schedule=constant", "schedule.warmup=0")
    wanted = cell.run(2, *overrides, "every.eval=null", tiny=WRITING)
    records = cell.run(2, *overrides, "every.eval=2", tiny=WRITING)
    assert differences(records, wanted) == []
    assert [record.losses for record in records] == [record.losses for record in wanted]
    assert len(records[0].evaluated) == 3
