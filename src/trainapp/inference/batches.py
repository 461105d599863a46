"""What prediction and generation have in common: a batch at a time in inference mode, each written when it is done.

Memory that runs out is recovered as in an evaluation: the runner halves the size of evaluation's batches, which here is
the mode's own, and calls again. What is written by then is not repeated.
"""

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from trainapp.checkpoint.directory import resolve
from trainapp.checkpoint.manifest import MANIFEST
from trainapp.config.schema import Config
from trainapp.data.batch import MicroBatch
from trainapp.errors import UserError
from trainapp.inference.lines import Lines
from trainapp.rng import preserved_rng
from trainapp.train.allocations import note_refused, require_all_allocated
from trainapp.train.modes import evaluation_mode
from trainapp.train.phase import Phase
from trainapp.train.run import Run
from trainapp.train.watching import watch_micro_batch

Rows = list[dict[str, Any]]


def write_in_batches(
    run: Run, fetched: Iterable[MicroBatch], lines: Lines, rows_of: Callable[[MicroBatch], Rows]
) -> None:
    """Write what `rows_of` returns for each batch, cut to the size that fits. Ends early when a signal asks for it.

    rows_of: one row per sample; called in inference mode, with the model in evaluation mode and its average in place.
    """
    state, sizes = run.state, run.sizes.evaluation
    run.autotuner.follow(sizes)
    with contextlib.ExitStack() as stack:
        stack.enter_context(preserved_rng(state.device))
        stack.enter_context(state.stateful.preserved_generators())
        stack.enter_context(state.average.in_place_of_weights())
        stack.enter_context(evaluation_mode((state.model, *state.stateful.modules.values())))
        stack.enter_context(run.restore_point.undone_on_error(sizes.is_unproven))
        for batch in fetched:
            for micro in sizes.cut(batch, run.eval_ranks):
                with watch_micro_batch(run, sizes, micro.data), torch.inference_mode(), state.precision.autocast:
                    rows = rows_of(micro)
                if sizes.is_unproven:
                    require_all_allocated(run, sizes, run.eval_ranks)
                run.restore_point.tensors.note_written()
                lines.write(rows)
                run.restore_point.take(sizes.is_unproven)
                sizes.succeeded(run.eval_ranks)
                if run.stop.signal is not None:
                    run.stop.agreed = run.stop.signal
                    return


def begin(run: Run) -> None:
    """What follows counts as an evaluation: where memory runs out, nothing needs to be undone."""
    run.attempt.phase, run.attempt.started = Phase.EVALUATE, time.monotonic()
    note_refused(run)


def output_path(run: Run, given: str | None, name: str) -> Path:
    """Where the lines go: a file as given, or of this name in the run directory. Raises UserError for `~NAME` where no
    user has that name.
    """
    if given is None:
        return Path(run.config.run_dir) / name
    try:
        return Path(given).expanduser().resolve()
    except RuntimeError:
        raise UserError(f"{run.config.mode}.output={given}: there is no such user; name another file") from None


def facts_of(config: Config) -> dict[str, Any]:
    """What decides the output of a model, in plain values: the checkpoint by its digest, the data and the numerics."""
    manifest = resolve(config.checkpointing.resume) / MANIFEST
    settings = config.to_dict()
    names = ("mode", "model", "adapter", "data", "task", "task_arguments", "precision")
    return {
        "checkpoint": hashlib.sha256(manifest.read_bytes()).hexdigest(),
        "average": config.train.ema is not None,
        **{name: settings[name] for name in names},
    }
