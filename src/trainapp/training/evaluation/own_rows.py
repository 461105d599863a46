"""Rows of recurrent states. Of a buffer with a row per sample (`per_sample_buffers`), no two samples of a micro-batch
may write the same row, and no two ranks: time steps of one sequence would meet in a micro-batch, or on several ranks.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainapp.data.batch import MicroBatch, split_micro_batch
from trainapp.data.eval_batches import EvalBatches
from trainapp.models.inspect import changed_elements, per_sample_buffers, per_sample_tensors, rows_written
from trainapp.rng import preserved_rng
from trainapp.training.evaluation.loop import as_evaluated
from trainapp.training.session import Session

Changes = dict[str, Tensor]  # which elements of a buffer have changed, on the host, by the buffer's name


class RowsOfRanks(NamedTuple):
    """Rows that several ranks have written in the evaluation of a set."""

    name: str  # the buffer's
    rows_here: int  # how many this rank has written in the whole set; 0 if unknown


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


# --- of a micro-batch


def per_sample_copies(session: Session) -> dict[str, Tensor]:
    """Return copies of the `per_sample_buffers`, for the start of a set; none where embeddings are compared."""
    if session.evaluation.embedded is not None:
        return {}
    return {name: tensor.clone() for name, tensor in _tensors(session).items()}


def require_own_rows(session: Session, micro: MicroBatch) -> None:
    """Raise SharedRows if the first micro-batch of a set has written fewer rows than it has samples. Collective over
    `eval_ranks`.
    """
    for name in session.evaluation.rows_before:
        written = _rows_written(session, name)

        # The ranks agree on the fewest rows that any of them has written.
        missing_here = 0
        if micro.real and 0 < written < micro.samples:
            missing_here = micro.samples - written
        (missing,) = session.eval_ranks.all_reduce_max(missing_here)
        if missing:
            rows = max(1, micro.samples - missing)
            raise SharedRows(name, micro.samples, rows)


# --- of the ranks


def rows_of_several_ranks(session: Session) -> RowsOfRanks | None:
    """Return a buffer of which several ranks have written the same elements since the set began; None if there is none.
    Collective.
    """
    if session.ranks.world_size == 1 or not per_sample_buffers(_modules(session)):
        return None

    # States of a recurrent network are small: every rank may have what those of all have written.
    changes_here = _changes_since(session.evaluation.rows_before, session)
    changes_by_rank: list[Changes] = session.ranks.all_gather_object(changes_here)
    written_before: Changes = {}
    for changes in changes_by_rank:
        for name, changed in changes.items():
            earlier = written_before.get(name)
            if earlier is None or earlier.shape != changed.shape:
                written_before[name] = changed
            elif bool((earlier & changed).any()):
                return RowsOfRanks(name, _rows_written(session, name))
            else:
                written_before[name] = earlier | changed
    return None


def are_rows_of_positions(
    session: Session, set_name: str, batches: EvalBatches, shared: RowsOfRanks, compute: Callable[[MicroBatch], Any]
) -> bool | None:
    """Return whether the model takes the row of a sample's place in its micro-batch (`hidden[:len(inputs)]`), rather
    than that of its sequence: then ranks write the same rows although their sequences are different ones. None if that
    cannot be seen. Collective; call with the state that the set begins with.

    With rows of places, the first two samples of a micro-batch, each alone, write one row, and together two. One sample
    at a time, all of them write one row.

    Args:
        session: the live objects.
        set_name: the set's, which seeds the generators.
        batches: those of the set.
        shared: the rows that several ranks have written.
        compute: the forward of a micro-batch.
    """
    with as_evaluated(session.engine, set_name):
        fetched = batches.from_sample(0, session.sizes.evaluation.size, session.ranks)
        micro = next(fetched, None)  # None on a rank without samples, unless forwards are collective
        by_position_here = None
        if micro is not None:
            by_position_here = _writes_by_position(session, micro, shared, compute)
    if session.strategy.forward_is_collective:
        session.strategy.finish_accumulation()
    if session.sizes.evaluation.limit is not None:  # two samples of a micro-batch have written one row
        by_position_here = False

    answers = session.ranks.all_gather_object(by_position_here)
    decided = [answer for answer in answers if answer is not None]
    return all(decided) if decided else None


def _writes_by_position(
    session: Session, micro: MicroBatch, shared: RowsOfRanks, compute: Callable[[MicroBatch], Any]
) -> bool | None:
    """Return whether the first two samples of a micro-batch write rows by their places in it; None if that cannot be
    seen. Runs as many forwards for every micro-batch, since they may be collective.
    """
    second = min(1, micro.samples - 1)
    changed = []
    for numbers in (range(1), range(second, second + 1), range(second + 1)):
        changed.append(_changes_by(session, micro, numbers, compute).get(shared.name))
    by_first, by_second, by_both = changed
    if not micro.real or by_first is None or by_second is None or by_both is None:
        return None
    if micro.samples == 1:
        return False if shared.rows_here > 1 else None
    write_one_row = (by_first & by_second).any()
    write_two_rows = (by_both & ~(by_first | by_second)).any()
    return bool(write_one_row and write_two_rows)


def _changes_by(session: Session, micro: MicroBatch, numbers: range, compute: Callable[[MicroBatch], Any]) -> Changes:
    """Return what the forward of some samples of a micro-batch writes, and undo it."""
    (samples,) = split_micro_batch(micro, [numbers])
    before = {name: tensor.clone() for name, tensor in _tensors(session).items()}
    draws = session.engine.sample_draws(samples)
    with session.snapshot.undone(), preserved_rng(session.state.device), draws:
        compute(samples)
        return _changes_since(before, session)


def _changes_since(before: Mapping[str, Tensor], session: Session) -> Changes:
    changes = {}
    for name, tensor in _tensors(session).items():
        if name not in before:
            continue
        is_comparable = before[name].shape == tensor.shape and before[name].dtype == tensor.dtype
        if is_comparable:
            changes[name] = changed_elements(before[name], tensor).cpu()
    return changes


def _rows_written(session: Session, name: str) -> int:
    """Return the number of rows of a buffer that this rank has written since the set began; 0 if it is unknown."""
    before = session.evaluation.rows_before.get(name)
    after = _tensors(session).get(name)
    if before is None or after is None:  # a forward has registered or removed it
        return 0
    global_size = session.config.batch.global_size
    share = -(-global_size // session.ranks.world_size)  # rounded up
    row_counts = {global_size, share}  # a buffer may have rows for either
    return rows_written(before, after, row_counts)


def _tensors(session: Session) -> dict[str, Tensor]:
    return per_sample_tensors(_modules(session))


def _modules(session: Session) -> dict[str, torch.nn.Module]:
    return {"model": session.state.model, **session.state.stateful.modules}
