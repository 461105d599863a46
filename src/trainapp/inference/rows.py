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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainapp.checkpoint.directory import resolve
from trainapp.config.schema import Config
from trainapp.data.batch import MicroBatch, tensors_in
from trainapp.errors import TrainingStopped, UserError
from trainapp.files import atomic_write, strict_json
from trainapp.hooks.callbacks import labels_of
from trainapp.hooks.predictions import dim_of_classes
from trainapp.losses.losses import (
    IGNORED,
    Output,
    attribute,
    call_model,
    class_dim,
    form_of,
    part_of,
    part_of_output,
    unchecked,
)
from trainapp.optim.precision import at_least_fp32
from trainapp.parallel.ranks import Ranks, answered_by_rank_zero
from trainapp.signals import Stopped
from trainapp.training.evaluate import as_evaluated, each_micro_batch
from trainapp.training.memory_watch import note_refused
from trainapp.training.phase import Phase
from trainapp.training.session import Session

log = logging.getLogger(__name__)

Row = dict[str, Any]
_BEGINNING = b'{"index":'  # start of every file of rows


def predict(session: Session) -> None:
    """`mode=predict`: the model's predictions for each sample of a data set, in the order of the data, shared between
    the ranks. Collective.

    Raises UserError for a data set that does not exist, and for outputs that cannot be split into samples.
    """
    config, ranks = session.config, session.ranks
    name = "" if config.predict.split == "val" else config.predict.split
    if name not in session.eval_sets:
        known = dict.fromkeys([*(name or "val" for name in session.eval_sets), "train"])
        raise UserError(
            f"predict.split={config.predict.split}: there is no such data; choose {', '.join(known)}, or set other "
            "data with data=... or eval.NAME"
        )
    batches = session.eval_sets[name]
    output = getattr(session.task, "output", None)
    predictor = Predictor(unchecked(session.task), config.task, labels_of(batches.dataset), output)
    write_rows(
        session,
        "predictions",
        lambda done: batches.from_sample(done, session.sizes.evaluation.size, ranks),
        lambda micro: predictor.rows(session.strategy.model, micro),
        batches.is_stream,
    )


def write_rows(
    session: Session,
    what: str,
    fetched: Callable[[int], Iterator[MicroBatch]],
    rows_of: Callable[[MicroBatch], Sequence[Row]],
    interleaved: bool = False,
) -> Path | None:
    """Write the rows that `rows_of` returns for each batch to the file named by the mode's `output`, otherwise to
    `what`.jsonl in the run directory. Resumes after the rows written before an error or by an earlier process.
    Collective.

    fetched: the batches after a number of rows. interleaved: as for `Rows`. Returns the file; None if a signal ended it
    between two batches. Running out of memory halves the batches, as in an evaluation: the runner calls again, and
    written rows are kept.
    """
    config, mode = session.config, session.config.mode
    session.attempt.started = time.monotonic()
    note_refused(session)
    session.ranks.enable_votes(False)  # each rank recovers alone, as its forwards are independent
    given = getattr(config, mode).output
    path = Path(config.run_dir) / f"{what}.jsonl" if given is None else Path(os.path.expanduser(given)).resolve()

    def compute(micro: MicroBatch) -> Sequence[Row]:
        with torch.inference_mode(), session.state.precision.autocast:
            return rows_of(micro)

    with contextlib.closing(Rows(path, what_decides(config), session.ranks, interleaved, f"{mode}.output")) as rows:
        session.sizes.autotuner.follow(session.sizes.evaluation)
        try:
            with session.engine.at(Phase.EVALUATE), as_evaluated(session.engine, mode, work=mode):
                each_micro_batch(session, fetched(rows.done), compute, lambda _, found: rows.write(found))
        except Stopped:
            return None
        with session.engine.at(Phase.SAVE):  # collective: no rank may repeat it alone
            count = rows.publish()
    log.info("%s of %d %s: %s", what, count, "samples" if mode == "predict" else "prompts", path)
    return path


def what_decides(config: Config) -> dict[str, Any]:
    """Everything that determines a model's output, as plain values: checkpoint, data and numerics settings."""
    checkpoint, settings = resolve(config.checkpointing.resume), config.to_dict()
    names = ("mode", "model", "adapter", "data", "eval", "task", "task_arguments", "precision")
    own = {name: value for name, value in settings[config.mode].items() if name not in ("output", "batch_size")}
    return {
        "checkpoint": [str(checkpoint.resolve()), checkpoint.stat().st_mtime_ns],
        "average": config.train.ema is not None,
        "own": own,
        **{name: settings[name] for name in names},
    }


class Rows:
    """A rank's file of rows, open for appending.

    decides: plain values; only rows with equal values are continued. interleaved: whether the ranks' rows take turns,
    as the samples of a stream; otherwise each rank has consecutive ones. setting: names the file, for messages.
    Attribute: `done`, the number of written rows.
    Raises UserError if the file cannot be written, or would replace a file that does not hold rows.
    """

    def __init__(self, path: Path, decides: Mapping[str, Any], ranks: Ranks, interleaved: bool, setting: str):
        if _holds_something_else(path):
            raise UserError(f"{setting}={path}: exists, and is not a file of rows; name another file")
        self.path, self._ranks, self._interleaved, self._setting = path, ranks, interleaved, setting
        text = strict_json([decides, ranks.world_size], sort_keys=True, default=str)
        name = f"{path.name}.{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        self._parts = [path.with_name(f"{name}.{r}_of_{ranks.world_size}.partial") for r in range(ranks.world_size)]
        self.partial = self._parts[ranks.rank]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.partial, "ab", buffering=0)  # noqa: SIM115  # unbuffered: it survives a kill
        except OSError as error:
            raise UserError(f"{setting}={path}: cannot be written ({error.strerror}); name another file") from None
        whole, end, _ = self.partial.read_bytes().rpartition(b"\n")
        self._file.truncate(len(whole + end))  # removes a row cut off by a kill
        self.done = (whole + end).count(b"\n")
        if self.done:
            log.info("continuing after the %d rows in %s", self.done, self.partial)

    def write(self, rows: Sequence[Row]) -> None:
        """Append a line per row. Raises TrainingStopped if the disk is full."""
        content = memoryview("".join(strict_json(row, default=_plain) + "\n" for row in rows).encode())
        try:
            while content:
                content = content[self._file.write(content) :]  # a full disk may write a part
        except OSError as error:
            raise self._stopped(error) from None
        self.done += len(rows)

    def publish(self) -> int:
        """Publish the file after all ranks have written their rows, replacing an older one. Collective.

        Returns the number of rows. Raises TrainingStopped, on all ranks, if rank 0 cannot write it.
        """
        os.fsync(self._file.fileno())
        counts = self._ranks.all_gather_object(self.done)
        answered_by_rank_zero(self._ranks, self._join)
        self.partial.unlink(missing_ok=True)
        return sum(counts)

    def _join(self) -> None:
        try:
            with contextlib.ExitStack() as stack:
                parts = [stack.enter_context(open(part)) for part in self._parts]
                rounds = itertools.zip_longest(*parts) if self._interleaved else parts
                lines = (line for own in rounds for line in own if line is not None)
                file = stack.enter_context(atomic_write(self.path, sync=True))
                file.writelines(f'{{"index": {number}, {line[1:]}' for number, line in enumerate(lines))
        except OSError as error:
            raise self._stopped(error) from None

    def _stopped(self, error: OSError) -> TrainingStopped:
        several = "; ranks on several nodes need a file system that all of them share" if len(self._parts) > 1 else ""
        return TrainingStopped(
            f"{self._setting}={self.path}: cannot be written ({error.filename or error.strerror}: {error.strerror}); "
            f"{self.done} rows are in {self.partial}, and the same command continues there{several}"
        )

    def close(self) -> None:
        """Close the file. An unpublished one stays for the next process."""
        self._file.close()


def _holds_something_else(path: Path) -> bool:
    """Whether the file exists and does not hold rows: a typo must not overwrite data."""
    if not path.is_file():
        return path.exists()
    with open(path, "rb") as file:
        return file.read(len(_BEGINNING)) not in (b"", _BEGINNING)


def _plain(value: Any) -> Any:
    """Convert values for JSON."""
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} among predictions, which is not a string, number, list or dict")


class Predictor:
    """Turns a model's output for a batch into one row of plain values per sample.

    task: the run's task, unchecked; setting: its name. names: class names, if known. output: the part of what the model
    returns, see `losses.part_of_output`.
    """

    def __init__(self, task: Any, setting: str, names: Sequence[str], output: Output = None):
        self.task, self.setting, self.names, self._dim = task, setting, names, class_dim(task)
        self._part = output

    def rows(self, model: nn.Module, micro: MicroBatch) -> list[Row]:
        """One row per sample. Raises UserError for outputs that cannot be split into samples."""
        output, targets = self._output(model, micro.data), part_of(micro.data, "targets")
        dim = None
        if isinstance(output, Tensor) and output.ndim and len(output) == micro.samples:
            dim = dim_of_classes(output, targets, self._dim)
        if dim is None:
            return [{"prediction": value} for value in self._by_sample(output, micro.samples)]
        self._dim = dim  # a later batch may have as many positions as classes
        return self._classified(output, targets, dim)

    def _output(self, model: nn.Module, batch: Any) -> Any:
        own = attribute(self.task, "predict") or attribute(self.task, "embed")
        if callable(own):
            return own(model, batch)
        if part_of(batch, "inputs") is None:
            raise self._refused(f"it is not known which part of its batches, {form_of(batch)}, the model takes")
        return part_of_output(call_model(model, batch, self._part), self._part)

    def _by_sample(self, output: Any, samples: int, place: str = "") -> list[Any]:
        """One value per sample. A dict, or a list or tuple with tensors, holds several outputs; any other list has one
        value per sample. place: position in the whole output, for messages.
        """
        if isinstance(output, Mapping) and output:
            values = [self._by_sample(value, samples, f"{place}[{name!r}]") for name, value in output.items()]
            return [dict(zip(map(str, output), row, strict=True)) for row in zip(*values, strict=True)]
        if isinstance(output, (list, tuple)) and tensors_in(output):
            values = [self._by_sample(value, samples, f"{place}[{number}]") for number, value in enumerate(output)]
            return list(map(list, zip(*values, strict=True)))
        if isinstance(output, (Tensor, np.ndarray)) and output.ndim and len(output) == samples:
            return output.tolist()
        if isinstance(output, (list, tuple)) and len(output) == samples:
            return list(output)
        shape = getattr(output, "shape", None)
        size = f" of {len(output)}" if isinstance(output, (list, tuple)) else ""
        what = f"is a {type(output).__name__}{size}" if shape is None else f"has shape {list(shape)}"
        raise self._refused(f"its output{place} for {samples} samples {what}")

    def _refused(self, what: str) -> UserError:
        return UserError(
            f"mode=predict with task={self.setting}: {what}; give the task a method `predict(model, batch)` that "
            "returns tensors whose first dimension is the samples, lists with a plain value per sample, or a dict of "
            "these"
        )

    def _classified(self, logits: Tensor, targets: Any, dim: int) -> list[Row]:
        """The likeliest class, with its name, and its probability. Sequences end at the last counted position, since
        padding depends on the other samples of the batch; images keep their shape.
        """
        probability, prediction = (found.tolist() for found in torch.softmax(at_least_fp32(logits), dim).max(dim))
        rows = [{"prediction": p, "probability": q} for p, q in zip(prediction, probability, strict=True)]
        # Class probabilities have no padding.
        if logits.ndim == 3 and isinstance(targets, Tensor) and not targets.is_floating_point():
            counts = targets != IGNORED
            ends = (counts * torch.arange(1, counts.shape[1] + 1, device=counts.device)).amax(-1).tolist()
            return [{k: values[:end] for k, values in row.items()} for row, end in zip(rows, ends, strict=True)]
        for row in rows if logits.ndim == 2 else ():
            if row["prediction"] < len(self.names):
                row["prediction_name"] = str(self.names[row["prediction"]])
        return rows
