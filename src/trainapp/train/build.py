"""Turns a checked configuration into a `Run`: the assembled model plus data, memory and files."""

import functools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainapp.accelerator import HERE, Accelerator
from trainapp.checkpoint import model_state, optimizer_state
from trainapp.checkpoint.checkpointer import Checkpointer, NullCheckpointer
from trainapp.checkpoint.directory import CheckpointDirectory
from trainapp.checkpoint.stateful import Owner, Stateful
from trainapp.checkpoint.train_state import TrainState
from trainapp.config.schema import Config
from trainapp.data.loader import worker_count
from trainapp.data.sampler import EvalBatches, TrainBatches
from trainapp.errors import UserError
from trainapp.memory import backends
from trainapp.memory.device import DeviceMemory, static_bytes
from trainapp.memory.levers import catalogue
from trainapp.memory.levers.lever import Situation
from trainapp.models.weights import load_initial_weights
from trainapp.optim import precision, schedules
from trainapp.optim.nonfinite import NonFiniteCheck
from trainapp.parallel.ranks import Ranks
from trainapp.rng import seed_everything
from trainapp.signals import StopRequest
from trainapp.tracking.meter import Meter
from trainapp.tracking.tracker import SilentTracker, Tracker
from trainapp.train import exactness, losses
from trainapp.train.assemble import assemble
from trainapp.train.autotuner import Autotuner
from trainapp.train.bilinear import warn_of_bilinear
from trainapp.train.components import Components, choose_device, load_components, set_global_switches
from trainapp.train.restore_point import RestorePoint
from trainapp.train.room import room_of
from trainapp.train.run import Cadences, Objective, Run, run_length
from trainapp.train.sizes import initial_sizes
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
    eval_batches: EvalBatches | None
    accelerator: Accelerator = HERE


def build(config: Config, stop: StopRequest, ranks: Ranks, memory: DeviceMemory | None = None) -> Run:
    """A run ready for its first step that writes nothing yet: see `start_tracking`.

    memory: the previous run's in the same process, with its limit and counters; None builds a new one.
    Raises UserError for parts that do not fit together.
    """
    return run_of(config, load_parts(config, ranks, memory=memory), stop, ranks)


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
    memory = memory or backends.build(config.memory, device)  # before anything is allocated on the device
    memory.keep_events = config.memory.timeline
    seed_everything(config.train.seed)
    numerics = precision.build(config.precision, device)
    arguments = _batch_arguments(config, components, device, ranks)
    batches = _train_batches(config, components, arguments)
    evaluated = components.eval_data
    eval_batches = None if evaluated is None else EvalBatches(evaluated, **arguments)
    return Parts(components, device, memory, numerics, batches, eval_batches)


def run_of(
    config: Config,
    parts: Parts,
    stop: StopRequest,
    ranks: Ranks,
    initial_device: str | None = None,
) -> Run:
    """The run of these parts. initial_device: see `assemble`."""
    components, device, memory, numerics = parts.components, parts.device, parts.memory, parts.numerics
    batches, eval_batches = parts.batches, parts.eval_batches
    assembled = assemble(
        config, components, ranks, device, numerics, initial_device, batches.example, parts.accelerator
    )
    state, strategy = assembled.state, assembled.strategy
    strategy.note_buffer = memory.note_buffer
    state.stateful = owners_of_state(components, state.model, device)
    if config.model.init_from and config.adapter.kind == "none":  # else it was loaded into the base
        load_initial_weights(state.model, Path(config.model.init_from), config.model.init_strict)
        state.average.start_at_weights()
    warn_of_bilinear(state)
    if device.type == "cuda":
        strategy.warm_up()
    memory.enforce()  # again: the libraries have now allocated their own
    require_room(memory, state, Situation(config, state.model, losses.is_built_in(components.task)))
    if eval_batches is not None:
        eval_batches.equal = strategy.forward_is_collective
    state.data_samples = batches.samples
    checkpointer = _checkpointer(config, state, ranks)
    length = run_length(config, batches, state.progress)
    meter = Meter(state, memory, strategy.communication_buffers)
    assembled.budget.room = functools.partial(room_of, config, memory, meter, ranks)
    return Run(
        config=config,
        state=state,
        strategy=strategy,
        ranks=ranks,
        task=assembled.task,
        batches=batches,
        eval_batches=eval_batches,
        length=length,
        schedule=schedules.build(config.schedule, length),
        sizes=initial_sizes(config, ranks.world, state.global_size, eval_samples(eval_batches)),
        memory=memory,
        meter=meter,
        activation_budget=assembled.budget,
        offload=assembled.offload,
        tracker=SilentTracker(Path(config.run_dir)),
        checkpointer=checkpointer,
        nonfinite=NonFiniteCheck(
            config.train.nonfinite, device, numerics.scaler.is_enabled(), checkpointer.newest_name
        ),
        restore_point=RestorePoint(state.model, device, state.stateful),
        stop=stop,
        cadences=Cadences.of(config, length),
        objective=_objective(config, components.train_data),
        rehearsals=exactness.STEPS if config.train.check_exactness else 0,
        autotuner=Autotuner(device, config.train.deterministic),
    )


def owners_of_state(components: Components, model: torch.nn.Module, device: torch.device) -> Stateful:
    """What owns state beside the model's tensors. Resets the task to the state with which this process first used
    it, and moves the modules among the owners to the device.
    """
    task, data = components.task, components.train_data
    stateful = Stateful(model=model, task=task, data=data, eval_data=components.eval_data)
    stateful.return_to_start(task)
    for module in stateful.modules.values():
        module.to(device)
    return stateful


def start_tracking(run: Run) -> None:
    """Open the run's files, at the step where it begins or resumes."""
    if run.ranks.is_rank_zero:
        is_training = run.config.mode == "train"
        step = run.state.progress.step
        run.tracker = Tracker(Path(run.config.run_dir), step, run.length.total_steps, run.config.to_dict(), is_training)


def eval_samples(batches: EvalBatches | None) -> int:
    """Samples of the evaluation set over all ranks, at least 1."""
    return batches.samples if batches is not None else 1


def smallest_micro_batch(model: torch.nn.Module) -> int:
    """The model's `smallest_micro_batch`, 1 by default: some models cannot train on single samples."""
    return getattr(model, "smallest_micro_batch", 1)


def require_room(memory: DeviceMemory, state: TrainState, situation: Situation) -> None:
    """Raises UserError when the limit leaves no memory for any batch, however small. It names the levers that help."""
    sizes = static_bytes(state.model, state.optimizer, state.average.averages, state.keeps_gradients)
    if memory.limit is not None and sum(sizes.values()) >= memory.limit:
        parts = ", ".join(f"{kind.label} {bytes_text(size)}" for kind, size in sizes.items() if size)
        levers = [
            f"  {lever.setting}: saves {lever.saves if saved is None else bytes_text(saved)}; cost: {lever.costs}"
            for saved, lever in catalogue.of_state(situation, sizes)
        ]
        raise UserError(
            f"memory.limit={bytes_text(memory.limit)}: {parts} need {bytes_text(sum(sizes.values()))} before any "
            "batch; raise the limit, use a smaller model, or one of these:\n" + "\n".join(levers).replace("`", "")
        )


def _batch_arguments(config: Config, components: Components, device: torch.device, ranks: Ranks) -> dict[str, Any]:
    """What training and evaluation batches have in common."""
    local_ranks = ranks.world // config.parallel.nodes
    owners = Stateful(data=components.train_data, eval_data=components.eval_data).owners
    return {
        "seed": config.train.seed,
        "device": device,
        "workers": _workers(config, components, local_ranks, owners),
        "ahead": not owners,
        "rank": ranks.rank,
        "world": ranks.world,
        "split": getattr(components.task, "split", None),
    }


def _train_batches(config: Config, components: Components, arguments: dict[str, Any]) -> TrainBatches:
    size = config.batch.global_size
    batches = TrainBatches(components.train_data, global_size=size, drop_last=config.loader.drop_last, **arguments)
    if batches.epoch_samples == 0:
        raise UserError(
            f"data.drop_last=true with batch.global_size={size}: the data set has only {batches.samples} samples, so "
            "no batch is left; use data.drop_last=false"
        )
    return batches


def _workers(config: Config, components: Components, local_ranks: int, owners: dict[str, Owner]) -> int:
    """Loader processes; none for data with a state, which each of them would change by itself, ahead of the steps."""
    setting = config.loader.num_workers
    count = worker_count(setting, components.train_data, local_ranks)
    if not (count and owners):
        return count
    names = ", ".join(owners)
    if setting == "auto":
        log.info("data.num_workers=auto: 0, since the data has a state (%s) that follows the steps", names)
        return 0
    if any(owner.kind == "data" for owner in owners.values()):
        raise UserError(
            f"data.num_workers={setting}: the data has a state ({names}) that worker processes would each change by "
            "themselves, ahead of the steps; use data.num_workers=0, or make a sample a function of its index"
        )
    log.warning(
        "data.num_workers=%s: the data owns generators (%s), from which workers draw ahead of the steps: a retried or "
        "resumed step may see other numbers. Draw from the global generators, which are seeded per sample, or use "
        "data.num_workers=0",
        setting,
        names,
    )
    return count


def _checkpointer(config: Config, state: TrainState, ranks: Ranks) -> Checkpointer | NullCheckpointer:
    settings = config.checkpointing
    if not settings.save:
        return NullCheckpointer()
    if config.mode == "train":
        model_state.require_loadable(state.model)
        optimizer_state.require_loadable(state.optimizer)
    state.stateful.state_dict()  # raises UserError now rather than at the first save
    directory = CheckpointDirectory(Path(config.run_dir), settings.keep_last, ranks)
    return Checkpointer(state, directory, ranks, settings.asynchronous)


def _objective(config: Config, data: Any) -> Objective:
    if config.objective != "auto":
        direction, metric = config.objective.split()
        return Objective(direction, metric)
    classifies = config.task == "classification" or (config.task == "auto" and data.task == "classification")
    return Objective("max", "accuracy") if classifies else Objective("min", "loss")
