"""Activation checkpointing trades time for memory: a block's activations are recomputed in backward, not stored.

Source: Chen et al. 2016, "Training deep nets with sublinear memory cost". The operations whose results "selective"
keeps follow Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models".
"""

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from trainapp.config.schema import ActivationCheckpointing
from trainapp.models.inspect import blocks_of
from trainapp.techniques.block_state import Before, BlockState
from trainapp.techniques.block_trace import draws
from trainapp.torch_operators import ATTENTION_OPERATORS

Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "scaled_int8_mm"})  # the last: torchao's
_KEPT = frozenset({*_PRODUCTS, "convolution", *ATTENTION_OPERATORS})


class CheckpointCounters:
    """Of this process, read by what counts the operations of a plan.

    inside: open forwards and recomputations of checkpointed blocks. selecting: those of them with a selection policy.
    blocks: forwards begun.
    """

    inside = selecting = blocks = 0


def apply(model: nn.Module, settings: ActivationCheckpointing) -> None:
    """Checkpoint every `settings.every`-th block of the model. Parameter names are unchanged.

    Raises UserError for a model without blocks.
    """
    if settings.mode in ("none", "budget"):  # for the latter, see `budget`
        return
    for block in blocks_of(model, f"activation_checkpointing={settings.mode}")[:: settings.every]:
        selection = functools.partial(create_selective_checkpoint_contexts, policy)
        chosen = selection if settings.mode == "selective" else None
        block.forward = functools.partial(checkpointed, BlockState(block, settings.mode), block.forward, chosen)


def checkpointed(
    state: BlockState,
    forward: Callable[..., Any],
    chosen: Callable[[], Contexts] | None,
    /,  # a block may have arguments of these names
    *inputs: Any,
    **options: Any,
) -> Any:
    """`forward(*inputs, **options)`, to be recomputed in backward but for what the contexts of `chosen` keep."""
    if not torch.is_grad_enabled():
        return forward(*inputs, **options)
    called = functools.partial(forward, **options) if options else forward  # `checkpoint` has options of its own
    if not torch.compiler.is_compiling():
        contexts = functools.partial(_contexts, state, chosen, state.begin(inputs, options))
        return checkpoint(called, *inputs, use_reentrant=False, context_fn=contexts, early_stop=state.may_stop_early)
    # A compiled graph has no state of its own: what it writes, it writes once, however often it computes it.
    if chosen is None:  # the compiler refuses `noop_context_fn` by name (torch 2.13)
        return checkpoint(called, *inputs, use_reentrant=False)
    return checkpoint(called, *inputs, use_reentrant=False, context_fn=chosen)


def _contexts(state: BlockState, chosen: Callable[[], Contexts] | None, before: Before) -> Contexts:
    """The contexts of the forward and of the recomputation, which keep the block's state around `chosen`'s."""
    forward, recompute = (chosen or noop_context_fn)()
    # In this order: what selects the operations to keep must not see the copies.
    selects = chosen is not None
    noted = _Nested(lambda: state.noted(before), forward, selects, is_forward=True)
    return noted, _Nested(lambda: state.rewound(before), recompute, selects, is_forward=False)


def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Whether `selective` keeps an operation's result."""
    # Attention with dropout is recomputed: what follows it would draw other numbers if it did not draw its own again.
    kept = operation.overloadpacket.__name__ in _KEPT and not draws(operation, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class _Nested:
    """Two contexts, entered together, once per backward: a graph that is kept has several."""

    def __init__(
        self,
        outer: Callable[[], AbstractContextManager[None]],
        inner: AbstractContextManager[None],
        selects: bool,
        is_forward: bool,
    ):
        self._outer, self._inner, self._selects, self._is_forward = outer, inner, selects, is_forward
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(self._outer())
        self._stack.enter_context(self._inner)
        CheckpointCounters.inside += 1
        CheckpointCounters.selecting += self._selects
        CheckpointCounters.blocks += self._is_forward

    def __exit__(self, *error: Any) -> None:
        CheckpointCounters.inside -= 1
        CheckpointCounters.selecting -= self._selects
        self._stack.__exit__(*error)
