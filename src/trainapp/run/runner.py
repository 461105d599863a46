"""One run from start to end: builds it, restarts its inner loop when memory runs out, reports how it ended."""

import contextlib
import dataclasses
import functools
import gc
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainapp.assembly import build, hooks
from trainapp.checkpoint.manifest import read_manifest
from trainapp.config.claimed_settings import log_claims, with_claimed_settings
from trainapp.config.schema import Config
from trainapp.errors import OUT_OF_MEMORY, add_note
from trainapp.files import RECIPE
from trainapp.inference import generate, predict
from trainapp.memory import host
from trainapp.memory.detection import is_out_of_memory
from trainapp.memory.device import DeviceMemory
from trainapp.oom import model_errors, recovery
from trainapp.oom.building import explain_out_of_memory
from trainapp.oom.report import Failure, describe
from trainapp.parallel.ranks import Ranks, SingleRank, answered_by_rank_zero
from trainapp.planning.process import with_modes
from trainapp.run import directory, recipe, recipe_text, resume
from trainapp.run.first_sizes import changes_of_memory, initial_sizes
from trainapp.run.result import (
    Result,
    forget_stop,
    kind_of,
    print_command,
    report,
    result_of,
    write_building_failure,
    write_failure,
)
from trainapp.signals import AtWork, Interrupted, StopRequest, deadline_of
from trainapp.sizes.record import EVALUATION, take_restart
from trainapp.training import events, loop, stopping
from trainapp.training.dependence import warn_of_trials
from trainapp.training.evaluate import evaluate
from trainapp.training.memory_watch import refused_in_attempt
from trainapp.training.phase import Phase
from trainapp.training.session import Session

log = logging.getLogger(__name__)


@dataclass
class CarriedOver:
    """State that a run with a partially applied commit passes to its successor in the same process."""

    config: Config  # names the checkpoint to start from
    restart: dict[str, Any]  # micro-batch sizes and the number of recoveries
    memory: DeviceMemory  # limit and counters
    began: float  # see `Meter`
    written: list[str]  # parameters that the forward writes: see `Snapshot`
    first_states: dict[str, Any] = field(default_factory=dict)  # of the tasks, when the run began


def run(config: Config, ranks: Ranks | None = None) -> Result:
    """Perform one run. Raises UserError, and `signals.Interrupted` after a signal."""
    started = time.monotonic()
    if not gc.get_freeze_count():  # imported modules stay: scanning them cost 0.14 s per recovery
        gc.freeze()
    ranks = ranks or SingleRank()
    stop = StopRequest(deadline_of("train.max_time", config.train.max_time, config.started))
    is_saved = config.continues and resume.names_a_checkpoint(config)
    stop.at_work = functools.partial(AtWork, is_saved=is_saved)
    with stop:
        # One session, and a new one after each error that cannot be rolled back in place.
        outcome = _run_session(config, stop, ranks, started)
        while isinstance(outcome, CarriedOver):
            stop.at_work = AtWork
            outcome.memory.release()  # before the new model is built
            outcome = _run_session(outcome.config, stop, ranks, outcome.began, outcome)
    if stop.agreed:
        stop.leave(stop.agreed)
    return outcome


def _run_session(
    config: Config, stop: StopRequest, ranks: Ranks, began: float, carried: CarriedOver | None = None
) -> Result | CarriedOver:
    """Run to the end, or to an error inside the commit, after which a new `Session` must be built.

    Args:
        config: of the run.
        stop: the request to stop, shared by all sessions of the run.
        ranks: all ranks of the run.
        began: see `prepare`.
        carried: what an earlier session of this process has left.
    """
    # Build it.
    try:
        with explain_out_of_memory(config, ranks):
            session = prepare(config, stop, ranks, carried, began)
    except Exception as error:
        # A mistake is in the exit code, and leaves no trace of the run.
        if kind_of(error) == OUT_OF_MEMORY and config.activity.trains and ranks.is_rank_zero:
            write_building_failure(config, error)
        raise

    # Run it. On the CPU, the host's memory is the device's.
    memory_guard: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if session.state.device.type == "cpu":
        memory_guard = host.guarded(config.memory, session.memory.total)
    stop.at_work = functools.partial(stopping.at_work, session)
    with contextlib.closing(session), memory_guard:
        first_states = _first_states(session, carried)
        if carried is None:
            _print_recipe(session)
            warn_of_trials(session)
            events.warn_of_unknown_epochs(session)
        try:
            carried_over = _run_with_retries(session)
        except Interrupted:  # at once, since nothing is lost
            print_command(session)
            raise
        except Exception as error:
            add_note(error, f"at step {session.state.progress.step + 1}")
            if session.config.activity.trains and ranks.is_rank_zero:
                write_failure(session, error)
            raise
        if carried_over is not None:
            return dataclasses.replace(carried_over, first_states=first_states)

    # Report it.
    result = result_of(session)
    if ranks.is_rank_zero:
        report(session, result)
    return result


def _run_with_retries(session: Session) -> CarriedOver | None:
    """Run to the end, recovering from errors in place. Return the state for a new session if one cannot be undone."""
    while True:
        failure = run_until_oom(session)
        if failure is None:
            return None
        carried_over = recover(session, failure)
        if carried_over is not None:
            return carried_over


def _first_states(session: Session, carried: CarriedOver | None) -> dict[str, Any]:
    """Return the states that the tasks had when the run began, and restore them where it begins again.

    A task may be an object of a user's module, which outlives the session. Copies, without modules' tensors.
    """
    owners = session.state.stateful.owners

    # A later session.
    if carried is not None:
        if session.config.checkpointing.resume == "none":
            for name, state in carried.first_states.items():
                owners[name].restore(state)
        return carried.first_states

    # The first one.
    states = {}
    for name, owner in owners.items():
        root = name.partition(".")[0]
        if root.endswith("task") and not owner.is_restored_elsewhere:
            states[name] = owner.copy()
    return states


def _print_recipe(session: Session) -> None:
    """Print how the run trains, and write it to recipe.json."""
    facts = recipe.recipe_of(session)
    for line in recipe_text.printed_lines(facts):
        log.info("%s", line)
    if session.config.activity.trains and session.ranks.is_rank_zero:
        try:
            recipe.write(session.tracker.run_dir, facts)
        except OSError as error:  # the run is more important than its record
            session.tracker.warn_unwritable(session.tracker.run_dir / RECIPE, error)


def prepare(
    config: Config, stop: StopRequest, ranks: Ranks, carried: CarriedOver | None = None, began: float | None = None
) -> Session:
    """Return a session ready for its next step: built, restored from a checkpoint, sizes chosen, files open.

    Args:
        config: of the run.
        stop: the request to stop.
        ranks: all ranks of the run.
        carried: what an earlier session of this process has left.
        began: `time.monotonic()` when this process began the run; None: now.
    """
    # The checkpoint, and the settings that it decides.
    has_restarted = any(ranks.all_gather_object(directory.has_restarted()))  # torchrun counts each node's own failures
    path = answered_by_rank_zero(ranks, lambda: resume.origin(config, has_restarted))
    if path is not None:
        config = resume.as_saved(config, path)
    stop.at_work = functools.partial(AtWork, is_saved=path is not None and config.continues)
    config = with_claimed_settings(config.with_inference_batch_size())
    if carried is None:
        log_claims(config)
    trains = config.activity.trains
    if trains:
        config = with_modes(config, ranks)

    # The live objects, in the checkpoint's state.
    memory = carried.memory if carried is not None else None
    session = build.build(config, stop, ranks, memory, resumes=path is not None)
    if carried is not None:
        session.snapshot.add_written(carried.written)
    saved = resume.restore(session, path) if path is not None else None

    # The micro-batch sizes.
    restart = carried.restart if carried is not None else None
    if restart is None and trains:
        restart = take_restart(Path(config.run_dir), has_restarted, ranks)
    changed = changes_of_memory(session, path) if path is not None and trains else []
    session.sizes = initial_sizes(session, restart, saved, changed)

    # The clock, and the files.
    session.meter.began = began or session.meter.began
    if carried is None and saved is not None and trains:  # seconds of earlier processes
        session.meter.began -= saved.get("seconds", 0.0)
    hooks.try_metrics(session)
    build.start_tracking(session)
    if trains and ranks.is_rank_zero:
        forget_stop(Path(config.run_dir))
    return session


def run_until_oom(session: Session) -> Failure | None:
    """Run the inner loop. Return None, or a description of an error: recover from it after its tensors are released."""
    try:
        work(session)
        return None
    except Exception as error:
        if not session.config.oom.enabled or session.engine.phase is Phase.SAVE:
            raise
        if is_out_of_memory(error, refused_in_attempt(session)):
            recovery.wait_for_device(session)  # while the traceback keeps the failed tensors alive
            return describe(session, error)  # plain values, which do not keep those tensors alive
        if model_errors.has_too_few_samples(session, error):
            return describe(session, error, has_too_few=True)
        if model_errors.rejects_larger_size(session, error):
            return describe(session, error, rejects_size=True)
        model_errors.note_evaluation(session, error)
        raise


def work(session: Session) -> None:
    """Train, evaluate, predict or generate, according to `mode`."""
    config = session.config
    if config.mode == "eval":
        evaluate(session)
        events.end(session)
    elif config.mode == "predict":
        predict.predict(session)
    elif config.mode == "generate":
        generate.generate(session)
    elif config.activity.makes_steps:
        loop.train(session)
        if session.stop.agreed and stopping.at_work(session).is_saved:
            session.stop.has_saved()
        events.end(session)
    else:
        raise ValueError(f"mode={config.mode} has no session")  # a mistake of this program: see `launch.launch`


def recover(session: Session, failure: Failure) -> CarriedOver | None:
    """Roll the step back and reduce the micro-batch size. Call outside `except`.

    Return the state for a new session if this one cannot continue. Raises TrainingStopped if no smaller size is left.
    """
    # Count before ranks agree, which may end this worker: the restarted one resumes the counts.
    if not failure.by_peer:
        _count(session, failure)
    recovery.abort_on_all_ranks(session, failure)
    if failure.by_peer:  # only now does this rank know whether its peer was out of memory
        _count(session, failure)

    # Then the state is that of before the step, and a smaller size is tried.
    if failure.host:
        host.give_memory_back()
    recovery.undo_attempt(session, failure)
    if failure.needs_checkpoint:
        return _carry_over(session, failure)
    recovery.change_size(session, failure)
    recovery.report(session, failure)
    return None


def _count(session: Session, failure: Failure) -> None:
    session.sizes.recoveries += 1
    if failure.is_out_of_memory:
        session.sizes.oom_restarts += 1
        session.memory.out_of_memory_count += 1


def _carry_over(session: Session, failure: Failure) -> CarriedOver:
    """Restart from the last checkpoint, or from the start: parameters may be half updated, or written by a forward."""
    # The checkpoint to start from. One that is still being written in the background may be the newest.
    config = session.config
    session.checkpointer.finish()
    # Until this run has saved one, its directory may have those of another branch, or of an earlier run.
    has_checkpoints = session.checkpointer.has_saved or any(session.ranks.all_gather_object(directory.has_restarted()))
    path = answered_by_rank_zero(session.ranks, lambda: resume.origin(config, has_checkpoints))
    if path is None:
        checkpoint_step = 0
        origin_text = "the start"
        resumed = "none"
    else:
        checkpoint_step = read_manifest(path)["step"]
        origin_text = f"the checkpoint of step {checkpoint_step}"
        resumed = str(path)
    checkpointing = dataclasses.replace(config.checkpointing, resume=resumed)

    # The size to start with.
    recovery.change_size(session, failure)
    repeated = session.state.progress.step - checkpoint_step
    failure.recovery.action = (
        f"{failure.why_checkpoint}; restarting from {origin_text} and repeating {repeated} finished steps, with "
        f"micro-batch {failure.recovery.old_size} -> {failure.recovery.new_size}"
    )
    recovery.report(session, failure)

    restart = session.sizes.state_dict()
    if not failure.evaluating:  # sizes of evaluations are then those of the checkpoint
        del restart[EVALUATION]
    return CarriedOver(
        config=dataclasses.replace(config, checkpointing=checkpointing),
        restart=restart,
        memory=session.memory,
        began=session.meter.began,
        written=session.snapshot.written,
    )
