"""The checkpoints of a run on disk: written whole or not at all, verified before use, skipped if damaged.

    <run directory>/checkpoints/step_00000100/    one checkpoint
        __<rank>_0.distcp, .metadata              tensors, as torch.distributed.checkpoint writes them (`shards`)
        values.pt                                 everything else: plain values and small tensors (`checkpointer`)
        manifest.json                             sizes, SHA-256 digests, configuration, versions (`manifest`)
    <run directory>/checkpoints/latest            the name of the newest
    <run directory>/checkpoints/best              the name of the best

A checkpoint is written into a folder with a temporary name, synced to the disk, given its manifest and renamed.
Whatever else lies in the folder is left alone: `step_00000100_backup`, `step_best`, another program's `.tmp-` files.
"""

import contextlib
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from trainapp.checkpoint import manifest
from trainapp.checkpoint.manifest import MANIFEST, damage
from trainapp.errors import TrainingStopped, UserError
from trainapp.files import atomic_write, fsync
from trainapp.parallel.ranks import Ranks, SingleRank

# Names as `_name`, `begin`, `_remove` and `atomic_write` form them.
_LEFTOVER = re.compile(r"\.tmp-(step_\d{8,}|removed-step_\d{8,}-\d+|[0-9a-f]{32})")
_PART_OF_ONE = (MANIFEST, ".metadata", "values.pt", "*.distcp")  # a damaged checkpoint may lack some of them
log = logging.getLogger(__name__)


class CheckpointDirectory:
    """The checkpoints of one run directory. Writing is collective: `begin`, the files, `commit`.

    keep_last: how many of the newest to keep, in addition to the best.
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
                _make_way_for(final)
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
                with contextlib.suppress(OSError):
                    _delete(temporary)
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
            return path if _is_checkpoint(path) else None
        return None

    def _newest_first(self) -> list[Path]:
        return checkpoints_in(self.folder)

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
            if _LEFTOVER.fullmatch(path.name):
                _delete(path)


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first, damaged ones included. Nothing else that lies there is listed."""
    return sorted(filter(_is_checkpoint, folder.glob("step_*")), key=_step, reverse=True)


def resolve(setting: str) -> Path:
    """The checkpoint at `checkpointing.resume=PATH`, the best one if PATH is a run's `checkpoints/best`, or the newest
    good one if PATH is a run directory.

    Raises UserError when there is none, and when the named checkpoint cannot be used.
    """
    path = Path(setting)
    name = f"checkpointing.resume={setting}"
    if not path.exists():
        raise UserError(f"{name}: no such file or directory")
    if path.is_file() and path.name == "best":
        best = CheckpointDirectory(path.parent.parent, 1, SingleRank()).best()
        if best is None:
            raise UserError(f"{name}: it names no checkpoint that is still here")
        path = best
    if path.is_file():
        path = path.parent
    if (path / MANIFEST).is_file():
        problem = damage(path)
        if problem is None:
            return path
        before = next((p for p in checkpoints_in(path.parent) if p.name < path.name and not damage(p)), None)
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


def _is_checkpoint(path: Path) -> bool:
    """Whether it has a checkpoint's name and at least one of its files. A link to such a folder is one, too."""
    step = path.name.removeprefix("step_")
    has_its_name = step.isdecimal() and step.isascii() and path.name == _name(int(step))
    return has_its_name and any(next(path.glob(part), None) is not None for part in _PART_OF_ONE)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _make_way_for(path: Path) -> None:
    """Remove what an earlier attempt at this step has saved. Anything else of this name is moved aside."""
    if _is_checkpoint(path):
        _remove(path)
    elif os.path.lexists(path):
        aside = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}")
        os.replace(path, aside)
        log.warning("%s is no checkpoint and was in the way of one: moved to %s", path, aside.name)


def _remove(path: Path) -> None:
    """Rename it first, so that it disappears at once."""
    hidden = path.with_name(f".tmp-removed-{path.name}-{os.getpid()}")
    os.replace(path, hidden)
    _delete(hidden)


def _delete(path: Path) -> None:
    """A folder with all that is in it; of a link, or a file, the name alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
