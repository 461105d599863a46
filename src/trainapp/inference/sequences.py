"""Predictions of a recurrent state with a row per sequence (`per_sample_buffers`): time steps of one sequence must be
predicted one after another, on one rank.
"""

from collections.abc import Callable
from typing import Any

from trainapp.data.batch import MicroBatch
from trainapp.data.eval_batches import EvalBatches
from trainapp.training.evaluation.evaluate import set_state_aside, undo_writes
from trainapp.training.evaluation.own_rows import (
    SharedRows,
    are_rows_of_positions,
    per_sample_copies,
    require_own_rows,
    rows_of_several_ranks,
)
from trainapp.training.session import Session
from trainapp.units import plural


class Sequences:
    """The sequences of a data set that is predicted, as far as the model's rows show them.

    Args:
        session: the live objects.
        batches: those of the data set.
        compute: predicts a micro-batch.
    """

    def __init__(self, session: Session, batches: EvalBatches, compute: Callable[[MicroBatch], Any]):
        self._session = session
        self._batches = batches
        self._compute = compute

    def begin(self) -> bool:
        """Note the state that the prediction begins with. Return whether it has to begin with the first sample, since
        there is a state, and this session has predicted nothing: that of another process is lost.
        """
        session = self._session
        if session.evaluation.rows_before:
            return False
        session.evaluation.rows_before = per_sample_copies(session)
        if not session.evaluation.rows_before:
            return False
        set_state_aside(session)
        return True

    def require_own_rows(self, micro: MicroBatch) -> None:
        """Raise SharedRows if the first micro-batch has two time steps of one sequence."""
        require_own_rows(self._session, micro)

    def limit_batches(self, shared: SharedRows) -> None:
        """Let no micro-batch have more samples than it has written rows. Nothing is written then."""
        session = self._session
        session.sizes.evaluation.set_limit(shared.rows)
        session.tracker.warn_once(
            f"predict.batch_size={session.config.predict.batch_size}: the first {shared.samples} samples write to "
            f"{shared.rows} rows of {shared.name} (per_sample_buffers): two time steps of one sequence must not meet "
            f"in a batch, so that the data is predicted {plural(shared.rows, 'sample')} at a time, as "
            f"predict.batch_size={shared.rows} asks",
            topic=f"rows of {shared.name} in prediction",
        )

    def problem_of_ranks(self) -> str | None:
        """Return why the predictions of the whole data set are wrong: ranks have written the same rows for time steps
        of one sequence. None if they have not. Collective.
        """
        session = self._session
        shared = rows_of_several_ranks(session)
        if shared is None:
            return None
        undo_writes(session)
        name = session.config.predict.split
        by_position = are_rows_of_positions(session, name, self._batches, shared, self._compute)
        if by_position:
            return None
        rows_text = f"mode=predict: the ranks write the same rows of {shared.name} (per_sample_buffers)"
        if by_position is None:
            session.tracker.warn_once(
                f"{rows_text}, one sample at a time, which does not show whether a row is that of a sequence or of a "
                "place in the batch. The predictions are right only if the number of sequences is a multiple of the "
                "number of ranks; otherwise predict with parallel=single",
                topic=f"rows of {shared.name} of several ranks",
            )
            return None
        world_size = session.ranks.world_size
        return (
            f"{rows_text}: time steps of one sequence are on several ranks, as where {world_size} ranks do not divide "
            "the number of sequences, and none has the state that another has left; predict with parallel=single"
        )
