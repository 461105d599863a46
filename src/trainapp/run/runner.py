"""One run from start to end: sessions, each with retries, until one ends; then the report.

`prepare` builds a session, `training.loop` trains in it, and `recover` decides after an out-of-memory error whether the
same session continues or a new one begins.
"""

import contextlib
import dataclasses
import functools
import gc
import logging
from collections.abc import Iterator
from typing import Any

from trainapp.config.schema import Config
from trainapp.errors import OUT_OF_MEMORY, OutOfMemory, UserError, add_note, summary_of
from trainapp.files import RECIPE
from trainapp.inference import generate, predict
from trainapp.memory import host
from trainapp.oom import recovery
from trainapp.oom.building import explain_out_of_memory
from trainapp.oom.error_kinds import recoverable_kind
from trainapp.oom.failure import Failure
from trainapp.oom.report import describe, step_of_error
from trainapp.parallel.ranks import Ranks, SingleRank
from trainapp.run import recipe, recipe_text, resume
from trainapp.run.prepare import SessionStart, prepare
from trainapp.run.recover import recover
from trainapp.run.result import (
    Result,
    kind_of,
    print_command,
    report,
    result_of,
    write_building_failure,
    write_failure,
)
from trainapp.signals import AtWork, Interrupted, StopRequest, deadline_of
from trainapp.sizes.failures import ErrorKind
from trainapp.training import callback_calls, loop, reporting, stopping
from trainapp.training.dependence import warn_of_trials
from trainapp.training.evaluation.evaluate import evaluate
from trainapp.training.session import Session

log = logging.getLogger(__name__)


def run(config: Config, ranks: Ranks | None = None) -> Result:
    """Perform one run. Raises UserError, and `signals.Interrupted` after a signal."""
    outcome: SessionStart | Result = SessionStart(config)
    _freeze_imported_modules()
    ranks = ranks or SingleRank()
    stop = StopRequest(deadline_of("train.max_time", config.train.max_time, config.started))
    with stop:
        while isinstance(outcome, SessionStart):  # the first, and one after each error that no rollback can undo
            outcome = _run_session(outcome, stop, ranks)
    if stop.agreed:
        stop.leave(stop.agreed)
    return outcome


@functools.cache  # once per process: to ask the collector whether it has frozen any counts them all, in 0.04 s
def _freeze_imported_modules() -> None:
    """Leave imported modules out of garbage collections: scanning them cost 0.14 s per recovery."""
    gc.freeze()


def _run_session(start: SessionStart, stop: StopRequest, ranks: Ranks) -> SessionStart | Result:
    """Run to the end, or to an error after which a new session must begin: return what that one starts from."""
    session = _build(start, stop, ranks)
    if isinstance(session, SessionStart):
        return session
    stop.at_work = functools.partial(stopping.at_work, session)
    with contextlib.closing(session), _memory_guard(session), _failures_recorded(session):
        if start.is_first or start.climb is not None:
            facts = recipe.recipe_of(session)
            _write_recipe(session, facts)
        if start.is_first:
            for line in recipe_text.printed_lines(facts):
                log.info("%s", line)
            warn_of_trials(session)
            reporting.warn_of_unknown_epochs(session)
        next_start = _run_with_retries(session)
    if next_start is not None:
        return next_start

    result = result_of(session)
    if ranks.is_rank_zero:
        report(session, result)
    return result


def _build(start: SessionStart, stop: StopRequest, ranks: Ranks) -> Session | SessionStart:
    """Return the session that `prepare` builds. If its memory runs out, say so in result.json, too.

    Return the start of another session if this one cannot be built with a technique that was turned on.
    """
    config = start.config
    is_saved = config.continues and resume.names_a_checkpoint(config)
    stop.at_work = functools.partial(AtWork, is_saved=is_saved)  # referred to the session before, if any
    if start.memory is not None:
        start.memory.release()
    try:
        with explain_out_of_memory(config, ranks):
            return prepare(start, stop, ranks)
    except Exception as error:
        refusal = summary_of(error)
        is_mistake = isinstance(error, UserError) and not isinstance(error, OutOfMemory)
        if start.climb is None or not is_mistake:
            _record_building_failure(config, error, ranks)
            raise
    return _without_refused(start, refusal, ranks)  # after the error, whose traceback keeps what was built


def _without_refused(start: SessionStart, refusal: str, ranks: Ranks) -> SessionStart:
    """Return the start of a session with another technique than the one with which none could be built.

    Raises OutOfMemory, with the message of the error that no size avoided, if there is none, and on several ranks.
    """
    refused = start.climb
    assert refused is not None, "see `_build`"
    climb = refused.after_refusal()
    if climb is None or ranks.world_size > 1:  # not all ranks need have been refused
        end = OutOfMemory(refused.message_after_refusal(refusal))
        _record_building_failure(start.config, end, ranks)
        raise end
    log.warning("%s cannot be used (%s): continuing with %s", refused.technique, refusal, climb.text)
    return dataclasses.replace(start, climb=climb, turned_on=climb.turned_on)


def _record_building_failure(config: Config, error: Exception, ranks: Ranks) -> None:
    """Write result.json if memory ran out. A mistake is in the exit code, and leaves no trace of the run."""
    if kind_of(error) == OUT_OF_MEMORY and config.activity.trains and ranks.is_rank_zero:
        write_building_failure(config, error)


def _memory_guard(session: Session) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager that limits the process's memory: on the CPU, the host's memory is the device's."""
    if session.state.device.type == "cpu":
        return host.guarded(session.config.memory, session.memory.total)
    return contextlib.nullcontext()


@contextlib.contextmanager
def _failures_recorded(session: Session) -> Iterator[None]:
    """Write result.json for an error that ends the run; print the command that continues after a signal."""
    try:
        yield
    except Interrupted:  # at once, since nothing is lost
        print_command(session)
        raise
    except Exception as error:
        add_note(error, f"at step {step_of_error(session)}")
        if session.config.activity.trains and session.ranks.is_rank_zero:
            write_failure(session, error)
        raise


def _write_recipe(session: Session, facts: recipe.Recipe) -> None:
    """Write how the run trains to recipe.json."""
    if session.config.activity.trains and session.ranks.is_rank_zero:
        try:
            recipe.write(session.tracker.run_dir, facts)
        except OSError as error:  # the run is more important than its record
            session.tracker.warn_unwritable(session.tracker.run_dir / RECIPE, error)


def _run_with_retries(session: Session) -> SessionStart | None:
    """Run to the end, recovering from errors in place. Return the start of a new session if that cannot be done."""
    while True:
        failure = run_until_oom(session)
        if failure is None:
            return None
        next_start = recover(session, failure)
        if next_start is not None:
            return next_start


def run_until_oom(session: Session) -> Failure | None:
    """Run the inner loop. Return None, or a description of an error: recover from it after its tensors are released."""
    try:
        work(session)
        return None
    except Exception as error:
        kind = recoverable_kind(session, error)
        if kind is None:
            raise
        if kind is ErrorKind.OUT_OF_MEMORY:
            recovery.wait_for_device(session)  # while the traceback keeps the failed tensors alive
        return describe(session, error, kind)  # plain values, which do not keep those tensors alive


def work(session: Session) -> None:
    """Train, evaluate, predict or generate, according to `mode`."""
    config = session.config
    if config.mode == "eval":
        evaluate(session)
        callback_calls.end(session)
    elif config.mode == "predict":
        predict.predict(session)
    elif config.mode == "generate":
        generate.generate(session)
    elif config.activity.makes_steps:
        loop.train(session)
        if session.stop.agreed and stopping.at_work(session).is_saved:
            session.stop.has_saved()
        callback_calls.end(session)
    else:
        raise ValueError(f"mode={config.mode} has no session")  # a mistake of this program: see `launch.launch`
