"""A data set that is longer or shorter than when the checkpoint was saved, or whose samples come in another order.

An epoch is a permutation of the data set: in one of another length, the rest of the epoch would be other samples.
"""

import logging
from pathlib import Path

from trainapp.errors import UserError
from trainapp.train.run import Run

log = logging.getLogger(__name__)


def follow(run: Run, path: Path) -> None:
    """Apply `data.on_change` to a run restored from the checkpoint at `path`. No effect on data that are as they were.

    Raises UserError for `refuse`. Evaluation and export continue no epoch.
    """
    state, progress = run.state, run.state.progress
    if run.config.mode != "train":
        return
    change = _change(run, path)
    if change is None:
        return
    if run.config.loader.on_change == "refuse":
        consequence = (
            "the rest of its epoch would repeat some samples and omit others"
            if progress.consumed
            else "the epochs from here on, and with them the run and its schedule, would have another length"
            if state.data_samples != run.batches.samples
            else "the epochs from here on would have other samples"
        )
        raise UserError(
            f"data.on_change=refuse: {change}: {consequence}; "
            "restore the data, or use data.on_change=next_epoch, or start a new run with checkpointing.resume=none"
        )
    if progress.consumed:
        left, epoch = state.data_samples - progress.consumed, progress.epoch
        log.warning(
            "%s: %s of epoch %d are skipped; training continues with epoch %d (data.on_change=next_epoch)",
            change,
            f"{left} samples" if state.data_samples else "the other samples",
            epoch,
            epoch + 1,
        )
        progress.begin_next_epoch()
    else:
        log.warning("%s: training continues with epoch %d (data.on_change=next_epoch)", change, progress.epoch)
    run.batches.begin_epoch(progress.epoch)
    state.data_samples, state.data_order = run.batches.samples, run.batches.source.order_name


def _change(run: Run, path: Path) -> str | None:
    """What differs, or None."""
    state, batches = run.state, run.batches
    if state.data_order != batches.source.order_name:
        return (
            f"the training data is drawn in another way ({batches.source.order_name}) than when {path} was saved "
            f"({state.data_order}): data.sampling has changed, or a stream has taken the place of a data set"
        )
    if batches.samples != state.data_samples:
        return f"the training data has {batches.samples} samples, and had {state.data_samples} when {path} was saved"
    return batches.source.misfit
