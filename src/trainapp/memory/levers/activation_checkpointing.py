"""Activation checkpointing trades time for memory: a block's activations are recomputed in backward, not stored.

Source: Chen et al. 2016, "Training deep nets with sublinear memory cost". The operations whose results "selective"
keeps follow Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models".
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainapp.config.schema import ActivationCheckpointing
from trainapp.models.inspect import blocks_of
from trainapp.torch_private import ATTENTION_OPERATORS

_KEPT = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution", *ATTENTION_OPERATORS})


def apply(model: nn.Module, settings: ActivationCheckpointing) -> None:
    """Checkpoint every `settings.every`-th block of the model. Parameter names are unchanged.

    Raises UserError for a model without blocks.
    """
    if settings.mode == "none":
        return
    for block in blocks_of(model, f"activation_checkpointing={settings.mode}")[:: settings.every]:
        block.forward = functools.partial(_checkpointed, block, block.forward, settings.mode == "selective")


def _checkpointed(block: nn.Module, forward: Callable[..., Any], selective: bool, *inputs: Any, **options: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **options)
    contexts = functools.partial(_contexts, block, selective)
    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts, **options)


def _contexts(block: nn.Module, selective: bool) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of the forward and of the recomputation."""
    forward, recompute = (
        create_selective_checkpoint_contexts(_policy)
        if selective
        else (contextlib.nullcontext(), contextlib.nullcontext())
    )
    return forward, _nested(_buffers_restored(block), recompute)  # in this order: `recompute` must not see the copies


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operation.overloadpacket.__name__ in _KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@contextlib.contextmanager
def _nested(outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> Iterator[None]:
    with outer, inner:
        yield


@contextlib.contextmanager
def _buffers_restored(block: nn.Module) -> Iterator[None]:
    """BatchNorm updates its statistics in every forward; the recomputation must not update them a second time."""
    buffers = [(buffer, buffer.clone()) for buffer in block.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
