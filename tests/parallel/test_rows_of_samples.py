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
