"""Rows of recurrent states. Of a buffer with a row per sample (`per_sample_buffers`), no two samples of a micro-batch
may write the same row.
"""

import torch

from trainapp.data.batch import MicroBatch
from trainapp.models.inspect import per_sample_tensors, rows_written
from trainapp.training.session import Session


class SharedRows(Exception):
    """Two samples of an evaluation micro-batch have written the same row of a buffer with a row per sample: they are
    of two time steps, since the set has fewer sequences than the micro-batch has samples.

    Attributes:
        name: the buffer's name.
        samples: the number of the micro-batch's samples.
        rows: the number of rows that it has written: as many samples can be evaluated at a time.
    """

    def __init__(self, name: str, samples: int, rows: int):
        super().__init__(name, samples, rows)
        self.name = name
        self.samples = samples
        self.rows = rows


def per_sample_copies(session: Session) -> dict[str, torch.Tensor]:
    """Return copies of the model's `per_sample_buffers`, for the first micro-batch of a set; otherwise none."""
    current = session.evaluation
    assert current.totals is not None, "outside an evaluation"
    if current.totals.samples or current.embedded is not None:
        return {}
    tensors = per_sample_tensors({"model": session.state.model})
    return {name: tensor.clone() for name, tensor in tensors.items()}


def require_own_rows(session: Session, copies: dict[str, torch.Tensor], micro: MicroBatch) -> None:
    """Raise SharedRows if the first micro-batch of a set has written fewer rows than it has samples. Collective over
    `eval_ranks`.
    """
    global_size = session.config.batch.global_size
    share = -(-global_size // session.ranks.world_size)  # rounded up
    row_counts = {global_size, share}  # a buffer may have rows for either
    tensors = per_sample_tensors({"model": session.state.model})
    for name, copy in copies.items():
        written = 0  # rows
        if name in tensors:
            written = rows_written(copy, tensors[name], row_counts)

        # The ranks agree on the fewest rows that any of them has written.
        missing_here = 0
        if micro.real and 0 < written < micro.samples:
            missing_here = micro.samples - written
        (missing,) = session.eval_ranks.all_reduce_max(missing_here)
        if missing:
            rows = max(1, micro.samples - missing)
            raise SharedRows(name, micro.samples, rows)
