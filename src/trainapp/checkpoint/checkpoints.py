"""Checkpoints on disk: written whole or not at all, verified before use, the damaged ones passed over.

    <run directory>/checkpoints/step_00000100/{state.pt, manifest.json}
    <run directory>/checkpoints/latest          the name of the newest
    <run directory>/checkpoints/best            the name of the best

A checkpoint is written under a temporary name, fsynced, given a manifest (sizes, SHA-256 digests, configuration,
versions) and renamed. Loading unpickles nothing but tensors and primitives (`weights_only`).
"""

import contextlib
import hashlib
import json
import logging
import os
import pickle
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from trainapp import __version__
from trainapp.errors import TrainingStopped, UserError
from trainapp.parallel.ranks import Ranks, SingleRank

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.pt"
log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run directory. With several ranks every method here that says so is called by all."""

    def __init__(self, run_dir: Path, keep_last: int, enabled: bool = True, ranks: Ranks | None = None):
        self.folder = run_dir / "checkpoints"
        self.keep_last, self.enabled = keep_last, enabled
        self.ranks = ranks or SingleRank()

    def save(self, write: Callable[[Path], None], step: int, config: dict[str, Any], is_best: bool) -> Path:
        """A checkpoint of `step`: `write` puts its files into a folder. Then drops those that are no longer kept.

        For all ranks. Raises TrainingStopped on all of them when the disk refuses one; what was there is intact.
        """
        temporary, digests = self.begin(step), {}

        def work() -> None:
            write(temporary)
            digests.update(self.digests(temporary))

        self.together(step, temporary, work)
        return self.commit(temporary, digests, step, config, is_best)

    def begin(self, step: int) -> Path:
        """The empty folder that a checkpoint is written into. For all ranks."""
        temporary = self.folder / f".tmp-{_name(step)}"

        def make() -> None:
            if self.ranks.is_rank_zero:
                self._clear_leftovers()
                temporary.mkdir(parents=True)

        self.together(step, temporary, make)
        return temporary

    def digests(self, folder: Path) -> dict[str, Any]:
        """Size and digest of the files that this rank wrote: its shards, and for the leader all that is nobody's.

        They are on the disk when it returns.
        """
        own = [p for p in sorted(folder.iterdir()) if p.name.startswith(f"__{self.ranks.rank}_")]
        if self.ranks.is_rank_zero:
            own += [p for p in sorted(folder.iterdir()) if not p.name.startswith("__")]
        for path in own:
            _fsync(path)
        return {p.name: {"bytes": p.stat().st_size, "sha256": _digest(p)} for p in own}

    def commit(
        self, temporary: Path, digests: dict[str, Any], step: int, config: dict[str, Any], is_best: bool
    ) -> Path:
        """Give the written folder its manifest and its name. For all ranks, once all have written."""
        everybody = {name: entry for part in self.ranks.all_gather_object(digests) for name, entry in part.items()}
        final = self.folder / _name(step)

        def finish() -> None:
            if self.ranks.is_rank_zero:
                _write_manifest(temporary, step, config, everybody, self.ranks.world)
                _fsync(temporary)
                if final.exists():
                    _remove(final)
                os.replace(temporary, final)
                _fsync(self.folder)
                self._point("latest", final)
                if is_best:
                    self._point("best", final)
                self._prune(final)

        self.together(step, temporary, finish)
        return final

    def together(self, step: int, temporary: Path, work: Callable[[], None]) -> None:
        """For all ranks: do `work`; when the disk refuses it on any of them, all raise TrainingStopped."""
        problem = None
        try:
            work()
        except (OSError, RuntimeError, CheckpointException) as error:
            problem = _refusal(error, self.ranks.rank)
        problems = [problem for problem in self.ranks.all_gather_object(problem) if problem]
        if problems:
            if self.ranks.is_rank_zero:
                shutil.rmtree(temporary, ignore_errors=True)
            rank, text = problems[0]
            where = f"rank {rank}: " if self.ranks.world > 1 else ""
            raise TrainingStopped(
                f"the checkpoint of step {step} could not be written to {self.folder}: {where}{text}; "
                f"the last good one is {self.newest_name() or 'none'}"
            )

    def newest(self) -> Path | None:
        """The newest checkpoint that verifies, or None. Damaged ones are named in the log."""
        for path in self._all():
            problem = damage(path)
            if problem is None:
                return path
            log.warning("checkpoint %s is damaged (%s); using the one before it", path, problem)
        return None

    def newest_name(self) -> str | None:
        """The newest checkpoint's path, not verified."""
        return next((str(path) for path in self._all()), None)

    def best(self) -> Path | None:
        """The best checkpoint by the objective, if there is one."""
        with contextlib.suppress(OSError):
            path = self.folder / (self.folder / "best").read_text().strip()
            return path if path.is_dir() else None
        return None

    def _all(self) -> Iterator[Path]:
        """Newest first."""
        return iter(sorted(self.folder.glob("step_*"), reverse=True))

    def _point(self, name: str, target: Path) -> None:
        temporary = self.folder / f".tmp-{name}-{os.getpid()}"
        temporary.write_text(target.name + "\n")
        _fsync(temporary)
        os.replace(temporary, self.folder / name)

    def _prune(self, written: Path) -> None:
        """Keep the newest up to the one just written, and the best. What is beyond it is damaged, or a branch left."""
        best, there = self.best(), list(self._all())
        position = there.index(written)
        for path in there[:position]:
            log.warning("checkpoint %s is removed: the run went back before it, and has saved %s", path, written.name)
            _remove(path)
        for path in there[position + self.keep_last :]:
            if path != best:
                _remove(path)

    def _clear_leftovers(self) -> None:
        """What a killed process left half written."""
        for path in self.folder.glob(".tmp-*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None: every file is there, with the size and digest of its manifest."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            return f"format {manifest['format']}, this version reads {FORMAT}"
        files = manifest["files"].items()
        for name, expected in files:
            size = (path / name).stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size} bytes, not {expected['bytes']}"
            if _digest(path / name) != expected["sha256"]:
                return f"{name} does not match its digest"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"unreadable manifest: {error}"
    return None


def resolve(setting: str) -> Path:
    """The checkpoint that `checkpointing.resume=PATH` means: itself, or the newest good one of a run directory.

    Raises UserError when there is none, and for a named checkpoint that is damaged.
    """
    path = Path(setting)
    name = f"checkpointing.resume={setting}"
    if not path.exists():
        raise UserError(f"{name}: no such file or directory")
    if path.is_file():
        path = path.parent
    if (path / MANIFEST).is_file():
        problem = damage(path)
        if problem is None:
            return path
        before = next((p for p in sorted(path.parent.glob("step_*"), reverse=True) if p < path and not damage(p)), None)
        hint = f"; the one before it is good: checkpointing.resume={before}" if before else ""
        raise UserError(f"{name}: this checkpoint is damaged ({problem}){hint}")
    run_dir = path.parent if path.name == "checkpoints" else path
    found = Checkpoints(run_dir, keep_last=1).newest()
    if found is None:
        raise UserError(f"{name}: neither a checkpoint nor a run directory with a good one")
    return found


def load(path: Path, name: str = STATE) -> dict[str, Any]:
    """The saved state, on the CPU. Executes nothing from the file. Raises UserError where it would have to."""
    try:
        return torch.load(path / name, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"checkpoint {path} holds more than tensors and plain values; not loaded: {reason}") from None


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint that `resolve` or `newest` returned."""
    return json.loads((path / MANIFEST).read_text())


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _refusal(error: BaseException, rank: int) -> tuple[int, str]:
    """Which rank's disk, and what it said. torch's writers wrap it; what is no refusal to write is raised."""
    if isinstance(error, CheckpointException):  # raised on every rank, whoever failed
        rank, (error, _) = next(iter(error.failures.items()))
    if isinstance(error, OSError):
        return rank, str(error)
    if not re.search(r"write|unexpected pos", str(error), re.IGNORECASE):
        raise error
    return rank, f"a file could not be written to its end; is the disk full? (torch: {str(error).strip()})"


def _write_manifest(folder: Path, step: int, config: dict[str, Any], files: dict[str, Any], ranks: int) -> None:
    manifest = {
        "format": FORMAT,
        "step": step,
        "ranks": ranks,
        "versions": {"trainapp": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "files": files,
        "config": config,
    }
    path = folder / MANIFEST
    path.write_text(json.dumps(manifest, indent=1))
    _fsync(path)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _fsync(path: Path) -> None:
    """A rename survives a power cut only when the file and its folder were flushed before it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Out of sight first, so that nobody sees half of it."""
    hidden = path.with_name(f".tmp-removed-{path.name}-{os.getpid()}")
    os.replace(path, hidden)
    shutil.rmtree(hidden)
