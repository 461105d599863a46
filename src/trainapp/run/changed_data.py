"""A data set that is longer or shorter than when the checkpoint was saved.

An epoch is a permutation of the data set: in one of another length, the rest of the epoch would be other samples.
"""

import logging
from pathlib import Path

from trainapp.errors import UserError
from trainapp.train.run import Run

log = logging.getLogger(__name__)


def follow(run: Run, path: Path) -> None:
    """Apply `data.on_change` to a run restored from the checkpoint at `path`. No effect on data of the same length.

    Raises UserError for `refuse`. Evaluation and export continue no epoch.
    """
    state, progress, samples = run.state, run.state.progress, run.batches.samples
    if samples == state.data_samples or run.config.mode != "train":
        return
    lengths = f"the training data has {samples} samples, and had {state.data_samples} when {path} was saved"
    if run.config.loader.on_change == "refuse":
        consequence = (
            "the rest of its epoch would repeat some samples and omit others"
            if progress.consumed
            else "the epochs from here on, and with them the run and its schedule, would have another length"
        )
        raise UserError(
            f"data.on_change=refuse: {lengths}: {consequence}; "
            "restore the data, or use data.on_change=next_epoch, or start a new run with checkpointing.resume=none"
        )
    if progress.consumed:
        left, epoch = state.data_samples - progress.consumed, progress.epoch
        log.warning(
            "%s: %d samples of epoch %d are skipped; training continues with epoch %d (data.on_change=next_epoch)",
            lengths,
            left,
            epoch,
            epoch + 1,
        )
        progress.begin_next_epoch()
    else:
        log.warning("%s: training continues with epoch %d (data.on_change=next_epoch)", lengths, progress.epoch)
    state.data_samples = samples
