"""After an out-of-memory error: all ranks leave the step, it is rolled back, the size is reduced, the error is
reported. An error of the model in a micro-batch that may have too few samples is recovered from in the same way, with a
larger one.

While a run is being built there is no step to roll back and no micro-batch to shrink: see `out_of_memory_named`.
"""

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from typing import NoReturn

import torch

from trainapp.config.schema import Config
from trainapp.errors import TrainingStopped, add_note
from trainapp.memory.cuda import refused_allocations
from trainapp.memory.detection import is_out_of_memory, out_of_memory_in
from trainapp.memory.picture import Picture
from trainapp.models.inspect import batchnorms
from trainapp.oom.report import OomReport, final_message, one_line, write
from trainapp.parallel.ranks import OUT_OF_MEMORY_EXIT, Ranks, SingleRank
from trainapp.sizes.micro_batches import AttemptFailure, MicroBatchSizes
from trainapp.torch_private import release_failed_backward
from trainapp.training.phase import Phase
from trainapp.training.session import Session
from trainapp.training.transaction import rollback
from trainapp.units import listed

log = logging.getLogger(__name__)

# What models raise for too few samples. Not UserErrors, nor signals.
OF_MODELS = (ValueError, RuntimeError, LookupError, AssertionError, ArithmeticError)


def has_too_few_samples(session: Session, error: Exception) -> bool:
    """Whether this error of the model may come from a micro-batch with too few samples, as BatchNorm's does for one:
    larger ones of this shape have run, or ran out of memory, and the step has more samples.

    Call while the error is handled. An error that comes again with more samples is the user's: it is raised once no
    larger micro-batch is known to have run.
    """
    if not isinstance(error, OF_MODELS) or session.engine.phase is not Phase.FORWARD:
        return False
    in_step = len(session.batches.share(session.state.progress).numbers)
    sizes = session.sizes.train
    if not (sizes.may_have_too_few and sizes.current.samples < in_step):
        _note_single_sample(session, error, in_step)
        return False
    return _device_works(session)


def rejects_larger_size(session: Session, error: Exception) -> bool:
    """Return whether this error of the model comes with a larger micro-batch than one that is validated, such as an odd
    one for a model that pairs its samples: the search tries sizes of its own.

    Call while the error is handled. An error that comes again with the validated size is the user's.
    """
    if not isinstance(error, OF_MODELS) or session.engine.phase is not Phase.FORWARD:
        return False
    return session.sizes.train.tries_larger_size and _device_works(session)


def _device_works(session: Session) -> bool:
    """Return whether the device still works: after an assertion in a kernel nothing can run."""
    try:
        session.memory.synchronize()
    except Exception:
        return False
    return True


def _note_single_sample(session: Session, error: Exception, in_step: int) -> None:
    if session.sizes.train.current.samples == 1 and batchnorms(session.state.model):
        setting = "data.drop_last=true, if an epoch ends on one sample," if in_step == 1 else "batch.micro_size=2"
        add_note(
            error, f"the micro-batch has a single sample, which BatchNorm may not take: use {setting} or GroupNorm"
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


def abort_on_all_ranks(session: Session, failure: OomReport) -> None:
    """With several ranks: inform the others, and wait until all have left the step.

    If the others cannot be informed (without votes, or inside the commit), or if this process cannot recover, this
    worker ends with its own exit code; the launcher then restarts all workers from the last checkpoint, with the
    smaller size left for them in a file.
    """
    ranks = session.ranks
    if failure.broken:
        leave_for_restart(session, failure)
    if failure.is_local:
        return
    if not failure.by_peer:
        if not ranks.votes_enabled or not failure.phase.is_voted_on:
            leave_for_restart(session, failure)
        ranks.vote(True)
    ranks.cancel_flag_exchange()
    by_rank = ranks.all_gather_object((not failure.by_peer, failure.too_few, failure.rejects_size))
    failure.culprits = [rank for rank, (is_culprit, _, _) in enumerate(by_rank) if is_culprit]
    if failure.by_peer:
        failure.too_few = max(too_few for _, too_few, _ in by_rank)
        failure.rejects_size = any(rejects_size for _, _, rejects_size in by_rank)


def roll_back(session: Session, failure: OomReport) -> None:
    """Leave no trace of the failed attempt; see `transaction.rollback`. Sets `failure.lost`, equal on all ranks: state
    that the rollback could not restore, see `Snapshot`.
    """
    release_failed_backward()
    rollback(session, failure.phase, other_ranks_wait=not failure.is_local)
    ranks = SingleRank() if failure.is_local else session.ranks
    by_rank = ranks.all_gather_object(session.snapshot.lost)
    failure.lost = sorted({name for names in by_rank for name in names})
    session.snapshot.note(failure.lost)
    if failure.lost and failure.is_local and session.ranks.world_size > 1:  # in this rank's own evaluation
        leave_for_restart(session, failure)


def change_size(session: Session, failure: OomReport) -> None:
    """Choose the size of the next attempt. Raises TrainingStopped if no other one can help.

    Work without a size is retried unchanged, once per step.
    """
    sizes = _sizes_of(session, failure)
    failure.old_size = failure.new_size = sizes.current_size
    if _retries_as_it_is(session, failure):
        failure.action = f"retrying with micro-batch {failure.old_size}, after freeing unused memory"
        return
    ranks = SingleRank() if failure.is_local else session.ranks
    changed = sizes.record_failure(ranks, not failure.by_peer, _reason_of(failure))
    failure.is_constant = sizes.search(sizes.current.bucket).must_try_smallest
    if changed is None:
        raise TrainingStopped(final_message(session, failure))
    failure.old_size, failure.new_size = changed
    setting = "evaluation micro-batch" if failure.evaluating else "micro-batch"
    failure.action = f"{setting} {failure.old_size} -> {failure.new_size}, retrying the step"
    if failure.is_constant:
        failure.action += " (fewer samples asked for the same)"
    if failure.too_few:
        session.attempt.too_few = "" if failure.by_peer else f" ({failure.message})"
        failure.action = (
            f"from now on every micro-batch of this shape has at least {failure.old_size + 1} samples; retrying the "
            f"step with micro-batch {failure.new_size}"
        )
    elif failure.rejects_size:
        failure.action = (
            f"going back to micro-batch {failure.new_size}, which has run; no larger one is tried for this shape"
        )


def _reason_of(failure: OomReport) -> AttemptFailure:
    return AttemptFailure(failure.failed_allocation, failure.too_few, failure.rejects_size)


def _sizes_of(session: Session, failure: OomReport) -> MicroBatchSizes:
    return session.sizes.evaluation if failure.evaluating else session.sizes.train


def _retries_as_it_is(session: Session, failure: OomReport) -> bool:
    """Whether to retry at the same size, once per step: no rank's work would benefit from a smaller size or, on CUDA,
    none is left and freeing fragmented memory may be enough. Collective: ranks may be in different phases.
    """
    attempt, ranks = session.attempt, SingleRank() if failure.is_local else session.ranks
    is_smallest = not _sizes_of(session, failure).can_shrink and session.state.device.type == "cuda"
    has_no_size = failure.by_peer or not failure.phase.depends_on_size or (is_smallest and not failure.needs_checkpoint)
    retries = all(ranks.all_gather_object(has_no_size and attempt.retried != failure.step))
    if retries:
        attempt.retried = failure.step
    return retries


def report(session: Session, failure: OomReport) -> None:
    """Report the error on the terminal at once, in oom/ of the run directory, and in the trackers."""
    failure.seconds_lost = time.monotonic() - session.attempt.started
    if failure.by_peer:
        ranks = listed(map(str, failure.culprits))
        reason = "ran out of memory" if failure.is_out_of_memory else "cannot run this number of samples"
        log.warning("rank %s %s at step %d: %s", ranks, reason, failure.step, failure.action)
        return
    log.warning("%s%s", f"rank {failure.rank}: " if session.ranks.world_size > 1 else "", one_line(failure))
    if not failure.is_out_of_memory:  # no memory to report
        return
    try:
        path = write(session, failure)
        session.memory.dump(path.with_suffix(".snapshot.pickle"))
        session.tracker.text("out_of_memory", one_line(failure), failure.step)
        if failure.events:
            title = f"out of memory at step {failure.step} in {failure.place}, micro-batch {failure.old_size}"
            picture = Picture(failure.events, failure.kinds, failure.limit, title, path.with_suffix(".png"))
            session.tracker.picture("out_of_memory", picture, failure.step)
    except (OSError, MemoryError) as error:  # the run is more important than its report
        session.tracker.unwritable(session.tracker.run_dir / "oom", error)


def leave_for_restart(session: Session, failure: OomReport) -> NoReturn:
    """End this worker, leaving the sizes for the restarted workers in the run directory.

    Raises TrainingStopped if nothing can help, or if nothing would restart this process.
    """
    if isinstance(session.ranks, SingleRank):
        failure.action = f"{failure.broken} fails from now on in this process"
        with contextlib.suppress(OSError):
            write(session, failure)
        raise TrainingStopped(
            f"{one_line(failure)}; continue from the last checkpoint in a new process, with a memory.limit below "
            f"the driver's:\n  {session.config.command}"
        )
    sizes = _sizes_of(session, failure)
    # Work without a size also restarts with a smaller one: a new process may have more memory for it.
    reason = _reason_of(failure)
    if not failure.phase.depends_on_size:
        reason = reason._replace(allocation=None)
    changed = sizes.record_failure(SingleRank(), failure=reason)
    if changed is None:
        raise TrainingStopped(f"{one_line(failure)}: no smaller micro-batch can fit")
    failure.old_size, failure.new_size = changed
    failure.action = (
        f"not recoverable in place ({_why_not_in_place(failure)}): all ranks restart from the last checkpoint with "
        f"micro-batch {failure.new_size} instead of {failure.old_size}"
    )
    log.warning("rank %d: %s", session.ranks.rank, one_line(failure))
    try:
        session.sizes.leave_for_restart(session.tracker.run_dir, failing=sizes)
        write(session, failure)
    except OSError as error:  # the restart is more important than its report
        log.warning("the report of the error could not be written: %s", error)
    logging.shutdown()
    os._exit(OUT_OF_MEMORY_EXIT)


def _why_not_in_place(failure: OomReport) -> str:
    if failure.broken:
        return f"{failure.broken} fails from now on"
    if failure.phase.is_partial:
        return "inside the commit"
    if failure.lost:
        return f"the forward has written {listed(failure.lost, most=5)}"
    return "no votes are held for a validated size"


@contextlib.contextmanager
def out_of_memory_named(config: Config, ranks: Ranks) -> Iterator[None]:
    """Use around building a run. Raises TrainingStopped for an out-of-memory error, even if it was reported as a
    mistake: many are RuntimeErrors, as are the errors of an unsuitable optimizer or checkpoint.

    With several ranks raises torch.OutOfMemoryError: the others would wait for a rank that ends with a UserError, but
    the launcher ends them when one fails.
    """
    refused = refused_allocations()
    try:
        yield
    except Exception as error:
        reason = out_of_memory_in(error, refused_allocations() - refused)
        if reason is None:
            raise
        limit = "" if config.memory.limit is None else f" (memory.limit={config.memory.limit})"
        # The first line is always the same, so the launcher recognises that a restart does not help.
        message = (
            f"out of memory while building the run{limit}, before any batch, so that no micro-batch size can help: use "
            "a smaller model, an optimizer with less state (optimizer=sgd optimizer.momentum=0 "
            "optimizer.nesterov=false) or parallel=fsdp on more devices, or free what other processes use\n"
            f"{type(reason).__name__}: {str(reason).strip()}"
        )
        kind = TrainingStopped if isinstance(ranks, SingleRank) else torch.OutOfMemoryError
        raise kind(message) from error
