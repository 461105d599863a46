"""A trial with half of a micro-batch's samples, which tells whether outputs have the samples first."""

from collections.abc import Callable
from typing import Any

from trainapp.data.batch import MicroBatch, split_micro_batch
from trainapp.rng import preserved_rng
from trainapp.training.session import Session


def try_half(session: Session, micro: MicroBatch, require_samples_first: Callable[[MicroBatch], Any]) -> None:
    """Try half of these samples, and undo what that changes and draws. Where another dimension, such as time, is as
    long as the batch by chance, it is not as long as half of the batch.

    Args:
        session: the live objects.
        micro: the whole micro-batch.
        require_samples_first: computes the outputs of a batch, and raises UserError if their length is not the number
            of its samples.
    """
    half = range(max(1, micro.samples // 2))
    (half_batch,) = split_micro_batch(micro, [half])
    unchanged = session.snapshot.undone()
    draws = session.engine.sample_draws(half_batch)
    with unchanged, preserved_rng(session.state.device), draws:
        require_samples_first(half_batch)
