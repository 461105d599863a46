"""Saved on N ranks, resumed on M: same samples, same losses. And what a checkpoint must not do."""

import dataclasses
import hashlib
import io
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import runs
import torch

from .conftest import Cell
from .test_equality import TOLERANCE, error

pytestmark = pytest.mark.slow

SAVING = ("checkpointing=standard", "every.save=2", "optimizer=adamw", "optimizer.lr=0.01", "train.ema=0.5")


def spread(world: int, strategy: str) -> tuple[int, str]:
    """One rank of DDP is a plain single process here."""
    return (0, "parallel=single") if world == 1 and strategy == "ddp" else (world, f"parallel={strategy}")


@dataclasses.dataclass
class Saved:
    """Runs that tests resume: each is run once, and every test gets a copy of its directory."""

    folder: Path
    originals: dict[tuple[str | int, ...], Path] = dataclasses.field(default_factory=dict)

    def __call__(self, cell: Cell, saver: tuple[int, str], *overrides: str) -> Path:
        """The copy of a run on these ranks with SAVING."""
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
        """Likewise, with half of the steps to go."""
        return self(cell, saver, *overrides, "train.max_steps=2")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Saved:
    return Saved(tmp_path_factory.mktemp("saved"))


# Every saver meets every number of readers, and every reader every number of savers; both strategies meet each other
# and every number on either side.
PAIRS = [
    ((n, ("ddp", "fsdp")[(n + m) % 2]), (m, ("ddp", "fsdp")[(n + m) // 2 % 2]))
    for n in (1, 2, 3, 4)
    for m in (1, 2, 3, 4)
]
FAST = [
    ((1, "ddp"), (2, "fsdp")), ((2, "fsdp"), (1, "ddp")), ((3, "ddp"), (1, "ddp")), ((2, "fsdp"), (4, "fsdp")),
    ((4, "fsdp"), (3, "fsdp")), ((2, "ddp"), (2, "fsdp")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("saver", "reader"),
    [
        pytest.param(*pair, marks=() if pair in FAST else pytest.mark.nightly, id="-".join(f"{n}_{s}" for n, s in pair))
        for pair in dict.fromkeys((*FAST, *PAIRS))
    ],
)
def test_saved_on_some_ranks_resumed_on_others(cell, saved, saver, reader):
    (reference,) = cell.reference(0, *SAVING)
    ranks, strategy = spread(*reader)
    records = cell.run(ranks, strategy, *SAVING, run_dir=saved.in_step_2(cell, saver))
    for record in records:
        assert record.progress["step"] == 4
        assert record.losses == pytest.approx(reference.losses[2:], rel=TOLERANCE)
        assert error(record.weights, reference.weights) < 1e-4  # AdamW divides by small second moments
        assert error(record.average, reference.average) < 1e-4
    samples = {k: [i for r in records for i in r.samples[k]] for k in records[0].samples}
    assert list(samples.values()) == [reference.samples[2], reference.samples[3]]


def test_on_as_many_ranks_it_is_bit_identical(cell):
    for strategy in ("ddp", "fsdp", "hsdp"):
        undisturbed = cell.run(2, f"parallel={strategy}", *SAVING, "model.dropout=0.1")
        run_dir = cell.directory()
        cell.run(2, f"parallel={strategy}", *SAVING, "model.dropout=0.1", "train.max_steps=2", run_dir=run_dir)
        records = cell.run(2, f"parallel={strategy}", *SAVING, "model.dropout=0.1", run_dir=run_dir)
        for record, other in zip(records, undisturbed, strict=True):
            assert record.losses == other.losses[2:]
            assert torch.equal(record.weights, other.weights)
            assert torch.equal(record.average, other.average)


FOREIGN = (
    *runs.STEPS_ONLY, *SAVING, "checkpointing.keep_last=1", "train.max_steps=6", "batch.micro_size=8", "model=mlp",
    "~model.width", "~model.depth", "~model.dropout", "data=digits", "user_packages=[foreign]",
)  # fmt: skip
OWN_OPTIMIZER = ("~optimizer.betas", "~optimizer.eps", "user_packages=[foreign]")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp"])
@pytest.mark.parametrize("stop", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_an_optimizer_with_plain_and_late_state_on_two_ranks(cell, strategy, stop):
    """Also in shards, and read by one rank."""
    settings = (*SAVING, "every.save=1", "optimizer._target_=foreign.LateMomentum", *OWN_OPTIMIZER, "train.max_steps=6")
    undisturbed = cell.reference(2, f"parallel={strategy}", *settings)
    run_dir = cell.directory()
    cell.run(2, f"parallel={strategy}", *settings, f"train.max_steps={stop}", run_dir=run_dir)
    alone = cell.directory()
    shutil.copytree(run_dir, alone)
    for record, other in zip(cell.run(2, f"parallel={strategy}", *settings, run_dir=run_dir), undisturbed, strict=True):
        assert record.losses == other.losses[stop:]
        assert torch.equal(record.weights, other.weights)
    (record,) = cell.run(0, "parallel=single", *settings, run_dir=alone)
    assert record.losses == pytest.approx(undisturbed[0].losses[stop:], rel=TOLERANCE)


def test_another_micro_batch_and_other_workers(cell, saved):
    (reference,) = cell.reference(0, *SAVING)
    run_dir = saved.in_step_2(cell, (2, "fsdp"))
    records = cell.run(2, "parallel=fsdp", *SAVING, "batch.micro_size=3", "data.num_workers=1", run_dir=run_dir)
    for record in records:
        assert record.losses == pytest.approx(reference.losses[2:], rel=TOLERANCE)
        assert record.sizes == [3, 3]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_asynchronous_saves_the_same(cell, strategy):
    # Training continues while the shards are written: the state saved is that at the time of `save`.
    synchronous, asynchronous = cell.directory(), cell.directory()
    later = ("checkpointing.asynchronous=true", "train.max_steps=8", "checkpointing.keep_last=8", "every.save=1")
    now = ("train.max_steps=8", "checkpointing.keep_last=8", "every.save=1")
    cell.run(2, f"parallel={strategy}", *SAVING, *now, run_dir=synchronous)
    cell.run(2, f"parallel={strategy}", *SAVING, *later, run_dir=asynchronous)
    names = sorted(path.name for path in (synchronous / "checkpoints").glob("step_*"))
    assert names == sorted(path.name for path in (asynchronous / "checkpoints").glob("step_*"))
    assert len(names) == 8
    for name in names:
        first, second = (everything(folder / "checkpoints" / name) for folder in (synchronous, asynchronous))
        assert first.keys() == second.keys()
        assert [key for key in first if not torch.equal(first[key], second[key])] == []


def everything(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint by their full names."""
    flat: dict[str, torch.Tensor] = {}

    def walk(value: object, name: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{name}.{key}")
        elif isinstance(value, torch.Tensor):
            flat[name] = value

    walk(runs.tensors(path), "")
    assert flat
    return flat


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


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.nightly), 2])
@pytest.mark.parametrize("damage", ["flipped bit", "truncated", "missing"])
def test_a_damaged_shard_is_named_and_the_one_before_used(cell, saved, damage, world):
    run_dir = saved(cell, (2, "fsdp"))
    shard = next((run_dir / "checkpoints" / "step_00000004").glob("__1_*.distcp"))
    content = bytearray(shard.read_bytes())
    if damage == "missing":
        shard.unlink()
    else:
        content[len(content) // 2] ^= 1
        shard.write_bytes(content if damage == "flipped bit" else content[:-7])
    ranks, strategy = spread(world, "fsdp" if world == 2 else "ddp")
    records = cell.run(ranks, strategy, *SAVING, "train.max_steps=5", run_dir=run_dir)
    assert [record.progress["step"] for record in records] == [5] * len(records)
    assert [len(record.losses) for record in records] == [3] * len(records)  # from step 2 on
    lines = "\n".join(records[0].log)
    assert shard.name in lines
    assert "step_00000004 is damaged" in lines
    assert "using the one before it" in lines


def test_a_folder_that_cannot_be_made(cell):
    run_dir = cell.directory()
    run_dir.mkdir()
    (run_dir / "checkpoints").write_text("in the way")
    for record in cell.run(2, "parallel=fsdp", *SAVING, run_dir=run_dir):
        assert "the checkpoint of step 2 could not be written" in record.error


def test_exported_from_any_number_of_ranks(cell, saved, tmp_path):
    run_dir = saved.in_step_2(cell, (2, "fsdp"))
    folders = [tmp_path / f"export_{number}" for number in range(4)]
    readers = [(0, "parallel=single"), (2, "parallel=fsdp"), (3, "parallel=fsdp"), (2, "parallel=ddp")]
    for folder, (world, strategy) in zip(folders, readers, strict=True):
        overrides = (
            "mode=export",
            f"checkpointing.resume={run_dir}",
            f"export.folder={folder}",
            "export.file_size=8KB",
        )
        records = cell.run(world, strategy, *SAVING, *overrides)
        assert [record.error for record in records] == [None] * len(records)
    files = [{path.name: path.read_bytes() for path in sorted(folder.iterdir())} for folder in folders]
    assert len(files[0]) > 2
    assert all(other == files[0] for other in files)


class Payload:
    """What unpickling must never run."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def plant(path: Path, name: str, content: bytes) -> None:
    """Put a file into a checkpoint and update the manifest to match."""
    (path / name).write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("place", [".metadata", "planner_data", "values.pt", "values.pt as pickle", "byte item"])
def test_planted_payloads_do_not_run(cell, saved, place, tmp_path):
    run_dir, marker = saved.in_step_2(cell, (2, "fsdp")), tmp_path / "ran"
    path = run_dir / "checkpoints" / "step_00000002"
    if place == ".metadata":
        plant(path, ".metadata", pickle.dumps(Payload(marker)))
    elif place == "planner_data":
        metadata = pickle.loads((path / ".metadata").read_bytes())
        metadata.planner_data = Payload(marker)
        plant(path, ".metadata", pickle.dumps(metadata))
    elif place == "byte item":
        _turn_into_bytes(path, marker)
    elif place == "values.pt":
        content = io.BytesIO()
        torch.save(torch.load(path / "values.pt") | {"scaler": Payload(marker)}, content)
        plant(path, "values.pt", content.getvalue())
    else:
        plant(path, "values.pt", pickle.dumps(Payload(marker)))
    records = cell.run(2, "parallel=fsdp", *SAVING, run_dir=run_dir)
    assert all(record.error is not None for record in records), "it was loaded"
    assert not marker.exists(), "it ran"
    assert "step_00000002" in records[0].error
    # Negative control: torch's own loader runs it.
    if place in (".metadata", "planner_data"):
        pickle.loads((path / ".metadata").read_bytes())
        assert marker.exists()


def _turn_into_bytes(path: Path, marker: Path) -> None:
    """Turn one tensor into a byte item that holds a pickle, as DCP stores anything that is not a tensor."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    metadata = pickle.loads((path / ".metadata").read_bytes())
    name = next(n for n in metadata.state_dict_metadata if n.startswith("model."))
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    index = next(i for i in metadata.storage_data if i.fqn == name)
    info = metadata.storage_data[index]
    content = io.BytesIO()
    torch.save(Payload(marker), content)
    shard = bytearray((path / info.relative_path).read_bytes())
    place = len(shard)
    changed = dataclasses.replace(info, offset=place, length=len(content.getvalue()))
    metadata.storage_data = {
        (dataclasses.replace(i, offset=None, index=None) if i.fqn == name else i): (changed if i.fqn == name else entry)
        for i, entry in metadata.storage_data.items()
        if i.fqn != name or i is index
    }
    plant(path, info.relative_path, bytes(shard) + content.getvalue())
    plant(path, ".metadata", pickle.dumps(metadata))


@pytest.mark.parametrize("world", [0, 2])
def test_another_model_is_refused(cell, saved, world):
    run_dir = saved.in_step_2(cell, (2, "fsdp"))
    strategy = "parallel=fsdp" if world else "parallel=single"
    for record in cell.run(world, strategy, *SAVING, "model.width=32", run_dir=run_dir):
        assert "does not fit this configuration's model or optimizer" in record.error
        assert record.losses == []


@pytest.mark.parametrize("reader", [(2, "fsdp"), (2, "ddp"), (1, "ddp")], ids=lambda r: f"{r[0]}_{r[1]}")
def test_an_average_that_was_not_saved_begins_at_the_weights(cell, reader):
    run_dir = cell.directory()
    without = [text for text in SAVING if "ema" not in text]
    first = cell.run(2, "parallel=fsdp", *without, "train.max_steps=2", run_dir=run_dir)
    ranks, strategy = spread(*reader)
    for record in cell.run(ranks, strategy, *SAVING, "train.ema=0.999999", "train.max_steps=3", run_dir=run_dir):
        assert error(record.average, first[0].weights) < 1e-5


def test_another_optimizer_is_refused_or_begins_anew(cell, saved):
    run_dir = saved.in_step_2(cell, (2, "fsdp"))
    for record in cell.run(2, "parallel=fsdp", *SAVING, "optimizer=sgd", "optimizer.momentum=0.5", run_dir=run_dir):
        assert record.error is not None
