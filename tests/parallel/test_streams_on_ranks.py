"""Memory runs out on one rank that reads a stream: all ranks read the step again, and none waits for another."""

import shutil

import own_streams
import pytest
from faults import Fault
from helpers import run_cli

from .cell import TINY, Cell
from .comparing import errors

STREAM = (*TINY, "model=mlp", "model.width=16", "user_packages=[own_streams]", "~data.augment", "data.num_workers=0")
LIMIT = 30.0  # seconds; a rank that waits for a message that never comes is seen after a third of them


def of(kind: str, *overrides: str) -> tuple[str, ...]:
    return (f"data._target_=own_streams.{kind}", "oom.grow=false", *overrides)


# Before the first step, after a plain one, after an evaluation and after a checkpoint: sizes are validated from step 2.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spread", "kind", "step", "between"),
    [
        ("ddp", "Plain", 1, ()),
        ("ddp", "Sharded", 3, ("every.eval=1",)),
        ("ddp", "Plain", 3, ("checkpointing=standard", "every.save=1")),
        ("fsdp", "Sharded", 3, ("every.eval=1",)),
    ],
)
def test_one_rank_fails_to_read(cell: Cell, spread, kind, step, between):
    overrides = (f"parallel={spread}", *of(kind, *between))
    wanted = cell.reference(2, *overrides, tiny=STREAM)
    records = cell.run(2, *overrides, faults=[Fault("read", step, rank=1)], tiny=STREAM, limit=LIMIT)
    for record, other in zip(records, wanted, strict=True):
        assert [
            (failure.step, failure.recovery.old_size, failure.recovery.new_size) for failure in record.failures
        ] == [(step, 4, 4)]
        assert record.failures[0].failed_ranks == [1]
        assert (record.sizes, record.samples) == (other.sizes, other.samples)
        assert record.losses == other.losses
        assert max(errors(record, other)) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "warns"), [("DividedByRank", True), ("Plain", False)])
def test_a_stream_that_divides_itself_by_rank_is_named(tmp_path, kind, warns):
    """Ranks keep a part of their part, and train on half of the samples."""
    shutil.copy(own_streams.__file__, tmp_path)
    overrides = (*STREAM, "parallel=ddp", "parallel.devices=2", *of(kind), "train.max_steps=2")
    ended = run_cli(*overrides, f"hydra.run.dir={tmp_path / 'run'}", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ("ranks read different samples of the stream" in ended.stdout + ended.stderr) is warns
