"""Recovery from an error of a step: in place, with another micro-batch size, or by a new session."""

import dataclasses
from pathlib import Path
from typing import Any

from trainapp.checkpoint.manifest import read_manifest
from trainapp.config.schema import Config
from trainapp.errors import OutOfMemory
from trainapp.memory import host
from trainapp.oom import recovery
from trainapp.oom.climbing import choose_climb, first_sizes
from trainapp.oom.decision import Decision, RecoveryKind, decide
from trainapp.oom.failure import Failure, Recovery
from trainapp.oom.messages import final_message
from trainapp.oom.report import sizes_of_phase
from trainapp.optim.optimizers import uses_foreach
from trainapp.parallel.ranks import answered_by_rank_zero
from trainapp.run import directory, resume
from trainapp.run.prepare import SessionStart
from trainapp.sizes.failures import ErrorKind
from trainapp.sizes.record import EVALUATION
from trainapp.techniques.ladder import Climb
from trainapp.training.session import Session


def recover(session: Session, failure: Failure) -> SessionStart | None:
    """Recover from an error as `decide` says, on all ranks that were in the step together. Call outside `except`.

    Return the start of a new session if this one cannot continue. Raises TrainingStopped if no other size or technique
    can help.
    """
    # Count first: this worker may end, and the restarted one resumes the counts.
    if not failure.by_peer:
        _count(session, failure)

    # Can this process recover at all? Then all ranks leave the step.
    decision = decide(failure, session.ranks)
    if decision.ends_process:
        recovery.end_process(session, failure, decision)
    recovery.abort_on_all_ranks(session, failure)
    if failure.by_peer:  # only now does this rank know whether its peer was out of memory
        _count(session, failure)

    # Undo the attempt, which tells what cannot be undone.
    if failure.host:
        host.give_memory_back()
    recovery.undo_attempt(session, failure)
    session.memory.enforce()  # of what is free now: others may have taken some since the cap was set
    decision = decide(failure, session.ranks)
    if decision.ends_process:
        recovery.end_process(session, failure, decision)

    # Try again: from a checkpoint, with another technique, or from before the step.
    if failure.kind is ErrorKind.TECHNIQUE_REFUSED:
        return _climb(session, failure, recovery.without_refused(session, failure))
    if decision.kind is RecoveryKind.FROM_CHECKPOINT:
        return _restart(session, failure, decision)
    change = recovery.change_size(session, failure, decision)
    if not change.has_size:
        climb = _next_climb(session, failure, change)
        return _climb(session, failure, climb, "no micro-batch fits; ")
    failure.recovery = change
    recovery.report(session, failure)
    return None


def _count(session: Session, failure: Failure) -> None:
    session.sizes.recoveries += 1
    if failure.is_out_of_memory:
        session.sizes.oom_restarts += 1
        session.memory.out_of_memory_count += 1


def _restart(session: Session, failure: Failure, decision: Decision) -> SessionStart:
    """Return the start of a new session, from the last checkpoint or from the start of the run. Collective: all ranks.

    Args:
        session: the one that ends.
        failure: the error that ended it.
        decision: to do so, and why.
    """
    # What is different: first the optimizer's kernels, which is cheaper, then the size, then a technique.
    if _can_spare_copies(session, failure):
        size = sizes_of_phase(session, failure.phase).current_size
        change = Recovery(size, size)
        difference = "optimizer.foreach=false, whose kernels make no temporary copies of the parameters"
        start = _next_start(session, failure, session.sizes.state_dict())
        start = dataclasses.replace(start, config=_without_foreach(start.config))
    else:
        change = recovery.change_size(session, failure, decision)
        if not change.has_size:
            climb = _next_climb(session, failure, change)
            return _climb(session, failure, climb, f"{decision.reason}; ")
        difference = f"micro-batch {change.old_size} -> {change.new_size}"
        start = _next_start(session, failure, session.sizes.state_dict())
    action = f"{decision.reason}; {_origin_text(session, start)}, with {difference}"
    failure.recovery = dataclasses.replace(change, action=action)
    recovery.report(session, failure)
    return start


def _next_climb(session: Session, failure: Failure, change: Recovery) -> Climb:
    """Return the climb after an error that no size avoids. Collective: all ranks, or none for a local failure.

    Raises OutOfMemory if no technique can help.
    """
    climb = None
    is_of_one_rank_of_several = failure.is_local and session.ranks.world_size > 1
    if not is_of_one_rank_of_several:
        climb = choose_climb(session, failure, change, session.ranks)
    if climb is None:
        raise OutOfMemory(final_message(session, failure, change.old_size, change.is_constant))
    return climb


def _climb(session: Session, failure: Failure, climb: Climb, reason: str = "") -> SessionStart:
    """Return the start of a new session with one more technique. Collective: all ranks.

    Args:
        session: the one that ends.
        failure: the error that ended it.
        climb: the climb.
        reason: for it, in words, if the error is not enough.
    """
    start = _next_start(session, failure, first_sizes(session, failure, climb))
    start = dataclasses.replace(start, turned_on=climb.turned_on, climb=climb)
    action = f"{reason}{_origin_text(session, start)}, with {climb.text}"
    old_size = sizes_of_phase(session, failure.phase).current_size
    failure.recovery = Recovery(old_size, climb.first_size, action)
    recovery.report(session, failure)
    return start


def _next_start(session: Session, failure: Failure, sizes: dict[str, Any]) -> SessionStart:
    """Return the start of a new session from the last checkpoint, or from the start of the run. Collective: all ranks.

    Args:
        session: the one that ends.
        failure: the error that ended it.
        sizes: the record of the micro-batch sizes to begin with.
    """
    # The checkpoint to start from. One that is still being written in the background may be the newest.
    config = session.recovery.chosen_config or session.config
    session.checkpointer.finish()
    # Until this run has saved one, its directory may have those of another branch, or of an earlier run.
    has_checkpoints = session.checkpointer.has_saved or any(session.ranks.all_gather_object(directory.may_have_saved()))
    checkpoint = answered_by_rank_zero(session.ranks, lambda: resume.origin(config, has_checkpoints))
    resumed = "none" if checkpoint is None else str(checkpoint)

    if not failure.evaluating:  # sizes of evaluations are then those of the checkpoint
        del sizes[EVALUATION]
    checkpointing = dataclasses.replace(config.checkpointing, resume=resumed)
    return SessionStart(
        config=dataclasses.replace(config, checkpointing=checkpointing),
        began=session.meter.began,
        sizes=sizes,
        memory=session.memory,
        written=session.snapshot.written,
        task_states=session.recovery.task_states,
        turned_on=session.turned_on,
    )


def _origin_text(session: Session, start: SessionStart) -> str:
    """Return from where a new session starts, and the finished steps that it repeats, in words."""
    resumed = start.config.checkpointing.resume
    step = 0
    origin = "the start"
    if resumed != "none":
        step = read_manifest(Path(resumed))["step"]
        origin = f"the checkpoint of step {step}"
    repeated = session.state.progress.step - step
    return f"restarting from {origin} and repeating {repeated} finished steps"


def _can_spare_copies(session: Session, failure: Failure) -> bool:
    """Return whether the optimizer's step has failed by kernels over lists of tensors that nobody has asked for."""
    settings = session.config.optimizer
    is_chosen = session.config.updates or "foreach" in settings.arguments
    is_of_step = failure.phase.is_partly_applied and not failure.phase.updates_in_backward
    return is_of_step and not is_chosen and uses_foreach(session.state.optimizer, session.state.device)


def _without_foreach(config: Config) -> Config:
    arguments = {**config.optimizer.arguments, "foreach": False}
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, arguments=arguments))
