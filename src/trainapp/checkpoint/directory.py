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
from trainapp.files import BEST, CHECKPOINTS, VALUES, atomic_write, checkpoint_name, fsync
from trainapp.parallel.ranks import Ranks, SingleRank

T = TypeVar("T")
_NAME = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,})")
log = logging.getLogger(__name__)


class CheckpointDirectory:
    """The checkpoints of one run directory.

    Args:
        run_dir: the run directory.
        keep_last: number of newest checkpoints to keep, in addition to the best.
        ranks: the ranks that write a checkpoint together.
    """

    def __init__(self, run_dir: Path, keep_last: int = 1, ranks: Ranks | None = None):
        self.folder = run_dir / CHECKPOINTS
        self.keep_last = keep_last
        self.ranks = ranks or SingleRank()

    def begin(self, step: int) -> Path:
        """Make and return the empty folder to write the checkpoint of `step` into. Collective. Raises TrainingStopped
        as `commit`.
        """
        folder = self._temporary(step)

        def make_folder() -> None:
            if self.ranks.is_rank_zero:
                for unfinished in self.folder.glob(".tmp-*"):  # by a killed process
                    _delete(unfinished)
                folder.mkdir(parents=True)

        self._on_all_ranks(step, make_folder)
        return folder

    def commit(self, step: int, write: Callable[[], dict[str, Any]], config: dict[str, Any], is_best: bool) -> None:
        """Give the folder from `begin` its files, manifest and name; remove checkpoints beyond `keep_last`. Collective.

        Raises TrainingStopped on all ranks, and removes the folder, if the disk refuses a write on any.

        Args:
            step: the step.
            write: writes this rank's files, or waits until they are written; returns their `describe`.
            config: for the manifest.
            is_best: whether it is the best so far.
        """
        files: dict[str, Any] = {}
        for files_of_rank in self._on_all_ranks(step, write):
            files.update(files_of_rank)

        def publish() -> None:
            if self.ranks.is_rank_zero:
                self._publish(step, self._manifest(step, config, files), is_best)

        self._on_all_ranks(step, publish)

    def _publish(self, step: int, manifest: dict[str, Any], is_best: bool) -> None:
        """Give a complete folder its manifest and name, and remove older checkpoints."""
        temporary = self._temporary(step)
        final = self.folder / checkpoint_name(step)
        write_manifest(temporary, manifest)

        # The name appears at once, with all files; a former checkpoint of this name makes way.
        former = None
        if os.path.lexists(final):  # saved before the step's evaluation was repeated
            former = _hide(final)
        os.replace(temporary, final)
        fsync(self.folder)
        if former is not None:
            _delete(former)

        if is_best:
            with atomic_write(self.folder / BEST, sync=True) as file:
                file.write(final.name + "\n")
        self._prune(final)

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
        return self.folder / f".tmp-{checkpoint_name(step)}"

    def _on_all_ranks(self, step: int, work: Callable[[], T]) -> list[T]:
        """Return every rank's result of `work`. Collective. Raises TrainingStopped as `commit`."""
        # No rank may leave before the others: errors are exchanged like results.
        result = None
        refusal = None
        try:
            result = work()
        except (OSError, RuntimeError, CheckpointException) as error:
            refusal = _refusal(error, self.ranks)
        by_rank = self.ranks.all_gather_object((result, refusal))

        # After an error on any, all give up: rank 0 removes the unfinished folder.
        refusals = [text for _, text in by_rank if text]
        if refusals:
            if self.ranks.is_rank_zero:
                with contextlib.suppress(OSError):
                    _delete(self._temporary(step))
            last_good = self.newest_name() or "none"
            raise TrainingStopped(
                f"the checkpoint of step {step} could not be written to {self.folder}: {refusals[0]}; "
                f"the last good one is {last_good}"
            )
        return [result for result, _ in by_rank]

    def newest(self) -> Path | None:
        """Return the newest checkpoint that verifies, or None. Logs a warning for each that does not.

        Raises UserError for one of another format.
        """
        for path in checkpoints_in(self.folder):
            problem = damage(path)
            if problem is None:
                return path
            log.warning("checkpoint %s %s; using the one before it", path, problem)
        return None

    def newest_name(self) -> str | None:
        """Return the newest checkpoint's path, not verified, or None."""
        checkpoints = checkpoints_in(self.folder)
        if not checkpoints:
            return None
        return str(checkpoints[0])

    def best(self) -> Path | None:
        """Return the best checkpoint by the objective, not verified, or None."""
        try:
            name = (self.folder / BEST).read_text().strip()
            path = self.folder / name
            return path if _is_checkpoint(path) else None
        except OSError:
            return None

    def _prune(self, written: Path) -> None:
        """Keep the best and the newest up to `written`; later ones are damaged or from an abandoned branch."""
        best = self.best()
        checkpoints = checkpoints_in(self.folder)
        position = checkpoints.index(written)
        for path in checkpoints[:position]:
            log.warning("removing checkpoint %s: the run was rolled back before it, and saved %s", path, written.name)
            _delete(_hide(path))
        for path in checkpoints[position + self.keep_last :]:
            if path != best:
                _delete(_hide(path))


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, newest first, including damaged ones. Other files are ignored."""
    checkpoints = filter(_is_checkpoint, folder.glob("step_*"))
    return sorted(checkpoints, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step_"))


def names_checkpoint(value: str) -> bool:
    """Return whether the value is the path of a run directory, of a checkpoint, or of a run's `checkpoints/best`."""
    path = Path(value).expanduser()
    is_run_dir = (path / CHECKPOINTS).is_dir()
    is_checkpoint = (path / MANIFEST).is_file()
    return is_run_dir or is_checkpoint or (path.name == BEST and path.is_file())


def resolve(value: str, setting: str = "checkpointing.resume") -> Path:
    """Return the checkpoint at this path; for a run's `checkpoints/best`, the best one; for a run directory, the newest
    good one.

    Raises UserError if there is none, or if it cannot be used.

    Args:
        value: the path.
        setting: the setting with this value.
    """
    name = f"{setting}={value}"
    path = Path(value).expanduser()
    if not path.exists():
        message = f"{name}: no such file or directory"
        if path.name == BEST and path.parent.is_dir():
            message += (
                "; the run saved none at an evaluation, or its objective=auto has no best (several updates): name its "
                "directory (of load, which='last')"
            )
        raise UserError(message)

    # The file that names the best checkpoint, or a checkpoint.
    if path.is_file() and path.name == BEST:
        best = CheckpointDirectory(path.parent.parent).best()
        if best is None:
            raise UserError(f"{name}: the checkpoint that it names no longer exists")
        path = best
    if (path / MANIFEST).is_file():
        problem = damage(path)
        if problem is not None:
            raise UserError(f"{name}: this checkpoint {problem}")
        return path

    # A run directory, or the folder of its checkpoints.
    run_dir = path.parent if path.name == CHECKPOINTS else path
    newest = CheckpointDirectory(run_dir).newest()
    if newest is None:
        raise UserError(f"{name}: neither a checkpoint nor a run directory with a good one")
    return newest


def describe(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return size in bytes and SHA-256 of each file, by name."""
    description = {}
    for path in paths:
        description[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    return description


def damage(path: Path) -> str | None:
    """Return why the checkpoint at `path` cannot be used, as a predicate ("is damaged ..."); None if it can.

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


def _is_checkpoint(path: Path) -> bool:
    """Return whether the path, or its target, has a checkpoint's name and at least one of its files."""
    if not _NAME.fullmatch(path.name):
        return False
    return any((path / name).exists() for name in (MANIFEST, ".metadata", VALUES))


def _refusal(error: BaseException, ranks: Ranks) -> str:
    """Return why a disk refused a write, and on which rank. Raises `error` if it has another cause."""
    # The error itself, and the rank that met it.
    rank = ranks.rank
    if isinstance(error, CheckpointException):  # raised on every rank, whichever failed
        rank, failure = next(iter(error.failures.items()))
        error = failure[0]  # beside its traceback

    # torch reports a failed write as a RuntimeError with such words.
    prefix = f"rank {rank}: " if ranks.world_size > 1 else ""
    text = str(error).strip()
    if isinstance(error, OSError):
        return prefix + text
    if not re.search(r"write|unexpected pos", text, re.IGNORECASE):
        raise error
    return f"{prefix}a file could not be written to its end; is the disk full? (torch: {text})"


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
