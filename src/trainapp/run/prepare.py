"""From settings to a session that is ready for its next step; also what a session starts from."""

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainapp.assembly import build
from trainapp.config.claimed_settings import log_claims, with_claimed_settings
from trainapp.config.schema import Config
from trainapp.memory.device import DeviceMemory
from trainapp.parallel.ranks import Ranks, answered_by_rank_zero
from trainapp.run import directory, resume
from trainapp.run.first_sizes import changes_of_memory, initial_sizes
from trainapp.run.result import forget_stop
from trainapp.run.turned_on import begin_techniques
from trainapp.signals import AtWork, StopRequest
from trainapp.sizes.record import take_restart
from trainapp.techniques.ladder import Climb, TurnedOn
from trainapp.training.session import Session
from trainapp.trials.metrics_trial import try_metrics


@dataclass(frozen=True)
class SessionStart:
    """What a session starts from.

    The first session of a process has a configuration and a time. A later one replaces a session that an error has left
    in a state that no rollback restores, and takes over the rest from it.
    """

    config: Config  # names the checkpoint to start from
    began: float = field(default_factory=time.monotonic)  # when this process began the run
    sizes: dict[str, Any] | None = None  # micro-batch sizes and the number of recoveries; None: chosen anew
    memory: DeviceMemory | None = None  # limit and counters
    written: Sequence[str] = ()  # parameters that forwards write in place: see `Snapshot`
    task_states: dict[str, Any] = field(default_factory=dict)  # when the run began, by the task's name
    turned_on: TurnedOn | None = None  # techniques; None: those of a restart or of the checkpoint
    climb: Climb | None = None  # if one of them is new

    @property
    def is_first(self) -> bool:
        """Whether no other session of this process came before."""
        return self.memory is None


def prepare(start: SessionStart, stop: StopRequest, ranks: Ranks) -> Session:
    """Return a session ready for its next step: built, restored from a checkpoint, sizes chosen, files open."""
    # The checkpoint, and the settings that it decides.
    config = start.config
    restarts = ranks.all_gather_object((directory.has_restarted(), directory.may_have_saved()))
    has_restarted, may_have_saved = map(any, zip(*restarts, strict=True))  # torchrun counts each node's own failures
    checkpoint = answered_by_rank_zero(ranks, lambda: resume.origin(config, may_have_saved))
    if checkpoint is not None:
        config = resume.as_saved(config, checkpoint)
    stop.at_work = functools.partial(AtWork, is_saved=checkpoint is not None and config.continues)
    config = with_claimed_settings(config.with_inference_batch_size())
    if start.is_first:
        log_claims(config)
    trains = config.activity.trains

    # What workers that ran out of memory left, and the techniques that are turned on.
    restart: dict[str, Any] = {}
    if trains and start.is_first:
        restart = take_restart(Path(config.run_dir), has_restarted, ranks)
    techniques = begin_techniques(start, config, restart, checkpoint, ranks)

    # The live objects, in the checkpoint's state.
    session = build.build(techniques.config, stop, ranks, start.memory, checkpoint)
    session.snapshot.add_written(start.written)
    saved = None
    if checkpoint is not None:
        saved = resume.restore(session, checkpoint)
    if trains:
        session.state.sample_rows.begin(ranks)

    # The micro-batch sizes.
    sizes = start.sizes if start.sizes is not None else restart
    changes = []
    if checkpoint is not None and trains:
        changes = changes_of_memory(session, checkpoint)
    session.sizes = initial_sizes(session, sizes, saved, changes)

    # The techniques that are turned on, from the coming attempt on.
    progress = session.state.progress
    session.turned_on = techniques.turned_on.recorded(progress.step + progress.skipped + 1)
    session.recovery.chosen_config = techniques.chosen_config
    session.recovery.climb = techniques.climb

    # What is known to depend on the micro-batch. The rest shows in training.
    session.topics_of_trials = frozenset(session.engine.draw_record.depends)

    # The clock. A later session's has the seconds of earlier processes already.
    session.meter.began = start.began
    if start.is_first and saved is not None and trains:
        session.meter.began -= saved.get("seconds", 0.0)

    # The tasks, and the files.
    _begin_tasks(session, start, begins_again=checkpoint is None)
    try_metrics(session)
    session.engine.drop_gradients()  # of a task that calls backward() in a trial
    build.start_tracking(session)
    if trains and ranks.is_rank_zero:
        forget_stop(Path(config.run_dir))
    return session


def _begin_tasks(session: Session, start: SessionStart, begins_again: bool) -> None:
    """Keep the states with which the tasks begin the run; give them these states where a later session begins again."""
    if start.is_first:
        session.recovery.task_states = _copied_task_states(session)
        return
    session.recovery.task_states = start.task_states
    if begins_again:
        _restore_tasks(session)


def _copied_task_states(session: Session) -> dict[str, Any]:
    """Return copies of the tasks' states, without modules' tensors, which building initialises again.

    A task may be an object of a user's module, which outlives the session.
    """
    states = {}
    for name, owner in session.state.stateful.owners.items():
        root = name.partition(".")[0]
        if root.endswith("task") and not owner.is_restored_elsewhere:
            states[name] = owner.copy()
    return states


def _restore_tasks(session: Session) -> None:
    """Give the tasks the states with which the run began, since it begins again."""
    owners = session.state.stateful.owners
    for name, state in session.recovery.task_states.items():
        owners[name].restore(state)
