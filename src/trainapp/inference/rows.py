"""JSON rows, one per sample or prompt: predictions and generations are evaluations that write rows.

Until all rows are written, they are in NAME.HASH.RANK_of_WORLD.partial, where HASH is a digest of everything that
determines them. The same command resumes there after an error or a kill, with any batch size, and no row is lost or
written twice.
"""

import contextlib
import hashlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainapp.checkpoint.directory import resolve
from trainapp.config.schema import Config
from trainapp.data.batch import MicroBatch
from trainapp.draws.record import PREDICTION
from trainapp.errors import TrainingStopped, UserError
from trainapp.files import atomic_write, strict_json
from trainapp.inference.sequences import Sequences
from trainapp.parallel.ranks import Ranks, answered_by_rank_zero
from trainapp.rng import evaluation_key, seed_from
from trainapp.signals import Stopped
from trainapp.training.evaluation.loop import as_evaluated, each_micro_batch
from trainapp.training.memory_watch import begin_counting_refused
from trainapp.training.phase import Phase
from trainapp.training.session import Session

log = logging.getLogger(__name__)

Row = dict[str, Any]
_BEGINNING = b'{"index":'  # start of every file of rows


def write_rows(
    session: Session,
    name: str,
    fetch_batches: Callable[[int], Iterator[MicroBatch]],
    compute_rows: Callable[[MicroBatch], Sequence[Row]],
    interleaved: bool = False,
    sequences: Sequences | None = None,
) -> Path | None:
    """Write the rows of all batches to a file. Collective.

    Resumes after the rows written before an error or by an earlier process. Running out of memory halves the batches,
    as in an evaluation: the runner calls again, and written rows are kept.

    Args:
        session: of the run.
        name: of the rows; the file is NAME.jsonl in the run directory unless the mode's `output` names another.
        fetch_batches: returns the batches after a number of written rows.
        compute_rows: returns the rows of a batch.
        interleaved: as for `RowFile`.
        sequences: of the data, where a state may be carried from one time step to the next.

    Returns:
        The file; None if a signal ended the work between two batches.
    """
    mode = session.config.mode
    session.attempt.started = time.monotonic()
    begin_counting_refused(session)
    session.ranks.enable_votes(False)  # each rank recovers alone, as its forwards are independent
    path = _output_path(session.config, name)

    def compute(micro: MicroBatch) -> Sequence[Row]:
        with torch.inference_mode(), session.state.precision.autocast:
            return compute_rows(micro)

    row_file = RowFile(path, determinants(session.config), session.ranks, interleaved, f"{mode}.output")
    if sequences is not None and sequences.begin():
        row_file.begin_again()

    def keep(micro: MicroBatch, rows: Sequence[Row]) -> None:
        if sequences is not None and not row_file.written:
            sequences.require_own_rows(micro)
        row_file.write(rows)

    with contextlib.closing(row_file):
        if session.sizes.autotuner is not None:
            session.sizes.autotuner.follow(session.sizes.evaluation, shape_is_steady=False)
        work = PREDICTION if mode == "predict" else mode
        try:
            with session.engine.at(Phase.EVALUATE), as_evaluated(session.engine, mode, work=work):
                if row_file.written:  # numbers that belong to batches, as NumPy's, must not come again
                    seed_from(session.state.device, *evaluation_key(session.state.seed, mode), row_file.written)
                each_micro_batch(session, fetch_batches(row_file.written), compute, keep)
        except Stopped:
            return None
        _require_own_ranks(sequences, row_file)
        with session.engine.at(Phase.SAVE):  # collective: no rank may repeat it alone
            count = row_file.publish()
    subject = "samples" if mode == "predict" else "prompts"
    log.info("%s of %d %s: %s", name, count, subject, path)
    return path


def _require_own_ranks(sequences: Sequences | None, row_file: "RowFile") -> None:
    """Raise UserError, and remove the rows, if time steps of one sequence are on several ranks. Collective."""
    problem = None if sequences is None else sequences.problem_of_ranks()
    if problem is not None:
        row_file.discard()
        raise UserError(problem)


def _output_path(config: Config, name: str) -> Path:
    output = getattr(config, config.mode).output
    if output is None:
        return Path(config.run_dir) / f"{name}.jsonl"
    return Path(os.path.expanduser(output)).resolve()


def determinants(config: Config) -> dict[str, Any]:
    """Return everything that determines a model's output, as plain values: checkpoint, data and numerics settings."""
    checkpoint = resolve(config.checkpointing.resume)
    settings = config.to_dict()

    # Where the rows go, and how many are computed at once, does not change them.
    mode_settings = dict(settings[config.mode])
    for name in ("output", "batch_size"):
        mode_settings.pop(name, None)

    values = {
        "checkpoint": [str(checkpoint.resolve()), checkpoint.stat().st_mtime_ns],
        "average": config.train.ema is not None,
        "own": mode_settings,
    }
    for name in ("mode", "model", "adapter", "data", "eval", "task", "task_arguments", "precision"):
        values[name] = settings[name]
    return values


class RowFile:
    """A rank's file of rows, open for appending.

    Raises UserError if the file cannot be written, or would replace a file that does not contain rows.

    Args:
        path: of the file that has the rows of all ranks in the end.
        determinants: plain values; only rows with equal values are continued.
        ranks: of the run.
        interleaved: whether the ranks' rows take turns, as the samples of a stream; otherwise each rank has consecutive
            ones.
        setting: names the file, for messages.

    Attributes:
        partial: this rank's file until then.
        written: the number of rows in it.
    """

    def __init__(self, path: Path, determinants: Mapping[str, Any], ranks: Ranks, interleaved: bool, setting: str):
        if _has_other_content(path):
            raise UserError(f"{setting}={path}: exists, and is not a file of rows; name another file")
        self.path = path
        self._ranks = ranks
        self._interleaved = interleaved
        self._setting = setting
        self._partials = _partial_paths(path, determinants, ranks.world_size)
        self.partial = self._partials[ranks.rank]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.partial, "ab", buffering=0)  # noqa: SIM115  # unbuffered: it survives a kill
        except OSError as error:
            raise UserError(f"{setting}={path}: cannot be written ({error.strerror}); name another file") from None

        # Resume after the last whole row: a kill or a full disk may have cut off the one after it.
        content = self.partial.read_bytes()
        end_of_last_row = content.rfind(b"\n") + 1
        self._file.truncate(end_of_last_row)
        self.written = content[:end_of_last_row].count(b"\n")
        if self.written:
            log.info("continuing after the %d rows in %s", self.written, self.partial)

    def begin_again(self) -> None:
        """Drop the rows that an earlier process has written."""
        if self.written:
            log.info("beginning again: the state after these rows is not saved (per_sample_buffers)")
        self._file.truncate(0)
        self.written = 0

    def write(self, rows: Sequence[Row]) -> None:
        """Append a line per row. Raises TrainingStopped if the disk is full."""
        lines = [strict_json(row, default=_plain_value) + "\n" for row in rows]
        remaining = memoryview("".join(lines).encode())
        try:
            while remaining:
                written_bytes = self._file.write(remaining)  # a full disk may write a part
                remaining = remaining[written_bytes:]
        except OSError as error:
            raise self._write_error(error) from None
        self.written += len(rows)

    def publish(self) -> int:
        """Publish the file after all ranks have written their rows, replacing an older one. Collective.

        Returns the number of rows. Raises TrainingStopped, on all ranks, if rank 0 cannot write it.
        """
        os.fsync(self._file.fileno())
        counts = self._ranks.all_gather_object(self.written)
        answered_by_rank_zero(self._ranks, self._join)
        self.partial.unlink(missing_ok=True)
        return sum(counts)

    def _join(self) -> None:
        """Write the rows of all ranks to one file, with their index."""
        try:
            with contextlib.ExitStack() as stack:
                partials = [stack.enter_context(open(path)) for path in self._partials]
                lines: Iterator[str] = itertools.chain(*partials)
                if self._interleaved:
                    lines = _interleave(partials)
                file = stack.enter_context(atomic_write(self.path, sync=True))
                for index, line in enumerate(lines):  # the index comes first in the line's object
                    file.write(f'{{"index": {index}, {line[1:]}')
        except OSError as error:
            raise self._write_error(error) from None

    def _write_error(self, error: OSError) -> TrainingStopped:
        shared = ""
        if len(self._partials) > 1:
            shared = "; ranks on several nodes need a file system that all of them share"
        return TrainingStopped(
            f"{self._setting}={self.path}: cannot be written ({error.filename or error.strerror}: {error.strerror}); "
            f"{self.written} rows are in {self.partial}, and the same command continues there{shared}"
        )

    def discard(self) -> None:
        """Remove the rows, which are wrong."""
        self.partial.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file. An unpublished one stays for the next process."""
        self._file.close()


def _has_other_content(path: Path) -> bool:
    """Return whether the file exists and does not contain rows: a typo must not overwrite data."""
    if not path.is_file():
        return path.exists()
    with open(path, "rb") as file:
        beginning = file.read(len(_BEGINNING))
    return beginning not in (b"", _BEGINNING)


def _partial_paths(path: Path, determinants: Mapping[str, Any], world_size: int) -> list[Path]:
    """Return each rank's file until the rows are complete."""
    text = strict_json([determinants, world_size], sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return [path.with_name(f"{path.name}.{digest}.{rank}_of_{world_size}.partial") for rank in range(world_size)]


def _plain_value(value: Any) -> Any:
    """Return the value as JSON can have it. Raises TypeError for an object of another kind."""
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} among predictions, which is not a string, number, list or dict")


def _interleave(files: Sequence[Iterable[str]]) -> Iterator[str]:
    """Yield a line of each file in turn, leaving out files that have ended."""
    for lines in itertools.zip_longest(*files):
        yield from (line for line in lines if line is not None)
