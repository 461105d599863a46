"""Assembles an engine from the configuration: model, losses, strategy and optimizers. Opens no files.

Used for training on real tensors and for plans on fake ones.
"""

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from trainapp.assembly import updates
from trainapp.assembly.model import BuiltModel, build_model, load_initial_weights
from trainapp.assembly.resolved_targets import ResolvedTargets
from trainapp.assembly.resources import Resources
from trainapp.checkpoint.checkpointer import filled_for_trials
from trainapp.checkpoint.train_state import TrainState
from trainapp.config.schema import Config
from trainapp.data.batch import map_tensors
from trainapp.draws.random_operations import belong_to_samples, install
from trainapp.draws.record import DrawRecord
from trainapp.errors import UserError
from trainapp.losses import losses
from trainapp.losses.losses import beside_inputs, inputs_and_targets
from trainapp.models.inspect import batchnorms, blocks_of
from trainapp.optim import matmuls
from trainapp.optim.ema import WeightAverage
from trainapp.parallel.ddp import DDP
from trainapp.parallel.fsdp import FSDP
from trainapp.parallel.ranks import Ranks
from trainapp.parallel.strategy import SingleDevice, Strategy
from trainapp.rng import preserved_rng, seed_everything
from trainapp.state.stateful import Stateful
from trainapp.techniques import checkpointing, chunked_loss, offload
from trainapp.techniques.catalogue import Situation, require_suited
from trainapp.torch_private import draw_as_uncompiled
from trainapp.training.cached_gradients import CachedGradients
from trainapp.training.engine import Engine
from trainapp.training.in_backward import InBackward
from trainapp.training.session import InitialWeights
from trainapp.trials import learned_draws, loss_check
from trainapp.trials.modes import TrialSetup, has_all_values, modes_of
from trainapp.trials.obstacles import Obstacle, Reason
from trainapp.trials.samples import FirstSamples

log = logging.getLogger(__name__)


class Assembly(NamedTuple):
    """An engine, and what its assembly has found."""

    engine: Engine
    filled: dict[str, Any]  # see `BuiltModel`
    initial_weights: InitialWeights | None  # what was loaded from `model.init_from`
    # What was tried before the first step, with the outcome in words that continue the name: see `run.recipe`.
    checks: dict[str, str]


def assemble(
    config: Config, resources: Resources, ranks: Ranks, callbacks: Mapping[str, Any] | None = None
) -> Assembly:
    """Return an engine: the model on its device, spread over the ranks, with its optimizers and losses.

    In this order: construction, shapes of lazy modules, frozen parameters, initial weights, a check of the loss, 8-bit
    matmuls, activation checkpointing, compilation, sharding, optimizers. Draws the parameters from torch's generators.
    Raises UserError for parts that do not fit together.

    Args:
        config: the run's.
        resources: opened for it.
        ranks: the processes of the run.
        callbacks: the run's callbacks, whose state is saved with it.
    """
    targets = resources.targets
    device = resources.device
    is_meta = resources.initial_device is None and ranks.world_size > 1 and config.parallel.fsdp.meta_init

    built = build_model(config, resources, is_meta)
    model = built.model
    initial_weights = None
    if not is_meta:
        initial_weights = load_initial_weights(config, resources, model, ranks)
    parameter_names = updates.names_of(config, model)
    for config_of_optimizer in config.by_optimizer():
        require_suited(Situation(config_of_optimizer, model, targets.knows_loss))

    # Before it is compiled or sharded: what its forwards draw, and whether its loss is a sum.
    draws_by_sample = _install_draws(config, device)
    draw_record, checks = _try_task(config, resources, built, ranks)

    # Changes of the modules come before compilation, and compilation before sharding.
    if config.precision.mode in ("int8", "fp8"):
        _quantize_matmuls(model, config.precision.mode)
    checkpointing.apply(model, config.activation_checkpointing)
    offloading = offload.apply(model, config)
    if config.train.compile:
        _compile(model, config, draws_by_sample)

    compute_dtype = resources.numerics.compute_dtype
    strategy = _spread(config, model, ranks, compute_dtype, updates.parameters_of(model, parameter_names))
    if not strategy.recovers_in_place:
        ranks.disable_votes()
    if is_meta:
        _initialise_shards(config, strategy, ranks, device)
        initial_weights = load_initial_weights(config, resources, model, ranks)

    rows = config.memory.loss_chunk
    engine = _kind_of_engine(config, targets)(
        _train_state(config, resources, built, parameter_names, callbacks),
        strategy,
        losses.in_chunks(targets.task, rows),
        {name: losses.in_chunks(task, rows) for name, task in targets.updates.items()},
        config.train,
        wrap_compute=None if offloading is None else offloading.wrap_compute,
        stateful_metrics=frozenset(targets.hooks["metrics"]),
        draw_record=draw_record,
    )
    return Assembly(engine, built.filled, initial_weights, checks)


def _install_draws(config: Config, device: torch.device) -> bool:
    """Replace torch's random operations if draws belong to samples. Return whether they do."""
    draws_by_sample = belong_to_samples(config.train.draws, device)
    if draws_by_sample:
        for device_type in {"cpu", device.type}:
            install(device_type)
    return draws_by_sample


def _try_task(
    config: Config, resources: Resources, built: BuiltModel, ranks: Ranks
) -> tuple[DrawRecord, dict[str, str]]:
    """Try the task of a run that trains with the first samples, before the model is compiled or sharded; of a resumed
    run, in the state of its checkpoint. Return what its forwards draw; and what was tried, with the outcome in words.
    Raises UserError for a loss that is not a sum, or that differs when computed in chunks. Collective.
    """
    if not config.activity.trains:
        return DrawRecord(), {}
    targets = resources.targets
    model = built.model
    device = resources.device
    seed = config.train.seed
    batches = resources.batches
    setup = TrialSetup(
        settings=config.train,
        model=model,
        modes=modes_of(targets.task, targets.updates),
        samples=FirstSamples(batches.source, targets.train_data, batches.split, seed),
        device=device,
        autocast=resources.numerics.autocast,
        metric_names=frozenset(targets.hooks["metrics"]),
        resumes=resources.resumes,
        continues=_is_of_this_run(config, resources.checkpoint),
    )
    draw_record, outcomes = learned_draws.learn_draws(setup, ranks)
    learned_draws.note_draws_of_collate(setup, ranks, draw_record)

    # A loss may be another one in a later stage of training, as a buffer or a task's state says.
    in_state_of_checkpoint: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if resources.checkpoint is not None and loss_check.compares_any(setup):
        in_state_of_checkpoint = filled_for_trials(model, resources.tasks, resources.checkpoint, built.filled)
    with in_state_of_checkpoint:
        outcomes |= loss_check.require_sum(setup, ranks, draw_record)
    if config.memory.loss_chunk is not None and targets.knows_loss:
        outcomes["loss in chunks"] = _require_same_forward(config, model, resources)
    return draw_record, outcomes


def _is_of_this_run(config: Config, checkpoint: Path | None) -> bool:
    """Return whether a checkpoint is in the run's own directory."""
    return checkpoint is not None and checkpoint.resolve().is_relative_to(Path(config.run_dir).resolve())


def _require_same_forward(config: Config, model: nn.Module, resources: Resources) -> str:
    """Return in words that the loss in chunks agrees with the model's forward on two samples, or why they were not
    compared. Raises UserError if it does not agree.
    """
    if not config.train.check_loss:
        return f"not compared: {Obstacle(Reason.SWITCHED_OFF)}"
    if not has_all_values(model):
        return f"not compared: {Obstacle(Reason.NO_VALUES)}"
    with preserved_rng(resources.device), resources.numerics.autocast:
        batch = map_tensors(lambda tensor: tensor.to(resources.device), resources.batches.example(2))
        inputs, _ = inputs_and_targets(batch)
        other_arguments = beside_inputs(model, batch)
        chunked_loss.require_same_forward(model, inputs, config.memory.loss_chunk, other_arguments)
    return "is computed from the same logits as in the model's forward, for two samples"


def _quantize_matmuls(model: nn.Module, kind: matmuls.Kind) -> None:
    """Compute the matmuls of the blocks' linear layers in 8 bits. Raises UserError if none of them can be."""
    layers = matmuls.quantizable(blocks_of(model, f"precision={kind}"))
    if not layers:
        raise UserError(
            f"precision={kind}: no nn.Linear in the blocks of {type(model).__name__} has two dimensions that are "
            f"multiples of {matmuls.MULTIPLE}, so nothing would be computed in {kind}; use precision=bf16"
        )
    matmuls.quantize(layers, kind)
    total = sum(isinstance(module, nn.Linear) for module in model.modules())
    log.info("precision=%s: %d of %d linear layers compute their matmuls in %s", kind, len(layers), total, kind)


def _compile(model: nn.Module, config: Config, draws_by_sample: bool) -> None:
    draw_as_uncompiled(draws_by_sample)
    if config.parallel.strategy == "fsdp":
        # Torch compiles each block separately, from shared code: for different shapes it would compile for dynamic
        # ones, which fails for BatchNorm (torch 2.13), so each shape is compiled.
        model.compile(dynamic=False)
    else:
        model.compile()


def _spread(
    config: Config,
    model: nn.Module,
    ranks: Ranks,
    compute_dtype: torch.dtype,
    trained_parameters: list[list[nn.Parameter]],
) -> Strategy:
    """Spread the model over the ranks. Return the strategy that does.

    Args:
        config: has the strategy.
        model: on the device, or on the meta device for FSDP.
        ranks: the processes.
        compute_dtype: of forward and backward.
        trained_parameters: of each update.
    """
    if ranks.world_size == 1:
        return SingleDevice(model, ranks)
    _refuse_synchronised_batchnorm(model)
    if config.parallel.strategy == "ddp":
        return DDP(model, ranks, config.parallel.ddp, trained_parameters)
    blocks = blocks_of(model, "parallel=fsdp")
    # BatchNorm needs fp32 parameters: such models are gathered in fp32, and autocast casts during computation.
    dtype = torch.float32 if batchnorms(model) else compute_dtype
    return FSDP(model, blocks, ranks, config.parallel.fsdp, dtype)


def _refuse_synchronised_batchnorm(model: nn.Module) -> None:
    """Raise UserError for layers whose forward waits for the other ranks, which may have fewer micro-batches, or have
    run out of memory.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise UserError(
                f"the model has nn.SyncBatchNorm ({name}), which waits in its forward for all ranks, but these may "
                "have other numbers of micro-batches, and each may run out of memory: use nn.BatchNorm, whose "
                "statistics are those of a rank's micro-batch; a norm that does not depend on the other samples, such "
                "as GroupNorm; or one rank"
            )


def _initialise_shards(config: Config, strategy: Strategy, ranks: Ranks, device: torch.device) -> None:
    """Allocate the shards of a model that was built on the meta device, and initialise them.

    On the CPU each rank initialises its shards with its own seed: the values differ from the whole model's, but have
    the same distribution. On CUDA torch draws shards as parts of the whole.
    """
    assert isinstance(strategy, FSDP)
    strategy.to_empty(device)

    if device.type == "cpu":
        shards = ranks.world_size // config.parallel.fsdp.replicas
        shard = ranks.rank % shards  # replicas hold the same shards
        torch.manual_seed((config.train.seed * 1_000_003 + shard) % 2**63)
    initialise: Any = strategy.model.init_weights  # existence checked by `require_suited`
    with torch.no_grad():
        initialise()

    # The same on all ranks again: what is drawn later must not depend on the shard.
    seed_everything(config.train.seed)


def _train_state(
    config: Config,
    resources: Resources,
    built: BuiltModel,
    parameter_names: updates.Names,
    callbacks: Mapping[str, Any] | None,
) -> TrainState:
    """Return the model's state with its optimizers and with all that is saved beside it; moves modules of that to the
    device, except those of data sets, whose samples are computed on the CPU.
    """
    device = resources.device
    model = built.model
    state = TrainState(
        model=model,
        updates=updates.build(config, model, parameter_names, resources.numerics, device),
        average=WeightAverage(model, config.train.ema),
        device=device,
        seed=config.train.seed,
        keeps_gradients=not config.optimizer.in_backward,
        filled=built.filled,
        stateful=Stateful(model=model, **resources.owners, callbacks=callbacks or None),
    )
    for module in state.stateful.modules_of_forwards():
        module.to(device)
    return state


def _kind_of_engine(config: Config, targets: ResolvedTargets) -> type[Engine]:
    if config.optimizer.in_backward:
        return CachedInBackward if targets.has_embeddings else InBackward
    return CachedGradients if targets.has_embeddings else Engine


class CachedInBackward(InBackward, CachedGradients):
    """An engine of both kinds; the update happens during pass 3."""
