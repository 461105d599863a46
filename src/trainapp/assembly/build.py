"""Turns a checked configuration into a `Session`: the assembled model plus data, memory and files."""

import logging
from pathlib import Path

from trainapp.assembly import hooks
from trainapp.assembly.engine import assemble
from trainapp.assembly.resources import Resources, open_resources
from trainapp.checkpoint.checkpointer import Checkpointer
from trainapp.checkpoint.directory import CheckpointDirectory
from trainapp.checkpoint.optimizer_state import require_loadable
from trainapp.checkpoint.state_dicts import stateful_values
from trainapp.checkpoint.train_state import TrainState, schedule_values
from trainapp.config.schema import Config
from trainapp.hooks.callbacks import Callbacks, labels_of
from trainapp.hooks.metrics import StatefulMetrics
from trainapp.losses import losses
from trainapp.memory.device import DeviceMemory
from trainapp.parallel.ranks import Ranks
from trainapp.signals import StopRequest
from trainapp.tracking.loggers import Start
from trainapp.tracking.meter import Meter
from trainapp.tracking.tracker import SilentTracker, Tracker
from trainapp.tracking.utilisation import Utilisation, peak_flops
from trainapp.training import exactness
from trainapp.training.engine import Engine
from trainapp.training.limits import Limits
from trainapp.training.phase import Phase
from trainapp.training.session import Objective, Session
from trainapp.trials import later_steps

log = logging.getLogger(__name__)


def build(
    config: Config,
    stop: StopRequest,
    ranks: Ranks,
    memory: DeviceMemory | None = None,
    checkpoint: Path | None = None,
) -> Session:
    """Return a session without micro-batch sizes that writes nothing yet: see `run.prepare`. Raises UserError for
    parts that do not fit together.

    Args:
        config: the run's.
        stop: the request to stop.
        ranks: the processes of the run.
        memory: the previous session's memory in this process, with its limit and counters; None builds a new one.
        checkpoint: the one that the caller restores, if any.
    """
    resources = open_resources(config, ranks, memory=memory, checkpoint=checkpoint)
    try:
        return session_of(config, resources, stop, ranks)
    except BaseException:
        resources.close()  # reader processes may be running for a stream's first samples
        raise


def session_of(config: Config, resources: Resources, stop: StopRequest, ranks: Ranks) -> Session:
    """Return the session that works with these resources."""
    targets = resources.targets
    memory = resources.memory
    batches = resources.batches
    set_names = list(targets.eval_data)
    callbacks = hooks.callbacks_of(config, targets.hooks, targets.task, set_names)
    assembly = assemble(config, resources, ranks, callbacks)
    engine = assembly.engine
    state = engine.state

    # The average begins at the weights that training starts from. A resume restores both later.
    if not resources.resumes:
        state.average.start_at_weights()

    # Let libraries allocate their own memory now, and apply the limit to what they have left.
    if resources.device.type == "cuda":
        engine.strategy.warm_up()
    memory.enforce()

    # What checkpoints tell about the data.
    state.data_samples = batches.samples
    state.data_order = batches.source.order_name
    state.class_names = [str(name) for name in labels_of(targets.train_data)]
    state.vocabulary = str(getattr(targets.train_data, "vocabulary", ""))

    checkpointer = _checkpointer(config, state, ranks)
    engine.nonfinite.last_checkpoint = checkpointer.newest_name
    metrics = hooks.metrics_of(targets.hooks, engine)
    session = Session(
        config=config,
        engine=engine,
        ranks=ranks,
        batches=batches,
        eval_sets=resources.eval_sets,
        limits=Limits.of(config, batches, state.progress),
        memory=memory,
        meter=_meter(config, resources, engine, metrics),
        tracker=SilentTracker(Path(config.run_dir), targets.hooks["tracker"]),
        checkpointer=checkpointer,
        stop=stop,
        objective=Objective.of(config, targets.task, set_names),
        metrics=metrics,
        callbacks=Callbacks(callbacks),
        filled=assembly.filled,
        checks=assembly.checks,
        initial_weights=assembly.initial_weights,
        later_check=later_steps.with_comparison,
    )
    if config.train.check_exactness:
        session.exactness_checks_left = (state.first_steps + exactness.STEPS - 1) * len(state.updates)
    session.schedule_rates()
    if config.checkpointing.save and config.activity.trains:
        for update in state.updates:
            schedule_values(update)  # raises UserError now rather than at the first save
    return session


def _meter(config: Config, resources: Resources, engine: Engine, metrics: StatefulMetrics) -> Meter:
    last_task = resources.targets.training_tasks[-1]  # whose count is the finished step's
    return Meter(
        engine.state,
        resources.memory,
        engine.gradients,
        engine.strategy.communication_buffers,
        metrics.tensors,
        counts_tokens=losses.attribute(last_task, "counts") == "tokens",
        utilisation=_utilisation(config, engine),
    )


def _utilisation(config: Config, engine: Engine) -> Utilisation | None:
    """Return the counter of the model's FLOPs, if the device's peak is known and no compiler hides operations."""
    peak = peak_flops(engine.state.device, config.precision.mode, config.train.peak_flops)
    if peak is None or config.train.compile:
        return None
    total_peak = peak * engine.ranks.world_size
    recomputes = config.activation_checkpointing.mode != "none"
    return Utilisation(total_peak, lambda: engine.phase is Phase.BACKWARD, recomputes)


def start_tracking(session: Session) -> None:
    """Open the run's files, at the step where it starts or resumes. Training time counts from here."""
    if session.ranks.is_rank_zero:
        config = session.config
        step = session.state.progress.step
        total_steps = session.limits.length.total_steps
        start = Start(Path(config.run_dir), step, config.to_dict(), continues=config.activity.trains)
        loggers = session.tracker.loggers if config.activity.computes_loss else {}
        session.tracker = Tracker(start, total_steps, loggers)
    session.meter.start()


def _checkpointer(config: Config, state: TrainState, ranks: Ranks) -> Checkpointer:
    settings = config.checkpointing
    directory = None
    if settings.save:
        directory = CheckpointDirectory(Path(config.run_dir), settings.keep_last, ranks)
        if config.activity.trains:
            for optimizer in state.optimizers:
                require_loadable(optimizer)
        stateful_values(state.stateful)  # raises UserError now rather than at the first save
    return Checkpointer(state, directory, ranks, settings.asynchronous)
