"""The loop over micro-batches that are not trained: those of evaluation, prediction and generation."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from trainapp.data.batch import MicroBatch
from trainapp.draws.record import EVALUATION
from trainapp.models.inspect import evaluation_mode
from trainapp.rng import evaluation_key, seed_from
from trainapp.training import stopping
from trainapp.training.engine import Engine
from trainapp.training.memory_watch import watched
from trainapp.training.session import Session

T = TypeVar("T")


@contextlib.contextmanager
def as_evaluated(engine: Engine, name: str, work: str = EVALUATION) -> Iterator[None]:
    """Evaluate inside the block: evaluation mode, averaged weights. Restore generators and module modes after it.

    Args:
        engine: the engine with the model.
        name: the evaluation set, which seeds the generators.
        work: names its draws in the record.
    """
    state = engine.state
    snapshot = engine.snapshot
    key = evaluation_key(state.seed, name)
    seed_from(state.device, *key)
    engine.draws_for = (work, key)
    preserved = snapshot.preserved_generators()
    with preserved, state.average.in_place_of_weights(), evaluation_mode(state.modules), snapshot.undone_on_error():
        yield


def each_micro_batch(
    session: Session,
    fetched: Iterable[MicroBatch],
    compute: Callable[[MicroBatch], T],
    keep: Callable[[MicroBatch, T], None],
) -> None:
    """Work on each micro-batch without training it: the loop of evaluation, prediction and generation.

    Use inside `as_evaluated`. Ends early once a stop is requested: all ranks agree on that at its end, and raise
    Stopped.

    Args:
        session: the live objects; its evaluation sizes are used.
        fetched: batches of at most the current size.
        compute: the work on a micro-batch, repeated if it runs out of memory; its results do not count yet.
        keep: takes the result of a complete micro-batch, on all ranks that evaluate together or on none.
    """
    sizes = session.sizes.evaluation
    for micro in sizes.split_all(fetched, session.eval_ranks):
        sizes.begin(micro.bucket, micro.samples)
        with session.metrics.undone_on_error():
            # Until the ranks agree, this micro-batch may be repeated: nothing of it counts.
            watching = watched(session, sizes, micro.data, micro.samples)
            with watching, session.engine.sample_draws(micro):
                result = compute(micro)
            session.engine.drop_gradients()  # of a task that calls backward(), as for an adversarial attack
            session.snapshot.record_written()
            session.eval_ranks.check_peers()  # last chance to repeat a micro-batch

        # From here on it counts.
        keep(micro, result)
        session.snapshot.take()
        signal_here = stopping.stop_requested(session)
        (stop,) = session.eval_ranks.all_reduce_max(signal_here)  # also a vote: what comes next has none
        sizes.record_success(session.eval_ranks)
        if stop:
            break
    stopping.agree_on_stop(session)
