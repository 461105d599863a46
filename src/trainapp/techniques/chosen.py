"""Carries out what `budget` has chosen: forwards of blocks that keep some of their results, and recompute the rest."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from trainapp.techniques.activation_checkpointing import Contexts, checkpointed
from trainapp.techniques.block_state import BlockState
from trainapp.techniques.block_trace import OperatorCall
from trainapp.techniques.choice import Option
from trainapp.torch_private import tree_leaves

Choice = dict[tuple[int, int], Option]  # by block and number of the call


class Chosen:
    """The choice for the present micro-batch. All that the blocks know of the budget: the model would own the copy of
    itself otherwise, and with it what checkpoints hold.
    """

    edition = 0  # of compiled code

    def __init__(self) -> None:
        self._choice: Choice = {}
        self._numbers: Counter[int] = Counter()

    def begin(self, choice: Choice) -> None:
        """Choose so in the coming forward."""
        self._choice = choice
        self._numbers.clear()

    def call(self, index: int, state: BlockState, forward: Callable[..., Any], /, *inputs: Any, **options: Any) -> Any:
        """The forward of block `index`. A call that was not foreseen is recomputed."""
        if not torch.is_grad_enabled():
            return forward(*inputs, **options)
        if torch.compiler.is_compiling() and self.edition >= 0:  # reading it makes compiled code depend on it
            return forward(*inputs, **options)
        option = self._choice.get((index, self._numbers[index]))
        self._numbers[index] += 1
        if option is not None and option.kept is None:
            return forward(*inputs, **options)
        chosen = functools.partial(_keeping, option.kept) if option is not None and option.kept else None
        return checkpointed(state, forward, chosen, *inputs, **options)


def _keeping(kept: dict[OperatorCall, int]) -> Contexts:
    return create_selective_checkpoint_contexts(_Policy(kept))


class _Policy:
    """Which operations of one call of a block to keep.

    One whose result is larger than in the trace is recomputed: the forward depends on values, and goes another way.
    """

    def __init__(self, kept: dict[OperatorCall, int]):
        self._sizes = kept
        self._kept: set[OperatorCall] = set()
        self._counts: dict[bool, Counter[Any]] = {False: Counter(), True: Counter()}

    def __call__(self, context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        counts = self._counts[context.is_recompute]  # torch 2.11 asks in the recomputation, too
        operation = func, counts[func]
        counts[func] += 1
        if not context.is_recompute and operation in self._sizes:
            results = [value for value in tree_leaves(context.op_output) if isinstance(value, Tensor)]
            if sum(value.untyped_storage().nbytes() for value in results) <= self._sizes[operation]:
                self._kept.add(operation)
        return CheckpointPolicy.MUST_SAVE if operation in self._kept else CheckpointPolicy.PREFER_RECOMPUTE
