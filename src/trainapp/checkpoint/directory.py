"""The checkpoints of a run on disk: written completely or not at all, verified before use, skipped if damaged.

    <run directory>/checkpoints/step_00000100/    one checkpoint
        __<rank>_0.distcp, .metadata              tensors, as torch.distributed.checkpoint writes them (`shards`)
        values.pt                                 everything else: plain values and small tensors (`checkpointer`)
        manifest.json                             configuration, versions, size and SHA-256 of each file (`manifest`)
    <run directory>/checkpoints/best              the name of the best

A checkpoint is written into a folder with a temporary name, synced to the disk, given its manifest and renamed. Other
files in the folder are left alone, such as a copy `step_00000100_backup`.
"""

import contextlib
import hashlib
import logging
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.api import CheckpointException

from trainapp import __version__
from trainapp.checkpoint.manifest import FORMAT, MANIFEST, read_manifest, write_manifest
from trainapp.errors import TrainingStopped, UserError
from trainapp.files import atomic_write, fsync
from trainapp.parallel.ranks import Ranks, SingleRank

T = TypeVar("T")
_NAME = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,})")
log = logging.getLogger(__name__)


class CheckpointDirectory:
    """The checkpoints of one run directory. keep_last: number of newest ones to keep, in addition to the best."""

    def __init__(self, run_dir: Path, keep_last: int = 1, ranks: Ranks | None = None):
        self.folder = run_dir / "checkpoints"
        self.keep_last, self.ranks = keep_last, ranks or SingleRank()

    def begin(self, step: int) -> Path:
        """The empty folder to write the checkpoint of `step` into. Collective. Raises TrainingStopped as `commit`."""
        folder = self._temporary(step)

        def make() -> None:
            for leftover in self.folder.glob(".tmp-*"):  # left by a killed process
                _delete(leftover)
            folder.mkdir(parents=True)

        self._on_all_ranks(step, make if self.ranks.is_rank_zero else lambda: None)
        return folder

    def commit(self, step: int, write: Callable[[], dict[str, Any]], config: dict[str, Any], is_best: bool) -> None:
        """Give the folder from `begin` its files, manifest and name; remove checkpoints beyond `keep_last`. Collective.

        write: writes this rank's files, or waits until they are written; returns their `describe`. config: for the
        manifest. Raises TrainingStopped on all ranks, and removes the folder, if the disk refuses a write on any.
        """
        by_rank = self._on_all_ranks(step, write)

        def publish() -> None:
            temporary, final = self._temporary(step), self.folder / _name(step)
            files = {name: entry for part in by_rank for name, entry in part.items()}
            write_manifest(temporary, self._manifest(step, config, files))
            former = _hide(final) if os.path.lexists(final) else None  # saved before the step's evaluation was repeated
            os.replace(temporary, final)
            fsync(self.folder)
            if former is not None:
                _delete(former)
            if is_best:
                with atomic_write(self.folder / "best", sync=True) as file:
                    file.write(final.name + "\n")
            self._prune(final)

        self._on_all_ranks(step, publish if self.ranks.is_rank_zero else lambda: None)

    def _manifest(self, step: int, config: dict[str, Any], files: dict[str, Any]) -> dict[str, Any]:
        """Return the content of the manifest. files: result of `describe` for all ranks' files."""
        return {
            "format": FORMAT,
            "step": step,
            "ranks": self.ranks.world_size,
            "versions": {"trainapp": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "files": files,
            "config": config,
        }

    def _temporary(self, step: int) -> Path:
        return self.folder / f".tmp-{_name(step)}"

    def _on_all_ranks(self, step: int, work: Callable[[], T]) -> list[T]:
        """Every rank's result of `work`. Collective. Raises TrainingStopped as `commit`."""
        result, refusal = None, None
        try:
            result = work()
        except (OSError, RuntimeError, CheckpointException) as error:
            refusal = _refusal(error, self.ranks)
        by_rank = self.ranks.all_gather_object((result, refusal))
        if refusals := [text for _, text in by_rank if text]:
            if self.ranks.is_rank_zero:
                with contextlib.suppress(OSError):
                    _delete(self._temporary(step))
            raise TrainingStopped(
                f"the checkpoint of step {step} could not be written to {self.folder}: {refusals[0]}; "
                f"the last good one is {self.newest_name() or 'none'}"
            )
        return [result for result, _ in by_rank]

    def newest(self) -> Path | None:
        """The newest checkpoint that verifies, or None. Logs a warning for each that does not.

        Raises UserError for one of another format.
        """
        for path in checkpoints_in(self.folder):
            problem = damage(path)
            if problem is None:
                return path
            log.warning("checkpoint %s %s; using the one before it", path, problem)
        return None

    def newest_name(self) -> str | None:
        """The newest checkpoint's path, not verified."""
        return next((str(path) for path in checkpoints_in(self.folder)), None)

    def best(self) -> Path | None:
        """The best checkpoint by the objective, not verified, or None."""
        with contextlib.suppress(OSError):
            path = self.folder / (self.folder / "best").read_text().strip()
            return path if _is_checkpoint(path) else None
        return None

    def _prune(self, written: Path) -> None:
        """Keep the best and the newest up to `written`; later ones are damaged or from an abandoned branch."""
        best, present = self.best(), checkpoints_in(self.folder)
        position = present.index(written)
        for path in present[:position]:
            log.warning("removing checkpoint %s: the run was rolled back before it, and saved %s", path, written.name)
            _delete(_hide(path))
        for path in present[position + self.keep_last :]:
            if path != best:
                _delete(_hide(path))


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first, including damaged ones. Other files are ignored."""
    return sorted(filter(_is_checkpoint, folder.glob("step_*")), key=lambda path: int(path.name[5:]), reverse=True)


def names_checkpoint(value: str) -> bool:
    """Whether the value is the path of a run directory, of a checkpoint, or of a run's `checkpoints/best`."""
    path = Path(value).expanduser()
    return (path / "checkpoints").is_dir() or (path / MANIFEST).is_file() or (path.name == "best" and path.is_file())


def resolve(value: str, setting: str = "checkpointing.resume") -> Path:
    """The checkpoint at this path; for a run's `checkpoints/best`, the best one; for a run directory, the newest good
    one.

    setting: the setting with this value. Raises UserError if there is none, or if it cannot be used.
    """
    name, path = f"{setting}={value}", Path(value).expanduser()
    if not path.exists():
        has_last = path.name == "best" and path.parent.is_dir()
        advice = "; the run saved none at an evaluation, or its objective=auto has no best (several updates): name its "
        advice += "directory (of load, which='last')"
        raise UserError(f"{name}: no such file or directory{advice if has_last else ''}")
    if path.is_file() and path.name == "best":
        best = CheckpointDirectory(path.parent.parent).best()
        if best is None:
            raise UserError(f"{name}: the checkpoint that it names no longer exists")
        path = best
    if (path / MANIFEST).is_file():
        if problem := damage(path):
            raise UserError(f"{name}: this checkpoint {problem}")
        return path
    run_dir = path.parent if path.name == "checkpoints" else path
    newest = CheckpointDirectory(run_dir).newest()
    if newest is None:
        raise UserError(f"{name}: neither a checkpoint nor a run directory with a good one")
    return newest


def describe(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Size in bytes and SHA-256 of each file, by name."""
    return {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in paths}


def damage(path: Path) -> str | None:
    """Why the checkpoint at `path` cannot be used, as a predicate ("is damaged ..."); None if it can.

    Every file must have the size and digest in the manifest. Reads all files: about 3 s per GB.
    Raises UserError for another format.
    """
    try:
        for name, expected in read_manifest(path)["files"].items():
            size = (path / name).stat().st_size
            if size != expected["bytes"]:
                return f"is damaged ({name} has {size} bytes, not {expected['bytes']})"
            if _sha256(path / name) != expected["sha256"]:
                return f"is damaged ({name} does not match its digest)"
    except FileNotFoundError as error:
        return f"is damaged ({Path(error.filename).name} is missing)"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"is damaged (its manifest cannot be used: {error})"
    return None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _is_checkpoint(path: Path) -> bool:
    """Whether the path, or its target, has a checkpoint's name and at least one of its files."""
    return bool(_NAME.fullmatch(path.name)) and any((path / n).exists() for n in (MANIFEST, ".metadata", "values.pt"))


def _refusal(error: BaseException, ranks: Ranks) -> str:
    """Why a disk refused a write, and on which rank. Raises `error` if it has another cause."""
    rank = ranks.rank
    if isinstance(error, CheckpointException):  # raised on every rank, whichever failed
        rank, (error, _) = next(iter(error.failures.items()))
    where, text = f"rank {rank}: " if ranks.world_size > 1 else "", str(error).strip()
    if isinstance(error, OSError):
        return where + text
    if not re.search(r"write|unexpected pos", text, re.IGNORECASE):
        raise error
    return f"{where}a file could not be written to its end; is the disk full? (torch: {text})"


def _hide(path: Path) -> Path:
    """Rename a folder that will be deleted, so that it disappears at once. Returns its new path."""
    hidden = path.with_name(f".tmp-removed-{path.name}-{os.getpid()}")
    os.replace(path, hidden)
    return hidden


def _delete(path: Path) -> None:
    """Delete a folder with its content; for a link or a file, only its name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
