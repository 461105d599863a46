"""The model on its device, spread over the ranks."""

import contextlib
import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainapp.config import targets
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.memory.levers import activation_checkpointing
from trainapp.models.inspect import blocks_of, has_batchnorm
from trainapp.models.weights import load_weights
from trainapp.parallel.ddp import DDP
from trainapp.parallel.fsdp import FSDP
from trainapp.parallel.ranks import Ranks
from trainapp.parallel.strategy import SingleDevice
from trainapp.rng import seed_everything
from trainapp.train.components import log


def model_over_ranks(
    config: Config, kind: Any, spec: dict[str, Any], ranks: Ranks, device: torch.device, compute: torch.dtype
) -> SingleDevice:
    """The model on its device, spread over the ranks: activation checkpointing, then compilation, then shards.

    compute: the dtype of gathered parameters in FSDP.
    """
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
    on_meta = ranks.world > 1 and config.parallel.strategy == "fsdp" and config.parallel.fsdp.meta_init
    with torch.device("meta") if on_meta else contextlib.nullcontext():
        model = targets.construct(kind, config.model.arguments, "model", config.user_packages, spec)
    if not on_meta:
        _start_from_weights(config, model)
        model.to(device)
    model.train()
    activation_checkpointing.apply(model, config.activation_checkpointing)
    if config.train.compile:
        model.compile()
    strategy = _spread(config, model, ranks, compute)
    if not strategy.recovers_in_place:
        ranks.disable_votes()
    if on_meta:
        _fill(config, model, ranks, device)
        _start_from_weights(config, model)
    return strategy


def _start_from_weights(config: Config, model: nn.Module) -> None:
    if config.model.init_from:
        skipped = load_weights(model, Path(config.model.init_from), strict=config.model.init_strict)
        if skipped:
            log.warning("model.init_from: not loaded, left as initialised: %s", ", ".join(skipped))


def _fill(config: Config, model: nn.Module, ranks: Ranks, device: torch.device) -> None:
    """Give a model that was built without memory its shards, and draw them.

    On the CPU each rank draws its own shards from a seed of its own: other numbers than the whole model would get, of
    the same distribution. On CUDA torch draws shards as parts of the whole.
    """
    if not callable(getattr(model, "init_weights", None)):
        raise UserError(
            f"parallel.fsdp.meta_init=true: {type(model).__name__} has no method `init_weights()` that draws its "
            "parameters and fills its buffers; add one, or use meta_init=false"
        )
    model.to_empty(device=device)
    if device.type == "cpu":
        part = ranks.rank % (ranks.world // config.parallel.fsdp.replicas)  # replicas hold the same shards
        torch.manual_seed((config.train.seed * 1_000_003 + part) % 2**63)
    with torch.no_grad():
        model.init_weights()
    seed_everything(config.train.seed)


def _spread(config: Config, model: nn.Module, ranks: Ranks, compute: torch.dtype) -> SingleDevice:
    """Over the ranks, after activation checkpointing and compilation and before the optimizer."""
    if ranks.world == 1:
        return SingleDevice(model, ranks)
    if config.parallel.strategy == "ddp":
        return DDP(model, ranks, config.parallel.ddp)
    blocks = blocks_of(model, "parallel=fsdp")
    # BatchNorm needs its parameters in fp32: such models are gathered in it, and autocast casts where it computes.
    return FSDP(model, blocks, ranks, config.parallel.fsdp, torch.float32 if has_batchnorm(model) else compute)
