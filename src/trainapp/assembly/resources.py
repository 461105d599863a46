"""What is opened before anything is assembled: data as batches; device, memory and numerics."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainapp.assembly.resolved_targets import ResolvedTargets, choose_device, resolve_targets, set_global_switches
from trainapp.config.schema import Config
from trainapp.data.eval_batches import EvalBatches
from trainapp.data.loader import Fetcher, Request
from trainapp.data.stream_reader import is_stream
from trainapp.data.train_batches import TrainBatches
from trainapp.data.workers import worker_count
from trainapp.errors import UserError
from trainapp.losses.losses import attribute
from trainapp.memory.build import build_memory
from trainapp.memory.device import DeviceMemory
from trainapp.optim import precision
from trainapp.parallel.ranks import Ranks
from trainapp.rng import seed_everything
from trainapp.state.snapshot import Snapshot
from trainapp.state.stateful import Owner, Stateful, has_extra_state, held_tensors
from trainapp.training.session import EvalSets

log = logging.getLogger(__name__)


@dataclass
class Resources:
    """Opened data, memory and numerics of a run. A trace replaces them before it assembles an engine."""

    targets: ResolvedTargets
    device: torch.device
    memory: DeviceMemory
    numerics: precision.Precision
    batches: TrainBatches
    eval_sets: EvalSets
    # Where parameters are initialised; None: on the CPU, then moved (with `parallel.fsdp.meta_init`: on the meta
    # device, then shard by shard).
    initial_device: str | None = None
    checkpoint: Path | None = None  # the one that the caller restores, if any

    @property
    def resumes(self) -> bool:
        """Whether the caller restores a checkpoint."""
        return self.checkpoint is not None

    @property
    def tasks(self) -> dict[str, Any]:
        """The tasks, by their names in checkpoints."""
        tasks = {"task": self.targets.task.unchecked}
        for name, task in self.targets.updates.items():
            tasks[f"{name}'s task"] = task.unchecked
        return tasks

    @property
    def owners(self) -> dict[str, Any]:
        """Owners of state other than the model's tensors, by their names in checkpoints."""
        eval_data = {}
        for name, eval_set in self.eval_sets.items():
            if not eval_set.is_stream:  # an evaluation reads a stream from its start
                eval_data[name] = eval_set.dataset
        data = _data_by_owner_name(self.batches.source.state_owner, eval_data)
        return {**self.tasks, **data}

    def close(self) -> None:
        """End the reader processes."""
        self.batches.close()
        for eval_set in self.eval_sets.values():
            eval_set.close()


def open_resources(
    config: Config,
    ranks: Ranks,
    targets: ResolvedTargets | None = None,
    memory: DeviceMemory | None = None,
    checkpoint: Path | None = None,
) -> Resources:
    """Open the data, limit the memory and seed the generators, from which `assemble` draws the parameters. Raises
    UserError for errors in names and arguments, and for settings that do not suit the data.

    Args:
        config: the run's.
        ranks: the processes of the run.
        targets: resolved by an earlier call.
        memory, checkpoint: see `build`.
    """
    seed_everything(config.train.seed)  # for random numbers in data sets and tasks
    targets = targets or resolve_targets(config)

    # The device, and its memory before anything is allocated there.
    device = ranks.device if ranks.world_size > 1 else choose_device(config.train.device)
    set_global_switches(config, device)
    memory = memory or build_memory(config.memory, device)
    memory.keep_events = config.memory.timeline
    memory.compiles = config.train.compile

    # Again: the parameters must not depend on what the data sets have drawn.
    seed_everything(config.train.seed)
    numerics = precision.build(config.precision, device)

    # Training and evaluation load their samples alike.
    loading: dict[str, Any] = {
        "seed": config.train.seed,
        "device": device,
        "workers": _worker_count(config, targets, ranks.world_size),
        "ranks": ranks,
    }
    batches = _train_batches(config, targets, loading)
    loading["equal"] = ranks.world_size > 1 and config.parallel.strategy == "fsdp"  # a forward is collective
    split = attribute(targets.task, "split")
    eval_sets = {}
    for name, data in targets.eval_data.items():
        eval_sets[name] = EvalBatches(data, split=split, **loading)
    return Resources(targets, device, memory, numerics, batches, eval_sets, checkpoint=checkpoint)


def _train_batches(config: Config, targets: ResolvedTargets, loading: dict[str, Any]) -> TrainBatches:
    """Return the batches of training. Raises UserError for settings that do not suit the data.

    Args:
        config: the run's.
        targets: with the data.
        loading: how samples are loaded, in evaluations, too.
    """
    data = targets.train_data
    settings = config.data
    loading = loading | {"global_size": config.batch.global_size, "split": _split_of_training(targets)}

    if is_stream(data):
        _require_streamable(config)
        # `auto` is one process at most: with more, the order of the samples depends on their number.
        shards = 1 if settings.num_workers == "auto" else max(1, loading["workers"])
        return TrainBatches(data, shards=shards, **loading)

    batches = TrainBatches(data, drop_last=settings.drop_last, weights=settings.sampling.weights, **loading)
    if batches.epoch_samples == 0:
        raise UserError(
            f"data.drop_last=true with batch.global_size={config.batch.global_size}: the data set has only "
            f"{batches.samples} samples, so no batch is left; use data.drop_last=false"
        )
    return batches


def _split_of_training(targets: ResolvedTargets) -> Any:
    """Return the training tasks' `split` function, if any. Raises UserError if updates have different ones."""
    if callable(getattr(targets.train_data, "split", None)):
        return None
    splits = []
    for task in targets.training_tasks:
        split = attribute(task, "split")
        if callable(split):
            splits.append(split)
    if not splits:
        return None
    if len(splits) < len(targets.training_tasks) or any(split != splits[0] for split in splits):
        raise UserError(
            "updates: their tasks split batches in different ways (`split`), but have the same batches; give the data "
            "set a method `split(batch, start, end)` that keeps what each of them needs, or all tasks the same function"
        )
    return splits[0]


def _require_streamable(config: Config) -> None:
    """Raise UserError for settings that need the number of samples."""
    name = config.data.target
    if config.activity.trains and config.train.max_steps is None:
        raise UserError(
            f"train.max_steps=null: data={name} is a stream, whose epochs have no known length, so that the run's end "
            f"is not known (train.max_epochs={config.train.max_epochs} alone does not say); set train.max_steps"
        )
    if config.data.drop_last or config.data.sampling.weights is not None:
        raise UserError(
            f"data.drop_last, data.sampling.weights: data={name} is a stream, which is read sequentially; "
            "remove these settings, and let the stream itself omit or repeat samples"
        )


def _worker_count(config: Config, targets: ResolvedTargets, world_size: int) -> int:
    """Return the number of loader processes; none for stateful data: each would change its own copy, ahead of the
    steps. (A stream's state is its position.)
    """
    setting = config.data.num_workers
    local_ranks = min(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    count = worker_count(setting, targets.train_data, local_ranks)

    data_by_name = _data_by_owner_name(targets.train_data, targets.eval_data)
    indexed_data = {name: data for name, data in data_by_name.items() if not is_stream(data)}
    if not count:
        return count
    owners = _owners_that_change(indexed_data, config.train.seed)
    if not owners:
        return count

    # A user who has set the number keeps it for generators, whose numbers differ only after a retry or a resume.
    is_off = setting == "auto" or any(owner.kind == "data" for owner in owners.values())
    consequence = "no workers are used" if is_off else "a retried or resumed step may see other numbers"
    log.warning(
        "data.num_workers=%s: the data is stateful (%s), and each worker would change its own copy, ahead of the "
        "steps: %s. Make a sample a function of its index and of the global generators, which are seeded for it, and "
        "keep what each sample writes anew in local variables",
        setting,
        ", ".join(owners),
        consequence,
    )
    return 0 if is_off else count


def _owners_that_change(data_by_name: dict[str, Any], seed: int) -> dict[str, Owner]:
    """Return the owners of state in data sets, but not modules that fetching a sample leaves as they are, such as
    transforms; of others, what it has written. Modules that are on a GPU count as well: no worker could
    use them.
    """
    stateful = Stateful(**data_by_name)
    modules = set()
    for name, module in stateful.modules.items():
        is_usable = all(tensor.device.type == "cpu" for tensor in held_tensors([module]))
        if is_usable and not has_extra_state(module):
            modules.add(name)
    if not modules:
        return stateful.owners

    # Fetch the first sample of each.
    snapshot = Snapshot.of(stateful)
    with snapshot.undone("all"):
        try:
            for data in data_by_name.values():
                Fetcher(data, seed)[Request(0, [0])]
        except Exception:  # the first step raises it again
            return stateful.owners
        written = snapshot.changed(with_data=True)

    owners = {}
    for name, owner in stateful.owners.items():
        if name not in modules:
            owners[name] = owner
            continue
        for written_name in written:
            if written_name.startswith(f"{name}."):
                owners[written_name] = owner
    return owners


def _data_by_owner_name(train_data: Any, eval_data: dict[str, Any]) -> dict[str, Any]:
    """Return training and evaluation data by their names in `Stateful`.

    Args:
        train_data: the training data.
        eval_data: by the name of the evaluation set, "" for the data's own split.
    """
    data_by_name = {"data": train_data}
    for name, data in eval_data.items():
        data_by_name[f"eval_{name}_data" if name else "eval_data"] = data
    return data_by_name
