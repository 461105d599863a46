"""Turns a checked configuration into a `loop.Run`: device, data, model, optimizer, schedule, sizes, cadences."""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainapp.checkpoint.checkpointer import Checkpointer, NullCheckpointer
from trainapp.checkpoint.directory import CheckpointDirectory
from trainapp.checkpoint.train_state import TrainState
from trainapp.config.durations import RunLength, to_steps
from trainapp.config.schema import Config
from trainapp.data.loader import worker_count
from trainapp.data.micro_batch_sizes import MicroBatchSizes
from trainapp.data.sampler import EvalBatches, TrainBatches
from trainapp.errors import UserError
from trainapp.memory import backends, device
from trainapp.optim import precision, schedules
from trainapp.optim.ema import WeightAverage
from trainapp.optim.nonfinite import NonFiniteCheck
from trainapp.optim.optimizers import build_optimizer
from trainapp.parallel.ranks import SingleRank
from trainapp.rng import seed_everything
from trainapp.signals import StopRequest
from trainapp.tracking.meter import Meter
from trainapp.tracking.tracker import SilentTracker, Tracker
from trainapp.train import assemble, components, losses
from trainapp.train.run import Run
from trainapp.train.transaction import RestorePoint
from trainapp.units import bytes_text

log = logging.getLogger(__name__)


def build(config: Config, stop: StopRequest, ranks: SingleRank) -> Run:
    """Everything but the tracker, which needs to know where the run begins. Raises UserError for what does not fit."""
    kinds = components.locate_all(config)
    train_data, eval_data, spec = components.datasets(config, kinds["data"])
    device = ranks.device if ranks.world > 1 else components.choose_device(config.train.device)
    components.set_global_switches(config, device)
    seed_everything(config.train.seed)
    numerics = precision.build(config.precision, device)
    strategy = assemble.model_over_ranks(config, kinds["model"], spec, ranks, device, numerics.compute_dtype)
    device_memory = backends.build(config.memory, device)
    state = _state(config, strategy.model, numerics, device_memory, ranks.world, len(eval_data) if eval_data else 1)
    batches, eval_batches = _batches(config, train_data, eval_data, device, ranks, strategy.forward_is_collective)
    require_room(device_memory, state)
    device_memory.keep_events = config.memory.timeline
    checkpointer = _checkpointer(config, state, ranks)
    length = _run_length(config, batches, batches.steps_per_epoch)
    return Run(
        state=state,
        strategy=strategy,
        ranks=ranks,
        task=kinds["task"] or getattr(losses, train_data.task),
        batches=batches,
        eval_batches=eval_batches,
        schedule=schedules.build(config.schedule, length),
        memory=device_memory,
        meter=Meter(state, device_memory),
        tracker=None,
        checkpointer=checkpointer,
        guard=NonFiniteCheck(config.train.nonfinite, device, numerics.scaler.is_enabled(), checkpointer.newest_name),
        restore_point=RestorePoint(strategy.model, device),
        stop=stop,
        config=config.to_dict(),
        objective=_objective(config, train_data),
        max_steps=config.train.max_steps,
        max_epochs=config.train.max_epochs,
        log_every=_cadence(config, "log", length),
        eval_every=_cadence(config, "eval", length),
        save_every=_cadence(config, "save", length),
        grad_clip=config.train.grad_clip,
        timeline=config.memory.timeline,
        size_plan=dict(config.batch.micro_schedule or {}),
        accumulation=None if config.accumulation.steps == "auto" else config.accumulation.steps,
    )


def _state(
    config: Config,
    model: nn.Module,
    numerics: precision.Precision,
    device_memory: device.DeviceMemory,
    world: int,
    evaluated: int,
) -> TrainState:
    device = device_memory.device
    optimizer = build_optimizer(config.optimizer, model, device, config.user_packages)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return TrainState(
        model=model,
        optimizer=optimizer,
        precision=numerics,
        average=WeightAverage(model, config.train.ema),
        micro=_sizes(config, _micro_size(config, world), getattr(model, "smallest_micro_batch", 1)),
        eval_micro=_sizes(config, _eval_size(config, evaluated, world)),
        device=device,
        seed=config.train.seed,
        global_size=config.batch.global_size,
        budget=device_memory.budget,
    )


def _checkpointer(config: Config, state: TrainState, ranks: SingleRank) -> Checkpointer | NullCheckpointer:
    if not config.checkpointing.save:
        return NullCheckpointer()
    directory = CheckpointDirectory(Path(config.run_dir), config.checkpointing.keep_last, ranks)
    return Checkpointer(state, directory, ranks, config.checkpointing.asynchronous)


def _batches(
    config: Config, train_data: Any, eval_data: Any, device: torch.device, ranks: SingleRank, equal: bool
) -> tuple[TrainBatches, EvalBatches | None]:
    share: dict[str, Any] = {
        "seed": config.train.seed,
        "device": device,
        "workers": worker_count(config.loader.num_workers, train_data, ranks.world // config.parallel.nodes),
        "rank": ranks.rank,
        "world": ranks.world,
    }
    size = config.batch.global_size
    batches = TrainBatches(train_data, global_size=size, drop_last=config.loader.drop_last, **share)
    if batches.epoch_samples == 0:
        raise UserError(
            f"data.drop_last=true with batch.global_size={size}: the data set has only {batches.samples} samples, so "
            "no batch is left; use data.drop_last=false"
        )
    return batches, None if eval_data is None else EvalBatches(eval_data, equal=equal, **share)


def require_room(device_memory: device.DeviceMemory, state: TrainState) -> None:
    """Raises UserError when a limit leaves nothing for a batch at all: no micro-batch is small enough."""
    sizes = device.static_bytes(state.model, state.optimizer, state.average.averages)
    if device_memory.limit is not None and sum(sizes.values()) >= device_memory.limit:
        parts = ", ".join(f"{kind.replace('_', ' ')} {bytes_text(size)}" for kind, size in sizes.items() if size)
        raise UserError(
            f"memory.limit={bytes_text(device_memory.limit)}: {parts} need {bytes_text(sum(sizes.values()))} before "
            "any batch; raise the limit, or use a smaller model"
        )


def start_tracking(config: Config, run: Run) -> None:
    """Open the run's files, at the step where it begins or goes on."""
    length = _run_length(config, run.batches, run.batches.steps_per_epoch)
    kind = Tracker if run.ranks.is_rank_zero else SilentTracker
    continues = config.mode == "train"
    run.tracker = kind(Path(config.run_dir), run.state.progress.step, length.total_steps, run.config, continues)


def set_global_size(config: Config, run: Run, size: int) -> None:
    """The classic reaction to a lack of memory: a smaller batch, hence more steps and a longer schedule."""
    run.state.global_size = run.batches.global_size = size
    progress, batches = run.state.progress, run.batches
    total = config.train.max_steps
    if config.train.max_epochs is not None:
        left = (config.train.max_epochs - progress.epoch) * batches.epoch_samples - progress.consumed
        by_epochs = progress.step + -(-left // size)
        total = by_epochs if total is None else min(total, by_epochs)
    run.schedule = schedules.build(config.schedule, RunLength(batches.steps_per_epoch, size, total))


def plan_line(config: Config, run: Run) -> str:
    """What will be done, in one line."""
    state, batches = run.state, run.batches
    count = sum(p.numel() for p in state.model.parameters())
    size = micro = state.micro.size
    parts = batches.accumulation(size, run.accumulation)
    if run.accumulation:
        micro = -(-state.global_size // parts)
    name = config.model.target.rpartition(".")[2]
    return (
        f"{name} with {_short(count)} parameters on {state.device}, {state.precision.mode}; global batch "
        f"{state.global_size} = micro-batch {micro} x {parts} accumulated x {batches.world} "
        f"rank{'s' * (batches.world > 1)}; {batches.samples} samples, {batches.steps_per_epoch} steps an epoch"
    )


def _short(count: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.2f}{unit}"
    return str(count)


def _sizes(config: Config, start: int, smallest: int = 1) -> MicroBatchSizes:
    """Where the search begins. A schedule or a fixed number of micro-batches leaves no larger size to be tried."""
    searches = config.oom.grow and config.batch.micro_schedule is None and config.accumulation.steps == "auto"
    return MicroBatchSizes(
        start,
        config.oom.clean_steps,
        grow=searches and config.oom.keep_global_batch,
        smallest=smallest,
    )


def _micro_size(config: Config, world: int) -> int:
    batch, steps = config.batch, config.accumulation.steps
    share = -(-batch.global_size // world)
    if steps != "auto":
        return -(-share // steps)
    return share if batch.micro_size == "auto" else min(batch.micro_size, share)


def _eval_size(config: Config, samples: int, world: int) -> int:
    """Without gradients more fits: auto starts at twice this rank's part of the global batch."""
    size = config.batch.eval_micro_size
    return min(-(-2 * config.batch.global_size // world), samples) if size == "auto" else size


def _run_length(config: Config, batches: TrainBatches, steps_per_epoch: int) -> RunLength:
    by_epochs = None if config.train.max_epochs is None else config.train.max_epochs * steps_per_epoch
    ends = [steps for steps in (config.train.max_steps, by_epochs) if steps is not None]
    return RunLength(steps_per_epoch, batches.global_size, min(ends, default=1))  # eval and export take no step


def _cadence(config: Config, name: str, length: RunLength) -> int:
    return to_steps(getattr(config.every, name), length)


def _objective(config: Config, data: Any) -> tuple[str, str]:
    if config.objective != "auto":
        direction, metric = config.objective.split()
        return direction, metric
    classifies = config.task == "classification" or (config.task == "auto" and data.task == "classification")
    return ("max", "accuracy") if classifies else ("min", "loss")
