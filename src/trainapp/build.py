"""Turns a checked configuration into a `loop.Job`: device, data, model, optimizer, schedule, sizes, cadences."""

import inspect
import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainapp import activation_checkpointing, memory, precision, targets, tasks
from trainapp.batching import EvalBatches, TrainBatches, worker_count
from trainapp.checkpoint import Checkpoints
from trainapp.config import Config
from trainapp.console import bytes_text
from trainapp.durations import RunLength, to_steps
from trainapp.ema import WeightAverage
from trainapp.errors import UserError
from trainapp.finite import FiniteGuard
from trainapp.job import Job
from trainapp.meter import Meter
from trainapp.models.weights import load_weights
from trainapp.optim import schedules
from trainapp.optim.optimizers import build_optimizer
from trainapp.parallel.ranks import Alone
from trainapp.parallel.strategies import Replicated, Single, shard
from trainapp.saving import Saver
from trainapp.search import Sizes
from trainapp.signals import StopRequest
from trainapp.state import RestorePoint, TrainState, seed_everything
from trainapp.tracking import SilentTracker, Tracker

log = logging.getLogger(__name__)


def build(config: Config, stop: StopRequest, ranks: Alone) -> Job:
    """Everything but the tracker, which needs to know where the run begins. Raises UserError for what does not fit."""
    kinds = _locate_all(config)
    train_data, eval_data, spec = _datasets(config, kinds["data"])
    device = ranks.device if ranks.world > 1 else choose_device(config.train.device)
    _global_switches(config, device)
    seed_everything(config.train.seed)
    numerics = precision.build(config.precision, device)
    model = _model(config, kinds["model"], spec, device)
    strategy = _spread(config, model, ranks, numerics.compute_dtype)
    device_memory = memory.build(config.memory, device)
    state = TrainState(
        model=model,
        optimizer=build_optimizer(config.optimizer, model, device, config.user_packages),
        precision=numerics,
        average=WeightAverage(model, config.train.ema),
        micro=_sizes(config, _micro_size(config, ranks.world), ranks, getattr(model, "smallest_micro_batch", 1)),
        eval_micro=_sizes(config, _eval_size(config, eval_data, ranks.world), ranks),
        device=device,
        seed=config.train.seed,
        global_size=config.batch.global_size,
    )
    for group in state.optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    workers = worker_count(config.loader.num_workers, train_data, ranks.world // config.parallel.nodes)
    batches = TrainBatches(
        train_data,
        global_size=config.batch.global_size,
        seed=config.train.seed,
        device=device,
        workers=workers,
        drop_last=config.loader.drop_last,
        rank=ranks.rank,
        world=ranks.world,
    )
    if batches.epoch_samples == 0:
        raise UserError(
            f"data.drop_last=true with batch.global_size={config.batch.global_size}: the data set has only "
            f"{batches.samples} samples, so no batch is left; use data.drop_last=false"
        )
    require_room(device_memory, state)
    device_memory.keep_events = config.memory.timeline
    checkpoints = Checkpoints(Path(config.run_dir), config.checkpointing.keep_last, config.checkpointing.save, ranks)
    length = _run_length(config, batches, batches.steps_per_epoch)
    return Job(
        state=state,
        strategy=strategy,
        ranks=ranks,
        arm=config.parallel.arm,
        task=kinds["task"] or getattr(tasks, train_data.task),
        batches=batches,
        eval_batches=None
        if eval_data is None
        else EvalBatches(
            eval_data,
            seed=config.train.seed,
            device=device,
            workers=workers,
            rank=ranks.rank,
            world=ranks.world,
            equal=strategy.equal_batches,
        ),
        schedule=schedules.build(config.schedule, length),
        memory=device_memory,
        meter=Meter(state, device_memory),
        tracker=None,
        checkpoints=checkpoints,
        saver=Saver(state, checkpoints, ranks, config.checkpointing.asynchronous),
        guard=FiniteGuard(config.train.nonfinite, device, numerics.scaler.is_enabled(), checkpoints.newest_name),
        restore_point=RestorePoint(model, device),
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
        size_plan=dict(config.oom.schedule or {}),
        accumulation=None if config.accumulation.steps == "auto" else config.accumulation.steps,
    )


def require_room(device_memory: memory.DeviceMemory, state: TrainState) -> None:
    """Raises UserError when a limit leaves nothing for a batch at all: no micro-batch is small enough."""
    sizes = memory.static_bytes(state.model, state.optimizer, state.average.averages)
    if device_memory.limit is not None and sum(sizes.values()) >= device_memory.limit:
        parts = ", ".join(f"{kind.replace('_', ' ')} {bytes_text(size)}" for kind, size in sizes.items() if size)
        raise UserError(
            f"memory.limit={bytes_text(device_memory.limit)}: {parts} need {bytes_text(sum(sizes.values()))} before "
            "any batch; raise the limit, or use a smaller model"
        )


def start_tracking(config: Config, job: Job) -> None:
    """Open the run's files, at the step where it begins or goes on."""
    length = _run_length(config, job.batches, job.batches.steps_per_epoch)
    kind = Tracker if job.ranks.leads else SilentTracker
    job.tracker = kind(Path(config.run_dir), job.state.progress.step, length.total_steps, job.config)


def set_global_size(config: Config, job: Job, size: int) -> None:
    """The classic reaction to a lack of memory: a smaller batch, hence more steps and a longer schedule."""
    job.state.global_size = job.batches.global_size = size
    progress, batches = job.state.progress, job.batches
    total = config.train.max_steps
    if config.train.max_epochs is not None:
        left = (config.train.max_epochs - progress.epoch) * batches.epoch_samples - progress.consumed
        by_epochs = progress.step + -(-left // size)
        total = by_epochs if total is None else min(total, by_epochs)
    job.schedule = schedules.build(config.schedule, RunLength(batches.steps_per_epoch, size, total))


def choose_device(setting: str) -> torch.device:
    """The device that was asked for; auto takes CUDA, then Apple's MPS, then the CPU. Raises UserError without it."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if setting == "auto":
        setting = next(name for name, there in available.items() if there)
    if not available[setting]:
        there = ", ".join(name for name, is_there in available.items() if is_there)
        raise UserError(f"train.device={setting}: this machine has no such device; available: auto, {there}")
    return torch.device("cuda", torch.cuda.current_device()) if setting == "cuda" else torch.device(setting)


def plan_line(config: Config, job: Job) -> str:
    """What will be done, in one line."""
    state, batches = job.state, job.batches
    count = sum(p.numel() for p in state.model.parameters())
    size = micro = state.micro.size
    parts = batches.accumulation(size, job.accumulation)
    if job.accumulation:
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


def _locate_all(config: Config) -> dict[str, Any]:
    """The classes and functions that the configuration names. Every mistake in names and arguments in one error."""
    errors: list[str] = []
    found: dict[str, Any] = {"task": None}
    named = {"data": config.data, "model": config.model}
    for group, node in named.items():
        try:
            found[group] = targets.locate(node.target, f"{group}._target_", config.user_packages)
            open_ended = {"split", "seed"} if group == "data" else set(_parameters(found[group]))
            errors += targets.check(found[group], node.arguments, group, dict.fromkeys(open_ended))
        except UserError as error:
            errors.append(str(error))
    try:
        targets.locate(config.optimizer.target, "optimizer._target_", config.user_packages)
        if config.task not in ("auto", "classification", "next_token"):
            found["task"] = targets.locate(config.task, "task", config.user_packages)
        elif config.task != "auto":
            found["task"] = getattr(tasks, config.task)
    except UserError as error:
        errors.append(str(error))
    if errors:
        raise UserError("\n".join(errors))
    return found


def _parameters(target: Any) -> list[str]:

    return list(inspect.signature(target).parameters)


def _datasets(config: Config, kind: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Training data, evaluation data (None when there is none), and what a model may need to know of them."""
    takes = _parameters(kind)
    if "split" not in takes:
        raise UserError(
            f"data._target_={config.data.target}: its constructor has no parameter `split`; the application asks for "
            'split="train" and split="val"'
        )
    provided = {"seed": config.train.seed}
    arguments = config.data.arguments
    train, val = (
        targets.construct(kind, arguments, "data", config.user_packages, {"split": split, **provided})
        for split in ("train", "val")
    )
    if config.task == "auto" and getattr(train, "task", None) not in ("classification", "next_token"):
        raise UserError(
            f"task=auto: {config.data.target} does not say what its task is; set task to classification, next_token or "
            "a function of yours"
        )
    if len(train) == 0:
        raise UserError(f"data={config.data.target}: the training split is empty")
    val = val if val is not None and len(val) else None
    if val is None and config.mode == "eval":
        raise UserError(f"mode=eval: data={config.data.target} has no validation split")
    return train, val, dict(getattr(train, "spec", {}))


def _model(config: Config, kind: Any, spec: dict[str, Any], device: torch.device) -> nn.Module:
    required = [
        name
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    lacking = [name for name in required if name not in config.model.arguments and name not in spec]
    if lacking:
        raise UserError(
            f"model={config.model.target} cannot read data={config.data.target}: it needs {', '.join(lacking)}, and "
            f"the data has {', '.join(spec) or 'no spec'}; choose a model for this kind of data"
        )
    model = targets.construct(kind, config.model.arguments, "model", config.user_packages, spec)
    if config.model.init_from:
        skipped = load_weights(model, Path(config.model.init_from), strict=config.model.init_strict)
        if skipped:
            log.warning("model.init_from: not loaded, left as initialised: %s", ", ".join(skipped))
    model.to(device)
    model.train()
    activation_checkpointing.apply(model, config.activation_checkpointing)
    if config.train.compile:
        model.compile()
    return model


def _spread(config: Config, model: nn.Module, ranks: Alone, compute: torch.dtype) -> Single:
    """Over the ranks, after activation checkpointing and compilation and before the optimizer."""
    if ranks.world == 1 and config.parallel.strategy != "fsdp":
        return Single(model, ranks)
    if config.parallel.strategy == "ddp":
        return Replicated(model, ranks, config.parallel.ddp)
    blocks = activation_checkpointing.blocks_of(model, "parallel=fsdp")
    # BatchNorm wants its parameters in fp32: such models are gathered so, and autocast casts where it computes.
    normalised = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    return shard(model, blocks, ranks, config.parallel.fsdp, torch.float32 if normalised else compute)


def _global_switches(config: Config, device: torch.device) -> None:
    torch.use_deterministic_algorithms(config.train.deterministic)
    torch.autograd.set_detect_anomaly(config.train.detect_anomaly)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = not config.train.deterministic
        if config.train.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _sizes(config: Config, start: int, ranks: Alone, smallest: int = 1) -> Sizes:
    """Where the search begins. A schedule or a fixed number of micro-batches leaves no larger size to be tried."""
    searches = config.oom.grow and config.oom.schedule is None and config.accumulation.steps == "auto"
    return Sizes(
        start,
        config.oom.clean_steps,
        grow=searches and config.oom.keep_global_batch,
        smallest=smallest,
        one_shape=ranks.world > 1,
    )


def _micro_size(config: Config, world: int) -> int:
    batch, steps = config.batch, config.accumulation.steps
    share = -(-batch.global_size // world)
    if steps != "auto":
        return -(-share // steps)
    return share if batch.micro_size == "auto" else min(batch.micro_size, share)


def _eval_size(config: Config, data: Any, world: int) -> int:
    """Without gradients more fits: auto starts at twice this rank's part of the global batch."""
    size = config.batch.eval_micro_size
    return (
        min(-(-2 * config.batch.global_size // world), len(data) if data is not None else 1) if size == "auto" else size
    )


def _run_length(config: Config, batches: TrainBatches, steps_per_epoch: int) -> RunLength:
    by_epochs = None if config.train.max_epochs is None else config.train.max_epochs * steps_per_epoch
    ends = [steps for steps in (config.train.max_steps, by_epochs) if steps is not None]
    return RunLength(steps_per_epoch, batches.global_size, min(ends))


def _cadence(config: Config, name: str, length: RunLength) -> int:
    return to_steps(getattr(config.every, name), length)


def _objective(config: Config, data: Any) -> tuple[str, str]:
    if config.objective != "auto":
        direction, metric = config.objective.split()
        return direction, metric
    classifies = config.task == "classification" or (config.task == "auto" and data.task == "classification")
    return ("max", "accuracy") if classifies else ("min", "loss")
