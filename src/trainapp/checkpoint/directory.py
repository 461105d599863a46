"""The checkpoints of a run on disk: written whole or not at all, verified before use, skipped if damaged.

    <run directory>/checkpoints/step_00000100/    one checkpoint
        __<rank>_0.distcp, .metadata              tensors, as torch.distributed.checkpoint writes them (`shards`)
        values.pt                                 everything else: plain values and small tensors (`checkpointer`)
        manifest.json                             sizes, SHA-256 digests, configuration, versions (`manifest`)
    <run directory>/checkpoints/latest            the name of the newest
    <run directory>/checkpoints/best              the name of the best

A checkpoint is written into a folder with a temporary name, synced to the disk, given its manifest and renamed.
"""

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from trainapp.checkpoint import manifest
from trainapp.checkpoint.manifest import MANIFEST, damage
from trainapp.errors import TrainingStopped, UserError
from trainapp.files import atomic_write, fsync
from trainapp.parallel.ranks import Ranks, SingleRank

log = logging.getLogger(__name__)


class CheckpointDirectory:
    """The checkpoints of one run directory. Writing is collective: `begin`, the files, `commit`.

    keep_last: how many of the newest to keep, beside the best.
    """

    def __init__(self, run_dir: Path, keep_last: int, ranks: Ranks):
        self.folder = run_dir / "checkpoints"
        self.keep_last, self.ranks = keep_last, ranks

    def begin(self, step: int) -> Path:
        """The empty folder to write the checkpoint of `step` into. Collective."""
        temporary = self.folder / f".tmp-{_name(step)}"

        def make() -> None:
            if self.ranks.is_rank_zero:
                self._clear_leftovers()
                temporary.mkdir(parents=True)

        self.on_all_ranks(step, temporary, make)
        return temporary

    def commit(self, temporary: Path, files: dict[str, Any], step: int, config: dict[str, Any], is_best: bool) -> Path:
        """Give the written folder its manifest and its name, then remove checkpoints past `keep_last`. Collective.

        files: `manifest.describe` of the files that this rank wrote.
        """
        by_rank = self.ranks.all_gather_object(files)
        final = self.folder / _name(step)

        def finish() -> None:
            if self.ranks.is_rank_zero:
                everything = {name: entry for part in by_rank for name, entry in part.items()}
                manifest.write_manifest(temporary, step, config, everything, self.ranks.world)
                if final.exists():
                    _remove(final)
                os.replace(temporary, final)
                fsync(self.folder)
                self._point("latest", final)
                if is_best:
                    self._point("best", final)
                self._prune(final)

        self.on_all_ranks(step, temporary, finish)
        return final

    def on_all_ranks(self, step: int, temporary: Path, work: Callable[[], None]) -> None:
        """Run `work` on every rank. Collective.

        Raises TrainingStopped on all ranks, and removes the `temporary` folder, when the disk refuses a write on any.
        """
        refusal = None
        try:
            work()
        except (OSError, RuntimeError, CheckpointException) as error:
            refusal = _refusal(error, self.ranks.rank)
        refusals = [refusal for refusal in self.ranks.all_gather_object(refusal) if refusal]
        if refusals:
            if self.ranks.is_rank_zero:
                shutil.rmtree(temporary, ignore_errors=True)
            rank, text = refusals[0]
            where = f"rank {rank}: " if self.ranks.world > 1 else ""
            raise TrainingStopped(
                f"the checkpoint of step {step} could not be written to {self.folder}: {where}{text}; "
                f"the last good one is {self.newest_name() or 'none'}"
            )

    def newest(self) -> Path | None:
        """The newest checkpoint that verifies, or None. Logs a warning for each that does not."""
        for path in self._newest_first():
            problem = damage(path)
            if problem is None:
                return path
            log.warning("checkpoint %s %s; using the one before it", path, problem)
        return None

    def newest_name(self) -> str | None:
        """The newest checkpoint's path, not verified."""
        return next((str(path) for path in self._newest_first()), None)

    def best(self) -> Path | None:
        """The best checkpoint by the objective, not verified, or None."""
        with contextlib.suppress(OSError):
            path = self.folder / (self.folder / "best").read_text().strip()
            return path if path.is_dir() else None
        return None

    def _newest_first(self) -> list[Path]:
        return sorted(self.folder.glob("step_*"), reverse=True)

    def _point(self, name: str, target: Path) -> None:
        with atomic_write(self.folder / name, sync=True) as file:
            file.write(target.name + "\n")

    def _prune(self, written: Path) -> None:
        """Keep the best and the newest up to `written`; later ones are damaged or from an abandoned branch."""
        best, present = self.best(), self._newest_first()
        position = present.index(written)
        for path in present[:position]:
            log.warning("checkpoint %s is removed: the run went back before it, and has saved %s", path, written.name)
            _remove(path)
        for path in present[position + self.keep_last :]:
            if path != best:
                _remove(path)

    def _clear_leftovers(self) -> None:
        """Remove what a killed process left half-written."""
        for path in self.folder.glob(".tmp-*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def resolve(setting: str) -> Path:
    """The checkpoint at `checkpointing.resume=PATH`, or the newest good one if PATH is a run directory.

    Raises UserError when there is none, and when the named checkpoint cannot be used.
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
        raise UserError(f"{name}: this checkpoint {problem}{hint}")
    run_dir = path.parent if path.name == "checkpoints" else path
    newest = CheckpointDirectory(run_dir, 1, SingleRank()).newest()
    if newest is None:
        raise UserError(f"{name}: neither a checkpoint nor a run directory with a good one")
    return newest


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _refusal(error: BaseException, rank: int) -> tuple[int, str]:
    """The rank whose disk refused a write, and the reason. Raises `error` when it is another kind of error."""
    if isinstance(error, CheckpointException):  # raised on every rank, whichever failed
        rank, (error, _) = next(iter(error.failures.items()))
    if isinstance(error, OSError):
        return rank, str(error)
    if not re.search(r"write|unexpected pos", str(error), re.IGNORECASE):
        raise error
    return rank, f"a file could not be written to its end; is the disk full? (torch: {str(error).strip()})"


def _remove(path: Path) -> None:
    """Rename it first, so that it disappears at once."""
    hidden = path.with_name(f".tmp-removed-{path.name}-{os.getpid()}")
    os.replace(path, hidden)
    shutil.rmtree(hidden)
