"""Climbing the ladder: the techniques that a run turns on when no micro-batch size fits, chosen by all ranks."""

import dataclasses
from typing import Any

from trainapp.draws.record import OWN_GENERATOR
from trainapp.memory.live_tensors import Category
from trainapp.oom.failure import Failure, Recovery
from trainapp.oom.messages import final_message, shortage_of
from trainapp.oom.report import sizes_of_phase
from trainapp.parallel.ranks import Ranks
from trainapp.techniques.catalogue import Situation
from trainapp.techniques.ladder import Climb, next_techniques, recomputing
from trainapp.techniques.savings import Shortage
from trainapp.training.session import Session


def choose_climb(session: Session, failure: Failure, change: Recovery, ranks: Ranks) -> Climb | None:
    """Choose the technique to turn on after an error that no size avoids. Return None if no technique may or can help.
    Collective: `ranks`.

    Args:
        session: whose work has failed.
        failure: the error.
        change: the answer to it, without a size.
        ranks: those that choose together.
    """
    config = session.config
    is_of_host_beside_a_device = failure.host and session.state.device.type != "cpu"
    if config.oom.techniques == "none" or not config.activity.trains or is_of_host_beside_a_device:
        return None
    candidates = _common_candidates(session, failure, change.old_size, ranks)
    if not candidates:
        return None

    sizes = sizes_of_phase(session, failure.phase)
    speed = session.meter.samples_per_second() if session.meter.samples else None
    technique, *others = candidates
    return Climb(
        technique,
        session.turned_on,
        tuple(others),
        first_size=min(2 * change.old_size, sizes.start) if sizes.grow else sizes.start,
        samples_per_second=speed,
        message=final_message(session, failure, change.old_size, change.is_constant),
    )


def _common_candidates(session: Session, failure: Failure, size: int, ranks: Ranks) -> tuple[str, ...]:
    """Return the settings that would help every rank that has run out of memory, in the order of the first one."""
    candidates_here = None
    if not failure.by_peer:
        situation = Situation(session.config, session.state.model, session.engine.knows_loss)
        shortage = _with_uncounted_activations(shortage_of(session, failure, size), failure)
        turned_on = session.turned_on
        excluded = [*turned_on.tried, *turned_on.refused]
        if OWN_GENERATOR in session.engine.draw_record.depends:  # it would draw other numbers in a recomputation
            excluded += recomputing()
        candidates_here = next_techniques(situation, shortage, excluded)

    by_rank = [candidates for candidates in ranks.all_gather_object(candidates_here) if candidates is not None]
    if not by_rank:
        return ()
    first = by_rank[0]
    return tuple(setting for setting in first if all(setting in candidates for candidates in by_rank))


def _with_uncounted_activations(shortage: Shortage, failure: Failure) -> Shortage:
    """Return what filled memory, with activations where they were not counted: on the CPU with a validated size."""
    if not failure.phase.depends_on_size or shortage.of(Category.ACTIVATIONS):
        return shortage
    held = {**shortage.held, Category.ACTIVATIONS: shortage.requested}
    return dataclasses.replace(shortage, held=held)


def first_sizes(session: Session, failure: Failure, climb: Climb) -> dict[str, Any]:
    """Return the record of the micro-batch sizes with which a climb begins: see `Sizes.beginning_with`."""
    return session.sizes.beginning_with(climb.first_size, sizes_of_phase(session, failure.phase))
