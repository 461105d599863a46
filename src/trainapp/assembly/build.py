"""Turns a checked configuration into a `Session`: the assembled model plus data, memory and files."""

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainapp.assembly import hook_parts
from trainapp.assembly.batches import data_batches, eval_roots
from trainapp.assembly.components import Components, choose_device, load_components, set_global_switches
from trainapp.assembly.model import Assembled, assemble
from trainapp.assembly.room import require_room
from trainapp.checkpoint.checkpointer import Checkpointer, NullCheckpointer
from trainapp.checkpoint.directory import CheckpointDirectory
from trainapp.checkpoint.state_dicts import require_loadable, stateful_values
from trainapp.checkpoint.train_state import TrainState
from trainapp.config.schema import WITHOUT_NUMBERS, Config
from trainapp.data.source import TrainBatches
from trainapp.data.stream_reader import is_stream
from trainapp.hooks.callbacks import labels_of
from trainapp.losses import losses
from trainapp.memory import device as device_memory
from trainapp.memory.device import DeviceMemory
from trainapp.models.adapters import base_of
from trainapp.models.weights import load_weights
from trainapp.optim import precision
from trainapp.optim.on_host import copies_of
from trainapp.optim.precision import NonFiniteCheck
from trainapp.parallel.ranks import Ranks
from trainapp.rng import seed_everything
from trainapp.signals import StopRequest
from trainapp.sizes.record import initial_sizes
from trainapp.snapshot import Snapshot
from trainapp.stateful import Stateful
from trainapp.techniques.catalogue import Situation
from trainapp.tracking.meter import Meter
from trainapp.tracking.tracker import SilentTracker, Tracker
from trainapp.training import exactness
from trainapp.training.autotuner import Autotuner
from trainapp.training.cached_gradients import CachedGradients
from trainapp.training.cadences import Cadences, run_length
from trainapp.training.engine import Engine
from trainapp.training.in_backward import InBackward
from trainapp.training.session import Attempt, EvalSets, Objective, Session
from trainapp.units import bytes_text

log = logging.getLogger(__name__)


@dataclass
class Parts:
    """What needs values or the device: data, memory, numerics. A trace replaces them before a run is assembled."""

    components: Components
    device: torch.device
    memory: DeviceMemory
    numerics: precision.Precision
    batches: TrainBatches
    eval_sets: EvalSets
    resumes: bool = False

    @property
    def first(self) -> Callable[[int], Any] | None:
        """As `Source.first`. None for the stream of a run that resumes: it is not read from its beginning, and the
        loss of its first samples was checked when the run began.
        """
        return None if self.resumes and is_stream(self.components.train_data) else self.batches.source.first


def build(
    config: Config, stop: StopRequest, ranks: Ranks, memory: DeviceMemory | None = None, resumes: bool = False
) -> Session:
    """A run ready for its first step that writes nothing yet: see `start_tracking`.

    memory: the previous run's in the same process, with its limit and counters; None builds a new one.
    resumes: whether the caller restores a checkpoint. Raises UserError for parts that do not fit together.
    """
    parts = load_parts(config, ranks, memory=memory)
    parts.resumes = resumes
    try:
        session = run_of(config, parts, stop, ranks)
    except BaseException:
        parts.batches.close()  # a stream's first samples may have been read by processes
        raise
    _warn_of_host_copies(session.state)
    return session


def load_parts(
    config: Config, ranks: Ranks, components: Components | None = None, memory: DeviceMemory | None = None
) -> Parts:
    """Opens the data, limits the memory and seeds the generators, from which `run_of` draws the parameters.

    components: as an earlier call has opened them. memory: see `build`. Raises UserError for mistakes in names and
    arguments.
    """
    seed_everything(config.train.seed)  # for what a data set or a task draws
    components = components or load_components(config)
    device = ranks.device if ranks.world > 1 else choose_device(config.train.device)
    set_global_switches(config, device)
    memory = memory or device_memory.build(config.memory, device)  # before anything is allocated on the device
    memory.keep_events, memory.compiles = config.memory.timeline, config.train.compile
    seed_everything(config.train.seed)
    numerics = precision.build(config.precision, device)
    return Parts(components, device, memory, numerics, *data_batches(config, components, device, ranks))


def run_of(config: Config, parts: Parts, stop: StopRequest, ranks: Ranks, initial_device: str | None = None) -> Session:
    """The run of these parts. initial_device: see `assemble`."""
    components, device, memory, numerics = parts.components, parts.device, parts.memory, parts.numerics
    batches, eval_sets = parts.batches, parts.eval_sets
    assembled = assemble(config, components, ranks, device, numerics, initial_device, batches.example, parts.first)
    state, strategy = assembled.state, assembled.strategy
    strategy.note_buffer = memory.note_buffer
    sets = list(components.eval_data)
    callbacks = hook_parts.callbacks_of(config, components.hooks, components.train_data, sets)
    state.stateful = owners_of_state(components, batches, eval_sets, state.model, device, callbacks)
    _begin_at_weights(config, state)
    if device.type == "cuda":
        strategy.warm_up()
    memory.enforce()  # again: the libraries have now allocated their own
    require_room(memory, state, Situation(config, state.model, components.knows_loss))
    for evaluated in eval_sets.values():
        evaluated.equal = strategy.forward_is_collective
    state.data_samples, state.data_order = batches.samples, batches.source.order_name
    state.class_names = [str(name) for name in labels_of(components.train_data)]
    state.vocabulary = str(getattr(components.train_data, "vocabulary", ""))
    checkpointer = _checkpointer(config, state, ranks)
    length = run_length(config, batches, state.progress)
    meter, whole = Meter(state, memory, strategy.communication_buffers), losses.needs_whole_batch(components.task)
    engine = _engine(config, components, assembled, checkpointer)
    session = Session(
        config=config,
        state=state,
        engine=engine,
        strategy=strategy,
        ranks=ranks,
        batches=batches,
        eval_sets=eval_sets,
        length=length,
        sizes=initial_sizes(config, ranks.world, state.global_size, eval_samples(eval_sets), whole=whole),
        memory=memory,
        meter=meter,
        tracker=SilentTracker(Path(config.run_dir)),
        checkpointer=checkpointer,
        snapshot=engine.snapshot,
        attempt=engine.attempt,
        stop=stop,
        cadences=Cadences.of(config, length),
        objective=Objective.of(config, components.train_data, sets),
        rehearsals=exactness.STEPS * len(state.updates) if config.train.check_exactness else 0,
        autotuner=Autotuner(device, config.train.deterministic),
    )
    session.schedule_rates()
    return hook_parts.attached(session, components.hooks, callbacks)


def _engine(
    config: Config, components: Components, assembled: Assembled, checkpointer: Checkpointer | NullCheckpointer
) -> Engine:
    state = assembled.state
    kind: type[Engine] = Engine
    embeds = any(map(losses.has_embeddings, components.training_tasks))
    if config.optimizer.in_backward:
        kind = CachedInBackward if embeds else InBackward
    elif embeds:
        kind = CachedGradients
    is_scaled = state.precision.scaler.is_enabled()
    engine = kind(
        state,
        assembled.strategy,
        assembled.task,
        assembled.tasks,
        NonFiniteCheck(config.train.nonfinite, state.device, is_scaled, checkpointer.newest_name),
        Snapshot.of(state.stateful, verified=2 * len(state.updates)),
        Attempt(),
        config.train.grad_clip,
    )
    if assembled.offload is not None:
        engine.compute = assembled.offload.around(engine.compute)  # type: ignore[method-assign]
    return engine


class CachedInBackward(InBackward, CachedGradients):
    """Both: the third pass updates."""


def _begin_at_weights(config: Config, state: TrainState) -> None:
    """Those of `model.init_from`, if any. A model with adapters has them already: they are of its base."""
    if config.model.init_from and base_of(state.model) is None:
        load_weights(state.model, config.model.init_from, config.model.init_strict)
        state.average.start_at_weights()


def _warn_of_host_copies(state: TrainState) -> None:
    copies = sum(t.nbytes for optimizer in state.optimizers for t in copies_of(optimizer))
    if copies and state.device.type == "cpu":
        log.warning(
            "optimizer.offload=true: saves nothing on the CPU, where the optimizer's state is in host memory anyway, "
            "and costs %s for copies of parameters and gradients; leave it out",
            bytes_text(copies),
        )


def owners_of_state(
    components: Components,
    batches: TrainBatches,
    eval_sets: EvalSets,
    model: torch.nn.Module,
    device: torch.device,
    callbacks: Mapping[str, Any],
) -> Stateful:
    """What owns state other than the model's tensors. Resets the task to the state with which this process first used
    it, and moves the modules among the owners to the device.
    """
    tasks = {"task": components.task} | {f"{name}'s task": task for name, task in components.updates.items()}
    data = {"data": batches.source.state_owner}
    data |= eval_roots({name: evaluated.state_owner for name, evaluated in eval_sets.items()})
    stateful = Stateful(model=model, **tasks, **data, callbacks=callbacks or None)
    for module in stateful.modules.values():
        module.to(device)
    return stateful


def start_tracking(session: Session) -> None:
    """Open the run's files, at the step where it begins or resumes. Training time counts from here."""
    if session.ranks.is_rank_zero:
        folder, settings, mode = Path(session.config.run_dir), session.config.to_dict(), session.config.mode
        loggers = {} if mode in WITHOUT_NUMBERS else session.loggers
        session.tracker = Tracker(
            folder,
            session.state.progress.step,
            session.length.total_steps,
            settings,
            continues=mode == "train",
            loggers=loggers,
            has_numbers=mode not in WITHOUT_NUMBERS,
        )
    session.meter.start()


def eval_samples(batches: EvalSets) -> int:
    """Samples of the largest evaluation set over all ranks, at least 1; very many where that is unknown."""
    return max((evaluated.samples or sys.maxsize for evaluated in batches.values()), default=1)


def smallest_micro_batch(model: torch.nn.Module) -> int:
    """The model's `smallest_micro_batch`, 1 by default: some models cannot train on single samples."""
    return getattr(model, "smallest_micro_batch", 1)


def _checkpointer(config: Config, state: TrainState, ranks: Ranks) -> Checkpointer | NullCheckpointer:
    settings = config.checkpointing
    if not settings.save:
        return NullCheckpointer()
    if config.mode == "train":
        for optimizer in state.optimizers:
            require_loadable(optimizer)
    stateful_values(state.stateful)  # raises UserError now rather than at the first save
    directory = CheckpointDirectory(Path(config.run_dir), settings.keep_last, ranks)
    return Checkpointer(state, directory, ranks, settings.asynchronous)
