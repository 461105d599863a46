"""The steps of a recovery: all ranks leave the step, it is rolled back, the size is changed, the error is reported.

`decision.decide` says which of them are taken, and `run.recover` takes them in order. A failure is *local* if no other
rank is in the step with this one: on a single rank, and in an evaluation in which ranks do not wait for each other.
Then this rank recovers alone. Otherwise all ranks of the run make the collective calls below, in this order: the vote
(the others have cast theirs in the step), the exchange of failures, the rollback, what was lost, whether the size
stays, and the next size.
"""

import contextlib
import dataclasses
import logging
import os
import time
from typing import Any, NoReturn

import torch

from trainapp.errors import MustRestart, OutOfMemory, TrainingStopped
from trainapp.files import OOM_REPORTS
from trainapp.memory.detection import is_out_of_memory
from trainapp.memory.picture import Picture
from trainapp.oom.climbing import choose_climb, first_sizes
from trainapp.oom.decision import Decision, RecoveryKind
from trainapp.oom.failure import NO_RECOVERY, Failure, Recovery
from trainapp.oom.messages import one_line
from trainapp.oom.report import path_of, sizes_of_phase, write
from trainapp.parallel.ranks import OUT_OF_MEMORY_EXIT, Ranks, SingleRank
from trainapp.sizes.failures import AttemptFailure, ErrorKind, SizeChange
from trainapp.sizes.record import leave_for_restart
from trainapp.techniques.ladder import CLIMB, Climb
from trainapp.torch_private import release_failed_backward
from trainapp.training.attempt import rollback
from trainapp.training.session import Session
from trainapp.units import listed

log = logging.getLogger(__name__)

# Which kind of error a rank that has not failed takes over, if several ranks have failed in different ways.
_BY_PRECEDENCE = (
    ErrorKind.TECHNIQUE_REFUSED,
    ErrorKind.TOO_FEW_SAMPLES,
    ErrorKind.SIZE_REJECTED,
    ErrorKind.TOO_LARGE_FOR_KERNEL,
    ErrorKind.OUT_OF_MEMORY,
    ErrorKind.NO_ENGINE,
)


def wait_for_device(session: Session) -> None:
    """Wait until the device has finished the failed attempt's work.

    Call while the error is being handled, so that the attempt's tensors still exist: freed memory may be reused while
    another stream still works on it. An error that surfaces only here ends the run, unless it is also out of memory,
    which the recovery in progress covers.
    """
    try:
        session.memory.synchronize()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        log.warning("while waiting for the device after it had run out of memory: %s", str(error).strip())


def abort_on_all_ranks(session: Session, failure: Failure) -> None:
    """Inform the other ranks that are in the step, if any, and wait until all have left it. Collective: all ranks, or
    none for a local failure.
    """
    if failure.is_local:
        return

    # Only ranks that have failed vote here. It pairs with the others' vote before their next collective, which raises
    # the PeerOutOfMemory that brings them here (see `parallel.ranks`).
    if failure.must_inform_others:
        session.ranks.vote(True)
    failure.others_are_informed = True

    # From here on all ranks are outside the step, and make the same calls.
    session.ranks.cancel_flag_exchange()
    _exchange_failures(session.ranks, failure)


def _exchange_failures(ranks: Ranks, failure: Failure) -> None:
    """Note which ranks have failed and, on the others, why. Collective: all ranks."""
    kind_here = None if failure.by_peer else failure.kind
    kinds_by_rank = ranks.all_gather_object(kind_here)
    failure.failed_ranks = [rank for rank, kind in enumerate(kinds_by_rank) if kind is not None]
    if failure.by_peer:
        # Several ranks may have failed, in different ways.
        for kind in _BY_PRECEDENCE:
            if kind in kinds_by_rank:
                failure.kind = kind
                break

    # Another algorithm is enough only if no rank has failed otherwise: all of them choose the next size together.
    other_kinds = {*kinds_by_rank} - {None, ErrorKind.NO_ENGINE}
    if failure.kind is ErrorKind.NO_ENGINE and other_kinds:
        failure.kind = ErrorKind.OUT_OF_MEMORY


def undo_attempt(session: Session, failure: Failure) -> None:
    """Leave no trace of the failed attempt; see `attempt.rollback`. Sets `lost`, equal on all ranks: state that the
    rollback could not restore, see `Snapshot`. Collective: the recovering ranks.
    """
    release_failed_backward()
    rollback(session, failure.phase, other_ranks_wait=not failure.is_local)

    # What one rank has lost is lost to all: their parameters would differ.
    lost: set[str] = set()
    lost_by_rank = _recovering_ranks(session, failure).all_gather_object(session.snapshot.lost)
    for names in lost_by_rank:
        lost.update(names)
    failure.lost = sorted(lost)
    session.snapshot.add_written(failure.lost)  # copied from now on


def _recovering_ranks(session: Session, failure: Failure) -> Ranks:
    """Return the ranks that take part in this recovery: this one alone, or all."""
    return SingleRank() if failure.is_local else session.ranks


def change_size(session: Session, failure: Failure, decision: Decision) -> Recovery:
    """Choose the size of the next attempt; none, if memory ran out and no other one can help.

    Work without a size is retried unchanged, once per step. Raises TrainingStopped if no other size can help after
    another error. Collective: the recovering ranks.
    """
    sizes = sizes_of_phase(session, failure.phase)
    size = sizes.current_size

    # Another algorithm may run with this size.
    if failure.kind is ErrorKind.NO_ENGINE and session.sizes.autotuner is not None:
        session.sizes.autotuner.allow_any()
        return Recovery(size, size, f"retrying with micro-batch {size} and algorithms that are not deterministic")

    # Where no smaller size can help, free memory may: retry once.
    if _keeps_size(session, failure, decision):
        return Recovery(size, size, f"retrying with micro-batch {size}, after freeing unused memory")

    # Otherwise the search, the same on all ranks, has the next size, or none.
    ranks = _recovering_ranks(session, failure)
    change = sizes.record_failure(ranks, not failure.by_peer, _attempt_failure(failure))
    is_constant = sizes.stored_or_new_search(sizes.current.bucket).must_try_smallest
    if change is None and not failure.is_out_of_memory:
        raise TrainingStopped(f"{one_line(failure)}no smaller micro-batch is left")
    if change is None:
        return Recovery(size, is_constant=is_constant)
    if failure.kind is ErrorKind.TOO_FEW_SAMPLES:
        session.recovery.too_few_error = ""
        if not failure.by_peer:
            session.recovery.too_few_error = f" ({failure.message})"
    action = _change_text(failure, change, is_constant)
    return Recovery(change.old, change.new, action, change.fewest_samples, is_constant)


def _keeps_size(session: Session, failure: Failure, decision: Decision) -> bool:
    """Return whether to retry at the same size, once per step: no rank's work would benefit from a smaller size or, on
    CUDA, none is left and freeing fragmented memory may be enough. Collective: the recovering ranks, which may be in
    different phases.
    """
    is_on_cuda = session.state.device.type == "cuda"
    is_smallest = not sizes_of_phase(session, failure.phase).can_shrink
    may_be_fragmented = is_on_cuda and is_smallest and decision.kind is RecoveryKind.IN_PLACE
    gains_nothing = failure.by_peer or not failure.phase.depends_on_size or may_be_fragmented
    may_retry = gains_nothing and session.recovery.retried_step != failure.step

    by_rank = _recovering_ranks(session, failure).all_gather_object(may_retry)
    all_may_retry = all(by_rank)
    if all_may_retry:
        session.recovery.retried_step = failure.step
    return all_may_retry


def _attempt_failure(failure: Failure) -> AttemptFailure:
    """Return what the search needs to know of a failure."""
    return AttemptFailure(failure.kind, failure.samples, failure.failed_allocation)


def _change_text(failure: Failure, change: SizeChange, is_constant: bool) -> str:
    if failure.kind is ErrorKind.TOO_FEW_SAMPLES:
        return (
            f"from now on every micro-batch of this shape has at least {change.fewest_samples} samples; retrying the "
            f"step with micro-batch {change.new}"
        )
    if failure.kind is ErrorKind.SIZE_REJECTED:
        return f"going back to micro-batch {change.new}, which has run; no larger one is tried for this shape"
    size_name = "evaluation micro-batch" if failure.evaluating else "micro-batch"
    text = f"{size_name} {change.old} -> {change.new}, retrying the step"
    if is_constant:
        text += " (the request did not shrink with fewer samples)"
    return text


def report(session: Session, failure: Failure) -> None:
    """Report the error on the terminal at once, in oom/ of the run directory, and in the trackers."""
    # One line on the terminal.
    if failure.by_peer:
        failed_ranks = listed(map(str, failure.failed_ranks))
        reason = "ran out of memory" if failure.is_out_of_memory else "cannot run this number of samples"
        if failure.kind is ErrorKind.TECHNIQUE_REFUSED:
            reason = "cannot be trained with the technique that was turned on"
        log.warning("rank %s %s at step %d: %s", failed_ranks, reason, failure.step, failure.recovery.action)
        return
    if session.ranks.world_size > 1:
        log.warning("rank %d: %s", failure.rank, one_line(failure))
    else:
        log.warning("%s", one_line(failure))

    # The rest in files, unless there is no memory to report.
    if not failure.is_out_of_memory:
        return
    try:
        _record(session, failure)
    except (OSError, MemoryError) as error:  # the run is more important than its report
        session.tracker.warn_unwritable(session.tracker.run_dir / OOM_REPORTS, error)


def _record(session: Session, failure: Failure) -> None:
    """Write the report to the run directory and the trackers. Raises OSError."""
    path = path_of(session, failure)
    session.memory.dump(path.with_suffix(".snapshot.pickle"))
    failure.seconds_lost = time.monotonic() - session.attempt.started  # with those of the dump: on CUDA a second or two
    write(session, failure)
    session.tracker.text("out_of_memory", one_line(failure), failure.step)
    if failure.events:
        title = f"out of memory at step {failure.step} in {failure.location}, micro-batch {failure.recovery.old_size}"
        picture_path = path.with_suffix(".png")
        picture = Picture(failure.events, failure.categories, failure.limit, title, picture_path)
        session.tracker.queue_picture("out_of_memory", picture, failure.step)


def end_process(session: Session, failure: Failure, decision: Decision) -> NoReturn:
    """End this process, which cannot go on, for new ones that continue from the last checkpoint. Not collective: the
    launcher ends the other workers.

    Raises MustRestart in a run of one process, and TrainingStopped if nothing can help.
    """
    # What the new processes do differently.
    is_one_process = decision.kind is RecoveryKind.END
    if failure.kind is ErrorKind.TECHNIQUE_REFUSED:
        restart, difference = _after_refusal(session, failure)
    else:
        restart, difference = _for_new_processes(session, failure, decision, is_one_process)
    if not is_one_process:
        continuation = "all ranks restart from the last checkpoint"
    elif session.config.activity.trains:
        continuation = "a new process continues from the last checkpoint"
    else:
        continuation = "only a new process can do this work,"
    action = f"not recoverable in place ({decision.reason}): {continuation} with {difference}"
    failure.recovery = dataclasses.replace(failure.recovery, action=action)
    _leave_for_restart(session, failure, restart)

    # End at once where other ranks wait in collectives.
    if is_one_process:
        has_saved = session.checkpointer.has_saved
        raise MustRestart(f"{one_line(failure)}\n{_how_to_continue(session)}", has_saved)
    log.warning("rank %d: %s", session.ranks.rank, one_line(failure))
    session.ranks.announce_end()
    logging.shutdown()
    os._exit(OUT_OF_MEMORY_EXIT)


def _for_new_processes(
    session: Session, failure: Failure, decision: Decision, is_one_process: bool
) -> tuple[dict[str, Any], str]:
    """Return what new processes need to try another size or, where none is left, with a further technique; and the
    difference in words. Sets `failure.recovery`. Raises TrainingStopped if nothing can help.
    """
    # Work without a size also restarts with a smaller one: a new process may have more memory for it.
    sizes = sizes_of_phase(session, failure.phase)
    attempt_failure = _attempt_failure(failure)
    if not failure.phase.depends_on_size:
        attempt_failure = attempt_failure._replace(allocation=None)
    change = sizes.record_failure(SingleRank(), failure=attempt_failure)
    if change is not None:
        failure.recovery = Recovery(change.old, change.new, fewest_samples=change.fewest_samples)
        restart = session.sizes.after_failure(sizes) | session.turned_on.checkpoint_entry()
        return restart, _restart_size(failure, change)

    climb = choose_climb(session, failure, Recovery(sizes.current_size), SingleRank())
    if climb is None:
        _stop(session, failure, decision.reason, is_one_process)
    failure.recovery = Recovery(sizes.current_size, climb.first_size)
    restart = first_sizes(session, failure, climb) | {CLIMB: climb.state_dict()}
    return restart, climb.text


def _after_refusal(session: Session, failure: Failure) -> tuple[dict[str, Any], str]:
    """Return what new processes need to try another technique than the one that the model has refused; and the
    difference in words. Raises OutOfMemory if there is none.
    """
    climb = without_refused(session, failure)
    restart = first_sizes(session, failure, climb) | {CLIMB: climb.state_dict()}
    return restart, climb.text


def without_refused(session: Session, failure: Failure) -> Climb:
    """Return a climb with another technique than the one that the model has refused.

    Raises OutOfMemory, with the message of the error that no size avoided, if no other one can help.
    """
    refused = session.recovery.climb
    assert refused is not None, "only a climb can be refused"
    climb = refused.after_refusal()
    if climb is None:
        failure.recovery = dataclasses.replace(NO_RECOVERY, action="no other technique can help")
        report(session, failure)
        raise OutOfMemory(refused.message_after_refusal(failure.message))
    return climb


def _stop(session: Session, failure: Failure, reason: str, is_one_process: bool) -> NoReturn:
    """End a run for which no smaller micro-batch is left.

    Of several ranks raises torch.OutOfMemoryError: the others would wait for a rank that ends with a UserError, but the
    launcher ends them when one fails.
    """
    failure.recovery = dataclasses.replace(NO_RECOVERY, action=f"{reason}, and no smaller micro-batch can fit")
    with contextlib.suppress(OSError):
        write(session, failure)
    text = one_line(failure)
    if is_one_process:
        text += f"\n{_how_to_continue(session)}"
    if not failure.is_out_of_memory:
        raise TrainingStopped(text)
    raise OutOfMemory(text) if is_one_process else torch.OutOfMemoryError(text)


def _leave_for_restart(session: Session, failure: Failure, restart: dict[str, Any]) -> None:
    """Leave sizes and techniques for the new processes in the run directory, and the report of the error."""
    try:
        leave_for_restart(session.tracker.run_dir, restart)
        if failure.kind is not ErrorKind.TECHNIQUE_REFUSED:
            write(session, failure)
    except OSError as error:  # the restart is more important than its report
        log.warning("the report of the error could not be written: %s", error)


def _how_to_continue(session: Session) -> str:
    config = session.config
    what = "Continue from the last checkpoint" if config.activity.trains else f"Begin this mode={config.mode} again"
    return f"{what} in a new process, with a memory.limit below the driver's:\n  {config.command}"


def _restart_size(failure: Failure, change: SizeChange) -> str:
    if failure.kind is ErrorKind.TOO_FEW_SAMPLES:
        return f"at least {change.fewest_samples} samples in every micro-batch of this shape"
    return f"micro-batch {change.new} instead of {change.old}"
