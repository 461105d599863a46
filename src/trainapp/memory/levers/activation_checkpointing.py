"""Trades time for memory: activations of a block are computed again in the backward instead of kept.

Source: Chen et al. 2016, "Training deep nets with sublinear memory cost"; which operations "selective" keeps follows
Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models".
"""

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainapp.config import schema
from trainapp.models.inspect import blocks_of

_KEPT = (
    "mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)  # fmt: skip


def apply(model: nn.Module, settings: schema.ActivationCheckpointing) -> None:
    """Checkpoint every `settings.every`-th block of the model. Parameter names stay as they are.

    Raises UserError for a model that does not say what its blocks are.
    """
    if settings.mode == "none":
        return
    for block in blocks_of(model, f"activation_checkpointing={settings.mode}")[:: settings.every]:
        block.forward = functools.partial(_checkpointed, block, block.forward, settings.mode == "selective")


def _checkpointed(block: nn.Module, forward, selective: bool, *inputs, **options):
    if not torch.is_grad_enabled():
        return forward(*inputs, **options)
    contexts = functools.partial(_contexts, block, selective)
    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts, **options)


def _contexts(block: nn.Module, selective: bool):
    """The contexts of the first and of the second computation."""
    first, again = (
        create_selective_checkpoint_contexts(_policy)
        if selective
        else (contextlib.nullcontext(), contextlib.nullcontext())
    )
    return first, _both(_buffers_kept(block), again)  # in this order: `again` must not see the copies


def _policy(context, operation, *args, **kwargs) -> CheckpointPolicy:
    kept = operation.overloadpacket.__name__ in _KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@contextlib.contextmanager
def _both(first, second) -> Iterator[None]:
    with first, second:
        yield


@contextlib.contextmanager
def _buffers_kept(block: nn.Module) -> Iterator[None]:
    """BatchNorm moves its statistics in every forward: the second one must leave no trace."""
    buffers = [(buffer, buffer.clone()) for buffer in block.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
