"""Saved on N ranks, resumed on M: same samples, same losses. And what a checkpoint must not do."""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import pytest
import runs
import torch
from safetensors.torch import load_file

from trainapp.signals import TO_BE_CONTINUED

from . import variants
from .cell import Cell
from .comparing import TOLERANCE, error, together
from .rank import Record

pytestmark = pytest.mark.slow

SAVING = ("checkpointing=standard", "every.save=2", "optimizer=adamw", "optimizer.lr=0.01", "train.ema=0.5")


def spread(world: int, strategy: str) -> tuple[int, str]:
    """Return the number of ranks and the strategy; one rank of DDP is a plain single process here."""
    if (world, strategy) == (1, "ddp"):
        return 0, "parallel=single"
    return world, f"parallel={strategy}"


@dataclasses.dataclass
class Saved:
    """Runs that tests resume: each is run once, and every test gets a copy of its directory."""

    folder: Path
    originals: dict[tuple[str | int, ...], Path] = dataclasses.field(default_factory=dict)

    def __call__(self, cell: Cell, saver: tuple[int, str], *overrides: str) -> Path:
        """Return the copy of a run on these ranks with SAVING."""
        ranks, strategy = spread(*saver)
        key = (ranks, strategy, *overrides)
        if key not in self.originals:
            run_dir = self.folder / f"run_{len(self.originals)}"
            cell.run(ranks, strategy, *SAVING, *overrides, run_dir=run_dir)
            self.originals[key] = run_dir
        copy = cell.directory()
        shutil.copytree(self.originals[key], copy)
        return copy

    def in_step_2(self, cell: Cell, saver: tuple[int, str], *overrides: str) -> Path:
        """Return likewise that of a run with half of the steps to go."""
        return self(cell, saver, *overrides, "train.max_steps=2")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Saved:
    return Saved(tmp_path_factory.mktemp("saved"))


PAIRS = [
    ((1, "ddp"), (2, "fsdp")), ((2, "fsdp"), (1, "ddp")), ((4, "fsdp"), (3, "fsdp")), ((2, "ddp"), (2, "fsdp")),
]  # fmt: skip


@pytest.mark.parametrize(("saver", "reader"), PAIRS, ids=lambda rank: "_".join(map(str, rank)))
def test_saved_on_some_ranks_resumed_on_others(cell, saved, saver, reader):
    (reference,) = cell.reference(0, *SAVING)
    ranks, strategy = spread(*reader)
    records = cell.run(ranks, strategy, *SAVING, run_dir=saved.in_step_2(cell, saver))
    for record in records:
        assert record.progress["step"] == 4
        assert record.losses == pytest.approx(reference.losses[2:], rel=TOLERANCE)
        assert error(record.weights, reference.weights) < 1e-4  # AdamW divides by small second moments
        assert error(record.average, reference.average) < 1e-4
    assert list(together(records).values()) == [reference.samples[2], reference.samples[3]]


DROPOUT = ("model.dropout=0.1",)
# An optimizer with plain and late state, which one rank can read, too.
LATE = (
    "optimizer._target_=foreign.LateMomentum", "~optimizer.betas", "~optimizer.eps", "optimizer.weight_decay=null",
    "user_packages=[foreign]", "train.max_steps=6",
)  # fmt: skip


def assert_bit_identical(records: list[Record], undisturbed: list[Record]) -> None:
    """Assert that ranks that were resumed in step 2 end as those that were not interrupted."""
    for record, other in zip(records, undisturbed, strict=True):
        assert record.losses == other.losses[2:]
        assert torch.equal(record.weights, other.weights)
        assert torch.equal(record.average, other.average)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp"])
def test_on_as_many_ranks_it_is_bit_identical(cell, strategy):
    settings = (f"parallel={strategy}", *SAVING, *DROPOUT)
    run_dir = cell.directory()
    undisturbed = cell.run(2, *settings)
    cell.run(2, *settings, "train.max_steps=2", run_dir=run_dir)
    assert_bit_identical(cell.run(2, *settings, run_dir=run_dir), undisturbed)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_plain_and_late_optimizer_state_is_resumed(cell, strategy):
    """Bit for bit on as many ranks, and on one."""
    settings = (*SAVING, *LATE)
    run_dir, alone = cell.directory(), cell.directory()
    undisturbed = cell.run(2, f"parallel={strategy}", *settings)
    cell.run(2, f"parallel={strategy}", *settings, "train.max_steps=2", run_dir=run_dir)
    shutil.copytree(run_dir, alone)
    assert_bit_identical(cell.run(2, f"parallel={strategy}", *settings, run_dir=run_dir), undisturbed)
    (record,) = cell.run(0, "parallel=single", *settings, run_dir=alone)
    assert record.losses == pytest.approx(undisturbed[0].losses[2:], rel=TOLERANCE)


def test_asynchronous_saves_the_same(cell):
    """Training continues while the shards are written: the state saved is that at the time of `save`."""
    synchronous, asynchronous = cell.directory(), cell.directory()
    chosen = ("parallel=fsdp", *SAVING, "train.max_steps=8", "checkpointing.keep_last=8", "every.save=1")
    cell.run(2, *chosen, run_dir=synchronous)
    cell.run(2, *chosen, "checkpointing.asynchronous=true", run_dir=asynchronous)
    names = sorted(path.name for path in (synchronous / "checkpoints").glob("step_*"))
    assert names == sorted(path.name for path in (asynchronous / "checkpoints").glob("step_*"))
    assert len(names) == 8
    for name in names:
        first, second = (runs.tensors(folder / "checkpoints" / name) for folder in (synchronous, asynchronous))
        assert runs.differences(first, second) == []


@pytest.mark.parametrize(
    ("world", "strategy", "asynchronous"), [(0, "single", "false"), (2, "ddp", "false"), (2, "fsdp", "true")]
)
def test_saves_by_the_clock_change_no_number(cell, world, strategy, asynchronous):
    """All ranks save together, though their clocks differ."""
    chosen = (f"parallel={strategy}", *SAVING, *DROPOUT, "train.max_steps=8", "oom.grow=false")
    never = cell.run(world, *chosen, "every.save=null")
    often = (*chosen, "every.save=1 seconds", f"checkpointing.asynchronous={asynchronous}")
    by_clock = cell.run(world, *often, function=variants.train_by_clock)
    for (record, saved, _), undisturbed in zip(by_clock, never, strict=True):
        assert record.losses == undisturbed.losses
        assert torch.equal(record.weights, undisturbed.weights)
        assert saved == ([2, 4, 6, 8] if world else [4, 8])  # the fastest clock decides
    if world:  # negative control: by its own clock, only rank 1 would save
        assert [asked[1::2] for _, _, asked in by_clock] == [[False] * 4, [True] * 4]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_agree_that_the_time_is_up(cell, strategy):
    ended = cell.run(2, f"parallel={strategy}", *SAVING, function=variants.train_out_of_time)
    assert ended == [(TO_BE_CONTINUED, 1)] * 2


def test_manifest_names_every_file_of_every_rank(cell, saved):
    run_dir = saved.in_step_2(cell, (2, "fsdp"))
    cell.run(3, "parallel=fsdp", *SAVING, run_dir=run_dir)
    for step, ranks in ((2, 2), (4, 3)):
        path = run_dir / "checkpoints" / f"step_{step:08d}"
        manifest = json.loads((path / "manifest.json").read_text())
        assert manifest["ranks"] == ranks
        assert set(manifest["files"]) == {p.name for p in path.iterdir()} - {"manifest.json"}
        assert sum(name.endswith(".distcp") for name in manifest["files"]) == ranks
        for name, entry in manifest["files"].items():
            content = (path / name).read_bytes()
            assert (entry["bytes"], entry["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
    assert not list((run_dir / "checkpoints").glob(".tmp*"))


def test_a_damaged_shard_is_named_and_the_one_before_used(cell, saved):
    run_dir = saved(cell, (2, "fsdp"))
    shard = next((run_dir / "checkpoints" / "step_00000004").glob("__1_*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    records = cell.run(2, "parallel=fsdp", *SAVING, "train.max_steps=5", run_dir=run_dir)
    assert [record.progress["step"] for record in records] == [5] * len(records)
    assert [len(record.losses) for record in records] == [3] * len(records)  # from step 2 on
    lines = "\n".join(records[0].log)
    assert shard.name in lines
    assert "step_00000004 is damaged" in lines
    assert "using the one before it" in lines


def test_exported_from_shards(cell, saved, tmp_path):
    """With their average, as those of one process."""
    weights = []
    for saver in ((2, "fsdp"), (1, "ddp")):
        resume = f"checkpointing.resume={saved.in_step_2(cell, saver)}"
        (file,) = runs.run(tmp_path / saver[1], "mode=export", resume)
        weights.append(load_file(file))
    of_shards, of_one_process = weights
    assert of_shards.keys() == of_one_process.keys()
    for name, tensor in of_one_process.items():
        torch.testing.assert_close(of_shards[name], tensor, rtol=1e-4, atol=1e-6)


def test_another_model_is_refused(cell, saved):
    run_dir = saved.in_step_2(cell, (2, "fsdp"))
    for record in cell.run(2, "parallel=fsdp", *SAVING, "model.width=32", run_dir=run_dir):
        assert "does not fit this configuration's model or optimizer" in record.error
        assert record.losses == []
