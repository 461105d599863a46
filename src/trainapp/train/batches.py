"""The batches of a configuration's data sets, for training and for evaluation."""

import logging
from typing import Any

import torch

from trainapp.checkpoint.owner import Owner
from trainapp.checkpoint.stateful import Stateful, walk
from trainapp.config.schema import Config
from trainapp.data.eval_stream import EvalStream
from trainapp.data.loader import worker_count
from trainapp.data.sampler import EvalBatches, TrainBatches
from trainapp.data.sampling import weighted_order
from trainapp.data.step_batches import StepBatches
from trainapp.data.stream import is_stream
from trainapp.data.stream_batches import StreamBatches
from trainapp.data.stream_parts import stream_shards
from trainapp.errors import UserError
from trainapp.parallel.ranks import Ranks
from trainapp.rng import is_generator
from trainapp.train.components import Components
from trainapp.train.run import EvalSets
from trainapp.train.task_attributes import attribute

log = logging.getLogger(__name__)


def data_batches(
    config: Config, components: Components, device: torch.device, ranks: Ranks
) -> tuple[StepBatches, EvalSets]:
    """Of training, and of evaluation by name. Raises UserError for settings that do not suit the data."""
    arguments = _batch_arguments(config, components, device, ranks)
    batches = _train_batches(config, components, arguments, ranks)
    arguments["split"] = attribute(components.task, "split")
    evaluated: EvalSets = {}
    for name, data in components.eval_data.items():
        evaluated[name] = _evaluated(data, arguments)
    return batches, evaluated


def _evaluated(data: Any, arguments: dict[str, Any]) -> EvalBatches | EvalStream:
    if is_stream(data):
        return EvalStream(data, generators_of=_generators_of, **arguments)
    return EvalBatches(data, **arguments)


def _generators_of(data: Any) -> dict[str, Any]:
    return {name: found for name, found, _ in walk(data, "data", set()) if is_generator(found)}


def eval_roots(evaluated: dict[str, Any]) -> dict[str, Any]:
    """Evaluation data by the name under which `Stateful` knows it."""
    return {f"eval_{name}_data" if name else "eval_data": data for name, data in evaluated.items()}


def _batch_arguments(config: Config, components: Components, device: torch.device, ranks: Ranks) -> dict[str, Any]:
    """What training and evaluation batches have in common."""
    local_ranks = ranks.world // config.parallel.nodes
    evaluated = {name: data for name, data in components.eval_data.items() if not is_stream(data)}
    train = None if is_stream(components.train_data) else components.train_data  # a stream's state is its position
    owners = Stateful(data=train, **eval_roots(evaluated)).owners
    return {
        "seed": config.train.seed,
        "device": device,
        "workers": _workers(config, components, local_ranks, owners),
        "ahead": not owners,
        "rank": ranks.rank,
        "world": ranks.world,
        "split": _split_of_training(components),
    }


def _split_of_training(components: Components) -> Any:
    """What cuts the batches of training, if a task does. Raises UserError where updates would cut them differently."""
    splits = [split for task in components.training_tasks if callable(split := attribute(task, "split"))]
    if callable(getattr(components.train_data, "split", None)) or not splits:
        return None
    if len(splits) < len(components.training_tasks) or any(split != splits[0] for split in splits):
        raise UserError(
            "updates: their tasks cut batches in different ways (`split`), but have the same batches; give the data "
            "set a method `split(batch, start, end)` that keeps what each of them needs, or all tasks the same function"
        )
    return splits[0]


def _train_batches(config: Config, components: Components, arguments: dict[str, Any], ranks: Ranks) -> StepBatches:
    size, data, weights = config.batch.global_size, components.train_data, config.loader.sampling.weights
    if is_stream(data):
        _require_streamable(config)
        arguments = arguments | stream_shards(data, config.loader.num_workers, arguments["workers"])
        del arguments["rank"], arguments["world"], arguments["ahead"]
        return StreamBatches(data, global_size=size, ranks=ranks, generators_of=_generators_of, **arguments)
    order = None if weights is None else weighted_order(config.train.seed, data, weights)
    batches = TrainBatches(data, global_size=size, drop_last=config.loader.drop_last, order=order, **arguments)
    if batches.epoch_samples == 0:
        raise UserError(
            f"data.drop_last=true with batch.global_size={size}: the data set has only {batches.samples} samples, so "
            "no batch is left; use data.drop_last=false"
        )
    return batches


def _require_streamable(config: Config) -> None:
    """Raises UserError for settings that need to know how many samples there are."""
    name = config.data.target
    if config.mode == "train" and config.train.max_steps is None:
        raise UserError(
            f"train.max_steps=null: data={name} is a stream, whose epochs have no known length, so that the run's end "
            f"is not known (train.max_epochs={config.train.max_epochs} alone does not tell); set train.max_steps"
        )
    if config.loader.drop_last:
        raise UserError(
            f"data.drop_last=true: data={name} is a stream, whose end is known only when it is reached; let the stream "
            "itself leave out the last samples"
        )
    if config.loader.sampling.weights is not None:
        raise UserError(
            f"data.sampling.weights={config.loader.sampling.weights}: data={name} is a stream, from which no sample "
            "can be chosen; let the stream itself repeat or omit samples"
        )


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
