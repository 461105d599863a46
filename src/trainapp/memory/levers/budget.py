"""Activation checkpointing within a budget: blocks keep what is dearest to recompute, in so many bytes.

What each call of a block keeps is chosen before the forward of a micro-batch, from the shapes of its batch, on a copy
of the model without data. It is the same for the same shapes, so that a plan, a retry and all ranks agree.
"""

import contextlib
import functools
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts, noop_context_fn

from trainapp.config.schema import ActivationCheckpointing
from trainapp.data.batch import tensors_in
from trainapp.memory.kinds import MemoryKind
from trainapp.memory.levers.activation_checkpointing import Contexts, checkpointed
from trainapp.memory.levers.block_state import BlockState
from trainapp.memory.levers.block_trace import BlockCall, OperatorCall, Skeleton, Task
from trainapp.memory.levers.choice import Option, choose, least, options_of
from trainapp.memory.live_tensors import LiveTensors
from trainapp.models.inspect import blocks_of
from trainapp.torch_private import tree_leaves
from trainapp.units import bytes_text, parse_memory_size

SETTING = "activation_checkpointing=budget"
REMEMBERED = 256  # shapes of batches, of which the choice is kept
MOST_TRACES = 6  # of a forward and backward, for `bytes=auto`
Choice = dict[tuple[int, int], Option]  # by block and number of the call
log = logging.getLogger(__name__)


class NoBudget:
    """Stands for a `Budget` where there is none."""

    room: Callable[[bool], int] | None = None

    def prepare(self, batch: Any, autocast: contextlib.AbstractContextManager[Any], is_last: bool = False) -> None:
        """Nothing."""


class Budget:
    """Checkpoints every `settings.every`-th block of the model. Parameter names are unchanged.

    task: what the loss is computed with; it is copied. device: where the model will be.
    Raises UserError for a model without blocks.

    Attribute `room`: a function that gives the bytes that a micro-batch may take after what persists between steps,
    which `bytes=auto` needs. Its argument: whether the micro-batch is the only one of its step.
    """

    def __init__(self, model: nn.Module, task: Task, settings: ActivationCheckpointing, device: torch.device):
        self.settings, self.device = settings, device
        self.room: Callable[[bool], int] | None = None
        self._chosen = _Chosen()
        self._known: OrderedDict[Any, Choice] = OrderedDict()
        self._has_warned = False
        blocks = blocks_of(model, SETTING)[:: settings.every]
        self._skeleton: Skeleton | None = None
        try:
            self._skeleton = Skeleton(model, task, device)
        except Exception as error:  # whatever a module of any kind raises when it is copied
            self._warn(error)
        self._model = model
        for index, block in enumerate(blocks):
            block.forward = functools.partial(self._chosen.call, index, BlockState(block), block.forward)

    def prepare(self, batch: Any, autocast: contextlib.AbstractContextManager[Any], is_last: bool = False) -> None:
        """Choose for the forward of this micro-batch. Call outside `autocast`, the context of that forward.

        Where the model cannot be traced, all blocks are recomputed, with one warning.
        """
        is_auto = self.settings.bytes == "auto" and self.room is not None
        alone = is_auto and is_last and all(p.grad is None for p in self._model.parameters())
        room = self.room(alone) if is_auto and self.room is not None else 0
        key = (tuple((tuple(t.shape), t.dtype) for t in tensors_in(batch)), self._model.training, room, alone)
        if key not in self._known:
            self._known[key] = self._choose(batch, autocast, room, alone)
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        self._chosen.begin(self._known[key])

    def _choose(self, batch: Any, autocast: contextlib.AbstractContextManager[Any], room: int, alone: bool) -> Choice:
        skeleton = self._skeleton
        if skeleton is None:
            return {}
        try:
            skeleton.model.train(self._model.training)
            calls = skeleton.calls(batch, autocast, self.settings.every)
            if self.settings.bytes == "auto":
                budget = self._largest_within(room, skeleton, calls, batch, autocast, alone)
            else:
                budget = parse_memory_size(self.settings.bytes, total=0)
        except Exception as error:  # whatever the model raises on tensors without data
            self._warn(error)
            return {}
        self._report(calls, choose(calls, budget), budget)
        return _by_call(calls, budget)

    def _largest_within(
        self,
        room: int,
        skeleton: Skeleton,
        calls: list[BlockCall],
        batch: Any,
        autocast: contextlib.AbstractContextManager[Any],
        alone: bool,
    ) -> int:
        """The bytes with which a micro-batch peaks at `room`, or just below.

        What is kept lies in memory until the backward of its block, at most at every peak, so that the first guess is
        safe. It is often more than that: a block that is recomputed needs all of its activations anyway.
        """
        budget, largest = -1, sum(max(option.size for option in options_of(call)) for call in calls)
        more = sum(call.inputs for call in calls)
        for _ in range(MOST_TRACES):
            choice = _by_call(calls, budget + more)
            peak = peak_with(choice, skeleton, batch, autocast, self.settings.every, alone)
            if peak > room and budget >= 0:
                break
            budget, more = budget + more, room - peak
            if more < room // 64 or budget >= largest:
                break
        return budget

    def _report(self, calls: list[BlockCall], options: list[Option], budget: int) -> None:
        kept = sum(option.size for option in options)
        whole = sum(option.kept is None for option in options)
        part = sum(bool(option.kept) for option in options)
        if kept > budget and not self._has_warned:
            self._has_warned = True
            log.warning(
                "activation_checkpointing.bytes=%s: leaves %s, but these blocks keep at least %s of a micro-batch, and "
                "keep that; a smaller micro-batch needs less",
                self.settings.bytes,
                bytes_text(max(0, budget)),
                bytes_text(least(calls)),
            )
        elif not self._known:
            log.info(
                "activation checkpointing keeps %s of %s: %d of %d blocks whole, %d in part",
                bytes_text(kept),
                bytes_text(budget),
                whole,
                len(calls),
                part,
            )

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            reason = (str(error).strip().splitlines() or [""])[0]
            log.warning(
                "%s: what the blocks keep cannot be traced (%s: %s); they are all recomputed, as with "
                "activation_checkpointing=full",
                SETTING,
                type(error).__name__,
                reason,
            )


class _Chosen:
    """The choice for the present micro-batch. All that the blocks know of the budget: the model would own the copy of
    itself otherwise, and with it what checkpoints hold.
    """

    def __init__(self) -> None:
        self._choice: Choice = {}
        self._numbers: Counter[int] = Counter()

    def begin(self, choice: Choice) -> None:
        """Choose so in the coming forward."""
        self._choice = choice
        self._numbers.clear()

    def call(self, index: int, state: BlockState, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """The forward of block `index`. A call that was not foreseen is recomputed."""
        if not torch.is_grad_enabled():
            return forward(*inputs, **options)
        option = self._choice.get((index, self._numbers[index]))
        self._numbers[index] += 1
        if option is not None and option.kept is None:
            return forward(*inputs, **options)
        chosen = functools.partial(_keeping, option.kept) if option is not None and option.kept else noop_context_fn
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


def _by_call(calls: list[BlockCall], budget: int) -> Choice:
    return {(c.block, c.number): option for c, option in zip(calls, choose(calls, budget), strict=True)}


def peak_with(
    choice: Choice,
    skeleton: Skeleton,
    batch: Any,
    autocast: contextlib.AbstractContextManager[Any],
    every: int,
    alone: bool,
) -> int:
    """The peak of a forward and backward, in bytes above parameters and buffers, if every `every`-th block keeps what
    `choice` says. Gradients count only if the micro-batch is `alone`; otherwise they exist before it.
    """
    chosen = _Chosen()
    chosen.begin(choice)

    def wrapping(index: int, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        return forward if index % every else functools.partial(chosen.call, index // every, BlockState(block), forward)

    parameters = [p for p in skeleton.model.parameters() if p.requires_grad]
    counter = LiveTensors(devices=None)
    with skeleton.running(batch, wrapping) as (model, fake):
        for parameter in parameters if not alone else ():  # a step's second one peaks highest
            parameter.grad = torch.empty_like(parameter)
        gradients = [p.grad for p in parameters if p.grad is not None]
        counter.register({MemoryKind.PARAMETERS: model.parameters(), MemoryKind.BUFFERS: model.buffers()})
        counter.register({MemoryKind.GRADIENTS: gradients})
        before = counter.live
        counter.register({MemoryKind.BATCH: tensors_in(fake)})
        try:
            with counter:
                with autocast:
                    loss, *_ = skeleton.task(model, fake)
                loss.backward()
        finally:
            for parameter in parameters:
                parameter.grad = None
    return counter.peak - before
