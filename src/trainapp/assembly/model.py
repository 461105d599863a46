"""Assembles an engine from the configuration: model, losses, strategy and optimizers. Opens no files.

Used for training on real tensors and for plans on fake ones.
"""

import contextlib
import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainapp.assembly import checks, learned_draws, updates
from trainapp.assembly.modes import reason_without_values
from trainapp.assembly.resolved_targets import ResolvedTargets
from trainapp.assembly.resources import Resources
from trainapp.assembly.sizes import compare_sizes
from trainapp.checkpoint.train_state import TrainState
from trainapp.config.schema import Config
from trainapp.config.targets import Spec, construct
from trainapp.data.batch import map_tensors
from trainapp.draws import belong_to_samples, install
from trainapp.errors import UserError
from trainapp.losses import losses
from trainapp.losses.losses import beside_inputs, inputs_and_targets
from trainapp.models.huggingface import require_documents_apart
from trainapp.models.inspect import batchnorms, blocks_of, is_of_transformers, lazy_modules, without_cache
from trainapp.optim import emulated_kernels, matmuls
from trainapp.optim.ema import WeightAverage
from trainapp.optim.optimizers import matching
from trainapp.parallel.ddp import DDP
from trainapp.parallel.fsdp import FSDP
from trainapp.parallel.ranks import Ranks
from trainapp.parallel.strategy import SingleDevice, Strategy
from trainapp.rng import DrawRecord, preserved_rng, seed_everything
from trainapp.stateful import Stateful
from trainapp.techniques import checkpointing, chunked_loss, offload
from trainapp.techniques.catalogue import Situation, require_suited
from trainapp.torch_private import draw_as_uncompiled
from trainapp.training.cached_gradients import CachedGradients
from trainapp.training.engine import Engine
from trainapp.training.in_backward import InBackward

log = logging.getLogger(__name__)


def assemble(config: Config, resources: Resources, ranks: Ranks, callbacks: Mapping[str, Any] | None = None) -> Engine:
    """The model on its device, spread over the ranks, with its optimizers and losses.

    In this order: construction, shapes of lazy modules, frozen parameters, a check of the loss, 8-bit matmuls,
    activation checkpointing, compilation, sharding, optimizers. Draws the parameters from torch's generators.
    callbacks: the run's callbacks, whose state is saved with it. Raises UserError for parts that do not fit together.
    """
    targets, device, precision = resources.targets, resources.device, resources.numerics
    is_meta = resources.initial_device is None and ranks.world_size > 1 and config.parallel.fsdp.meta_init
    model = built(config, resources, is_meta)
    names = updates.names_of(config, model)
    for own in config.by_optimizer():
        require_suited(Situation(own, model, targets.knows_loss))
    draw_record = DrawRecord()
    by_sample = belong_to_samples(config.train.draws, device)
    if by_sample:
        for kind in {"cpu", device.type}:
            install(kind)
    if config.activity.trains:
        draw_record = learned_draws.learnt(config, resources, model, ranks)
        checks.require_sum(config, resources, model, ranks, draw_record)
        if config.memory.loss_chunk is not None and targets.knows_loss:
            _require_same_forward(config, model, resources)
    if config.precision.mode in ("int8", "fp8"):
        _quantize_products(model, config.precision.mode)
    checkpointing.apply(model, config.activation_checkpointing)
    offloading = offload.apply(model, config)
    if config.train.compile:
        draw_as_uncompiled(by_sample)
        # With FSDP, torch compiles each block separately, from shared code: for different shapes it would compile for
        # dynamic ones, which fails for BatchNorm (torch 2.13), so each shape is compiled.
        model.compile(**({"dynamic": False} if config.parallel.strategy == "fsdp" else {}))
    strategy = _spread(config, model, ranks, precision.compute_dtype, updates.parameters_of(model, names))
    if not strategy.recovers_in_place:
        ranks.disable_votes()
    if is_meta:
        _initialise_shards(config, strategy, ranks, device)
    state = TrainState(
        model=model,
        updates=updates.build(config, model, names, precision, device),
        average=WeightAverage(model, config.train.ema),
        device=device,
        seed=config.train.seed,
        keeps_gradients=not config.optimizer.in_backward,
        filled=resources.filled,
        stateful=Stateful(model=model, **resources.owners, callbacks=callbacks or None),
    )
    for module in state.stateful.modules.values():
        module.to(device)
    return _kind_of_engine(config, targets)(
        state,
        strategy,
        losses.in_chunks(targets.task, config.memory.loss_chunk),
        {name: losses.in_chunks(task, config.memory.loss_chunk) for name, task in targets.updates.items()},
        config.train,
        wrap_compute=None if offloading is None else offloading.wrap_compute,
        stateful_metrics=frozenset(targets.hooks["metrics"]),
        draw_record=draw_record,
    )


def _kind_of_engine(config: Config, targets: ResolvedTargets) -> type[Engine]:
    if config.optimizer.in_backward:
        return CachedInBackward if targets.has_embeddings else InBackward
    return CachedGradients if targets.has_embeddings else Engine


class CachedInBackward(InBackward, CachedGradients):
    """Both; the update happens during pass 3."""


def built(config: Config, resources: Resources, is_meta: bool = False) -> nn.Module:
    """The model in training mode on its device: constructed, its lazy modules given their shapes, its parameters frozen
    and cast as the configuration says. is_meta: build it on the meta device.
    """
    initial = "meta" if is_meta else resources.initial_device
    with torch.device(initial) if initial else contextlib.nullcontext():
        model = _constructed(config, resources)
    device = resources.device
    if not is_meta and any(t.device.type != device.type for t in (*model.parameters(), *model.buffers())):
        model.to(device)
    model.train()
    materialise(model, resources, device, is_meta)
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            module.sparse = False
            log.info("the gradient of %s is made dense: clipping and most optimizers do not support sparse ones", name)
    for name in matching(model, config.model.freeze, "model.freeze"):  # any name of a tied weight freezes it
        model.get_parameter(name).requires_grad_(False)
    resources.numerics.cast_parameters(model)
    for dtype in {parameter.dtype for parameter in model.parameters()}:  # a model may be in 16 bits by itself
        emulated_kernels.install_for(device, dtype)
    return model


def _constructed(config: Config, resources: Resources) -> nn.Module:
    """The model as constructed by its class. Raises UserError for a model that cannot read the data."""
    targets = resources.targets
    spec = Spec(targets.spec, filled=resources.filled)
    required = [
        name
        for name, parameter in inspect.signature(targets.model).parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    lacking = [name for name in required if name not in config.model.arguments and name not in spec.values]
    if lacking:
        raise UserError(
            f"model={config.model.target} cannot read data={config.data.target}: it needs {', '.join(lacking)}, and "
            f"the data has {', '.join(spec.values) or 'no spec'}; choose a model for this kind of data"
        )
    model: Any = construct(targets.model, config.model.arguments, "model", config.user_packages, spec=spec)
    _require_training_switch(model)
    compare_sizes(config, targets, spec)
    without_cache(model)
    if spec.values.get("packed") and is_of_transformers(model):
        require_documents_apart(model)
    return model


def _require_training_switch(model: nn.Module) -> None:
    """Raises UserError for a module whose `train` is another function than torch's, such as a training loop."""
    for name, module in model.named_modules():
        try:
            inspect.signature(module.train).bind(True)
        except TypeError:
            place = f"its module {name}" if name else "it"
            raise UserError(
                f"model: {place} ({type(module).__name__}) has a method train{inspect.signature(module.train)}, which "
                "replaces torch's train(mode=True), by which models are switched between training and evaluation; give "
                "it another name"
            ) from None


def materialise(model: nn.Module, resources: Resources, device: torch.device, is_meta: bool = False) -> None:
    """Give lazy modules their shapes by a forward of two samples, equal on every rank. Raises UserError for modules
    that it does not reach. is_meta: whether the model has no values to compute with.
    """
    if not is_meta and lazy_modules(model):
        model.eval()
        with torch.no_grad(), resources.numerics.autocast:
            for task in resources.targets.training_tasks:
                task(model, map_tensors(lambda tensor: tensor.to(device), resources.batches.example(2)))
        model.train()
    if lazy := lazy_modules(model):
        reason = "parallel.fsdp.meta_init=true" if is_meta else "a forward of the first two samples"
        raise UserError(f"model: the shapes of {', '.join(lazy)} are lazy and {reason} does not give them; set them")


def _require_same_forward(config: Config, model: nn.Module, resources: Resources) -> None:
    """Raises UserError unless the loss in chunks agrees with the model's forward on two samples."""
    name = "loss in chunks"
    if not config.train.check_loss:
        resources.note_check(name, "not compared: train.check_loss=false")
        return
    if reason := reason_without_values(model):
        resources.note_check(name, f"not compared: {reason}")
        return
    with preserved_rng(resources.device), resources.numerics.autocast:
        batch = map_tensors(lambda tensor: tensor.to(resources.device), resources.batches.example(2))
        inputs, _ = inputs_and_targets(batch)
        chunked_loss.require_same_forward(model, inputs, config.memory.loss_chunk, beside_inputs(model, batch))
    resources.note_check(name, "is computed from the same logits as in the model's forward, for two samples")


def _quantize_products(model: nn.Module, kind: matmuls.Kind) -> None:
    layers = matmuls.quantizable(blocks_of(model, f"precision={kind}"))
    if not layers:
        raise UserError(
            f"precision={kind}: no nn.Linear in the blocks of {type(model).__name__} has two dimensions that are "
            f"multiples of {matmuls.MULTIPLE}, so nothing would be computed in {kind}; use precision=bf16"
        )
    matmuls.quantize(layers, kind)
    total = sum(isinstance(module, nn.Linear) for module in model.modules())
    log.info("precision=%s: %d of %d linear layers compute their matmuls in %s", kind, len(layers), total, kind)


def _spread(
    config: Config,
    model: nn.Module,
    ranks: Ranks,
    compute_dtype: torch.dtype,
    updates: list[list[nn.Parameter]],
) -> Strategy:
    if ranks.world_size == 1:
        return SingleDevice(model, ranks)
    if config.parallel.strategy == "ddp":
        return DDP(model, ranks, config.parallel.ddp, updates)
    blocks = blocks_of(model, "parallel=fsdp")
    # BatchNorm needs fp32 parameters: such models are gathered in fp32, and autocast casts during computation.
    dtype = torch.float32 if batchnorms(model) else compute_dtype
    return FSDP(model, blocks, ranks, config.parallel.fsdp, dtype)


def _initialise_shards(config: Config, strategy: Strategy, ranks: Ranks, device: torch.device) -> None:
    """Allocate the shards of a model that was built on the meta device, and initialise them.

    On the CPU each rank initialises its shards with its own seed: the values differ from the whole model's, but have
    the same distribution. On CUDA torch draws shards as parts of the whole.
    """
    assert isinstance(strategy, FSDP)
    model = strategy.model
    strategy.to_empty(device)
    if device.type == "cpu":
        shard = ranks.rank % (ranks.world_size // config.parallel.fsdp.replicas)  # replicas hold the same shards
        torch.manual_seed((config.train.seed * 1_000_003 + shard) % 2**63)
    initialise: Any = model.init_weights  # existence checked by `require_suited`
    with torch.no_grad():
        initialise()
    seed_everything(config.train.seed)
