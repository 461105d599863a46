"""A state of one tensor to save and reload, and ways to damage a checkpoint."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import runs
import torch

from trainapp.checkpoint.checkpointer import Checkpointer
from trainapp.checkpoint.directory import CheckpointDirectory
from trainapp.checkpoint.manifest import read_manifest, write_manifest
from trainapp.checkpoint.sample_rows import SampleRows
from trainapp.parallel.ranks import Ranks, SingleRank

SHARD, METADATA, VALUES, MANIFEST = "__0_0.distcp", ".metadata", "values.pt", "manifest.json"


# In a manifest: how it is damaged, and the setting that then has another value.
CHANGES = {"another seed": ("train", "seed", 12345), "another setting": ("train", "grad_clip", 0.125)}


class OneTensor:
    """The parts of a TrainState that a Checkpointer needs."""

    device = torch.device("cpu")

    def __init__(self, value: float, floats: int = 1000):
        self.value = torch.full((floats,), float(value))
        self.sample_rows = SampleRows(torch.nn.Module())

    def not_saved(self) -> list[str]:
        """Nothing."""
        return []

    def values(self, ranks: Ranks) -> dict[str, Any]:
        """None."""
        return {"ranks": ranks.world_size}

    def tensors(self, values: dict[str, Any]) -> dict[str, Any]:
        """Its only tensor."""
        return {"model": {"value": self.value}}


def directory(run_dir: Path, keep_last: int = 2) -> CheckpointDirectory:
    """The checkpoints of a single process."""
    return CheckpointDirectory(run_dir, keep_last)


def save(run_dir: Path, step: int, is_best: bool = False, keep_last: int = 2, floats: int = 1000) -> None:
    """Save a checkpoint whose tensor encodes its step."""
    saver = Checkpointer(OneTensor(step, floats), directory(run_dir, keep_last), SingleRank(), asynchronous=False)
    saver.save(step, {}, {}, is_best)


def value(path: Path) -> torch.Tensor:
    """The tensor of such a checkpoint."""
    return runs.tensors(path)["model"]["value"]


def names(run_dir: Path) -> list[str]:
    """All names in the folder of checkpoints."""
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def damage_file(path: Path, how: str) -> None:
    """missing, truncated, empty or flipped (one bit)."""
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    elif how in CHANGES:
        manifest = json.loads(path.read_text())
        section, setting, value = CHANGES[how]
        assert manifest["config"][section][setting] != value
        manifest["config"][section][setting] = value
        path.write_text(json.dumps(manifest, indent=1))
    elif how == "empty":
        os.truncate(path, 0)
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


def vouch_for(path: Path, name: str) -> None:
    """Update the manifest to match a changed file."""
    content = (path / name).read_bytes()
    manifest = read_manifest(path)
    manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write_manifest(path, manifest)
