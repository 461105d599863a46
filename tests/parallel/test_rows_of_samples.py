"""Buffers with a row per sample (`per_sample_buffers`): a save keeps the rows of every rank's samples."""

import shutil
from pathlib import Path

import pytest
import runs
import torch

from .cell import TINY, Cell
from .rank import Record

pytestmark = pytest.mark.slow

STREAM = (
    *TINY,
    *("data={_target_: writing_models.Columns}", "task=writing_models.squares", "user_packages=[writing_models]"),
    *("batch.global_size=6", "batch.micro_size=3", "train.check_loss=false", "optimizer.lr=0.05"),
    *("train.max_steps=8", "checkpointing=standard", "checkpointing.keep_last=9"),
)
COLUMNS = (*STREAM, *runs.own_model("writing_models.Recurring"))
POSITIONS = (*COLUMNS, "+model.by_column=false")
EXACT = 1e-6  # ranks sum their losses in another order


def losses_of(cell: Cell, world: int, settings: tuple[str, ...], *overrides: str, run_dir: Path | None = None):
    records: list[Record] = cell.run(world, *overrides, tiny=settings, run_dir=run_dir)
    assert records[0].error is None, records[0].error
    return records[0].losses


def stopped_in_step_5(cell: Cell, settings: tuple[str, ...], strategy: str) -> Path:
    run_dir = cell.directory()
    cell.run(2, f"parallel={strategy}", "train.max_steps=5", "every.save=2", tiny=settings, run_dir=run_dir)
    return run_dir


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_saves_change_no_number(cell, strategy):
    for settings in (COLUMNS, POSITIONS):
        never = losses_of(cell, 2, settings, f"parallel={strategy}", "every.save=null")
        assert losses_of(cell, 2, settings, f"parallel={strategy}", "every.save=2") == never
        if settings is COLUMNS:
            assert never == pytest.approx(losses_of(cell, 0, settings, "parallel=single"), rel=EXACT)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_resume_continues_with_the_rows_of_all_samples(cell, strategy):
    """On as many ranks, and on one."""
    undisturbed = losses_of(cell, 0, COLUMNS, "parallel=single")
    run_dir = stopped_in_step_5(cell, COLUMNS, strategy)
    alone = cell.directory()
    shutil.copytree(run_dir, alone)
    resumed = losses_of(cell, 2, COLUMNS, f"parallel={strategy}", "every.save=2", run_dir=run_dir)
    assert resumed == pytest.approx(undisturbed[5:], rel=EXACT)
    assert losses_of(cell, 0, COLUMNS, "parallel=single", run_dir=alone) == pytest.approx(undisturbed[5:], rel=EXACT)


def test_saved_by_one_rank_resumed_on_two(cell):
    undisturbed = losses_of(cell, 0, COLUMNS, "parallel=single")
    run_dir = cell.directory()
    cell.run(0, "parallel=single", "train.max_steps=3", tiny=COLUMNS, run_dir=run_dir)
    resumed = losses_of(cell, 2, COLUMNS, "parallel=ddp", "every.save=2", run_dir=run_dir)
    assert resumed == pytest.approx(undisturbed[3:], rel=EXACT)


def test_a_checkpoint_of_two_ranks_holds_the_state_of_one(cell):
    """The buffer, and so what mode=eval computes with it."""
    run_dir = stopped_in_step_5(cell, COLUMNS, "ddp")
    alone = cell.directory()
    cell.run(0, "parallel=single", "train.max_steps=5", "every.save=2", tiny=COLUMNS, run_dir=alone)
    losses = []
    states = []
    for folder in (run_dir, alone):
        states.append(runs.tensors(folder / "checkpoints" / "step_00000005")["model"]["hidden"])
        evaluated = cell.directory()
        ended = runs.run(evaluated, "mode=eval", "user_packages=[writing_models]", f"checkpointing.resume={folder}")
        losses.append(ended.evaluation["loss"])
    torch.testing.assert_close(*states)
    assert losses[0] == pytest.approx(losses[1], rel=EXACT)


def test_rows_that_ranks_share_are_kept_by_rank(cell):
    """Indexed by the position in the micro-batch: exact on as many ranks; on one, the loss is named."""
    undisturbed = losses_of(cell, 2, POSITIONS, "parallel=ddp")
    run_dir = stopped_in_step_5(cell, POSITIONS, "ddp")
    alone = cell.directory()
    shutil.copytree(run_dir, alone)
    again = cell.run(2, "parallel=ddp", "every.save=1", tiny=POSITIONS, run_dir=run_dir)
    assert again[0].losses == undisturbed[5:]
    (record,) = cell.run(0, "parallel=single", tiny=POSITIONS, run_dir=alone)
    (text,) = [text for text in record.log if "the same rows" in text]
    assert "written by 2 ranks, which wrote the same rows of model.hidden (per_sample_buffers)" in text
    assert "resume on 2 ranks" in text


def evaluated_by(cell: Cell, world: int, settings: tuple[str, ...], *overrides: str):
    """The evaluations' losses, the same on every rank, and the messages about rows."""
    records: list[Record] = cell.run(world, "every.eval=4", *overrides, tiny=settings)
    for record in records:
        assert record.error is None, record.error
        assert record.evaluated == records[0].evaluated
    losses = [means["loss"] for means in records[0].evaluated]
    assert len(losses) == 2
    return losses, [text for text in records[0].log if "the ranks write the same rows" in text]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("columns", "settings", "is_shared"),
    [
        (3, (), False),
        (3, ("batch.eval_micro_size=1",), False),  # the rows are those of both ranks only later in the set
        (1, (), False),
        (6, (), True),
        (4, ("batch.eval_micro_size=2",), True),
    ],
)
def test_an_evaluation_never_has_a_sequence_on_two_ranks(cell, strategy, columns, settings, is_shared):
    """Ranks take the samples in turn: where they do not divide the number of sequences, each evaluates all."""
    settings = (f"+data.val_columns={columns}", *settings)
    alone, _ = evaluated_by(cell, 0, COLUMNS, "parallel=single", "batch.eval_micro_size=1", settings[0])
    losses, texts = evaluated_by(cell, 2, COLUMNS, f"parallel={strategy}", *settings)
    assert losses == pytest.approx(alone, rel=EXACT)
    if is_shared:
        assert texts == []
    else:
        (text,) = texts
        assert "the same rows of model.hidden (per_sample_buffers) in the evaluation: time steps of one" in text
        assert "as where 2 ranks do not divide the number of sequences" in text


def test_rows_of_places_in_the_micro_batch_stay_shared(cell):
    """Of three sequences on each rank, both write rows 0 to 2, for sequences of their own."""
    alone, _ = evaluated_by(cell, 0, POSITIONS, "parallel=single", "batch.micro_size=6", "+data.val_columns=6")
    losses, texts = evaluated_by(cell, 2, POSITIONS, "parallel=ddp", "+data.val_columns=6")
    assert texts == []
    assert losses == pytest.approx(alone, rel=EXACT)


def test_one_row_that_may_be_of_a_place_or_a_sequence_is_named(cell):
    """One sample at a time, of one sequence: as with two sequences and a model that has a row for each place."""
    _, texts = evaluated_by(cell, 2, COLUMNS, "parallel=ddp", "+data.val_columns=1", "batch.eval_micro_size=1")
    (text,) = texts
    assert "one sample at a time, which does not show whether a row is that of a sequence" in text
    assert "otherwise evaluate with parallel=single" in text
