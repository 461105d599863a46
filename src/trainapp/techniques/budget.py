"""Activation checkpointing within a budget: blocks keep what is dearest to recompute, in so many bytes.

What each call of a block keeps is chosen before the forward of a micro-batch, from the shapes of its batch, on a copy
of the model without data. It is the same for the same shapes, so that a plan, a retry and all ranks agree.
"""

import contextlib
import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from trainapp.config.schema import ActivationCheckpointing
from trainapp.data.batch import tensors_in
from trainapp.memory.kinds import MemoryKind
from trainapp.memory.live_tensors import LiveTensors
from trainapp.models.inspect import blocks_of
from trainapp.techniques.block_state import BlockState
from trainapp.techniques.block_trace import BlockCall, Skeleton, Task
from trainapp.techniques.choice import Option, choose, least, options_of
from trainapp.techniques.chosen import Choice, Chosen
from trainapp.techniques.compiled_budget import CompiledBudget
from trainapp.techniques.loss_trace import loss_memory
from trainapp.units import bytes_text, parse_memory_size

SETTING = "activation_checkpointing=budget"
REMEMBERED = 256  # shapes of batches, of which the choice is kept
MOST_TRACES = 6  # of a forward and backward, for `bytes=auto`
log = logging.getLogger(__name__)


class NoBudget:
    """Stands for a `Budget` where there is none."""

    room: Callable[[bool], int] | None = None
    compile_options: Mapping[str, Any] = MappingProxyType({})

    def prepare(self, batch: Any, autocast: contextlib.AbstractContextManager[Any], is_last: bool = False) -> None:
        """Nothing."""


class Budget:
    """Checkpoints every `settings.every`-th block of the model. Parameter names are unchanged.

    task: what the loss is computed with; it is copied. device: where the model will be. compiles: whether the model
    will be compiled, with `compile_options`. Then the compiler chooses, and the blocks do in uncompiled steps only.
    restored: a context around each trace, which undoes what it does to what the copies share with model and task, such
    as global variables.
    Raises UserError for a model without blocks.

    Attribute `room`: a function that gives the bytes that a micro-batch may take after what persists between steps,
    which `bytes=auto` needs. Its argument: whether the micro-batch is the only one of its step.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        settings: ActivationCheckpointing,
        device: torch.device,
        compiles: bool = False,
        restored: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ):
        self._restored = restored
        self.settings, self.device = settings, device
        self._compiled = CompiledBudget() if compiles else None
        self.room: Callable[[bool], int] | None = None
        self._chosen = Chosen()
        self._known: OrderedDict[Any, Choice] = OrderedDict()
        self._warned: set[str] = set()
        blocks = blocks_of(model, SETTING)[:: settings.every]
        self._skeleton: Skeleton | None = None
        try:
            self._skeleton = Skeleton(model, task, device)
        except Exception as error:  # whatever a module of any kind raises when it is copied
            self._warn(error)
        self._model = model
        for index, block in enumerate(blocks):
            block.forward = functools.partial(self._chosen.call, index, BlockState(block, "budget"), block.forward)

    @property
    def compile_options(self) -> Mapping[str, Any]:
        """Arguments for `torch.compile`."""
        return {} if self._compiled is None else self._compiled.compile_options

    def prepare(self, batch: Any, autocast: contextlib.AbstractContextManager[Any], is_last: bool = False) -> None:
        """Choose for the forward of this micro-batch. Call outside `autocast`, the context of that forward.

        Where the model cannot be traced, all blocks are recomputed, with one warning.
        """
        is_auto = self.settings.bytes == "auto" and self.room is not None
        alone = is_auto and is_last and all(p.grad is None for p in self._model.parameters())
        room = self.room(alone) if is_auto and self.room is not None else 0
        key = (tuple((tuple(t.shape), t.dtype) for t in tensors_in(batch)), self._model.training, room, alone)
        if key not in self._known:
            with self._restored():
                choice = self._choose(batch, autocast, room, alone)
            self._known[key] = choice
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        self._chosen.begin(self._known[key])
        if self._compiled is not None:
            self._begin_compiled(self._compiled, key[:2], batch, autocast, room)
            self._chosen.edition = self._compiled.edition

    def _begin_compiled(
        self,
        compiled: CompiledBudget,
        key: Any,
        batch: Any,
        autocast: contextlib.AbstractContextManager[Any],
        room: int,
    ) -> None:
        if self.settings.bytes != "auto":
            compiled.begin(key, parse_memory_size(self.settings.bytes, total=0))
            return
        loss = compiled.loss_memory(key)
        if loss is None and self._skeleton is not None:
            try:
                with self._restored():
                    loss = loss_memory(self._skeleton, batch, autocast)
            except Exception as error:  # whatever the task raises on tensors without data
                log.debug("the loss cannot be traced, which the compiled graph says", exc_info=error)
        compiled.begin(key, None if loss is None else room, loss)

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
        options = choose(calls, budget)
        self._report(calls, options, budget)
        return _by_call(calls, options)

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
        safe. It is often more than that: a block that is recomputed needs all of its activations anyway. Where a guess
        peaks above the room, the next one is half-way back.
        """
        largest = sum(max(option.size for option in options_of(call)) for call in calls)
        budget: int | None = None  # the largest traced within the room; the first one in any case
        beyond: int | None = None  # the smallest traced that is not
        tried = sum(call.inputs for call in calls)
        for _ in range(MOST_TRACES):
            choice = _by_call(calls, choose(calls, tried))
            peak = peak_with(choice, skeleton, batch, autocast, self.settings.every, alone)
            if peak > room and budget is not None:
                beyond = tried
            else:
                budget, tried = tried, tried + room - peak
            if beyond is not None:
                tried = min(tried, (budget + beyond) // 2)
            if tried - budget < room // 64 or budget >= largest:
                break
        assert budget is not None, "traced at least once"
        return budget

    def _report(self, calls: list[BlockCall], options: list[Option], budget: int) -> None:
        kept = sum(option.size for option in options)
        whole = sum(option.kept is None for option in options)
        part = sum(bool(option.kept) for option in options)
        if kept > budget and "budget" not in self._warned:
            self._warned.add("budget")
            log.warning(
                "activation_checkpointing.bytes=%s: leaves %s, but these blocks keep at least %s of a micro-batch, and "
                "keep that; a smaller micro-batch needs less",
                self.settings.bytes,
                bytes_text(max(0, budget)),
                bytes_text(least(calls)),
            )
        elif not self._known and self._compiled is None:
            log.info(
                "activation checkpointing keeps %s of %s: %d of %d blocks whole, %d in part",
                bytes_text(kept),
                bytes_text(budget),
                whole,
                len(calls),
                part,
            )

    def _warn(self, error: Exception) -> None:
        if "trace" not in self._warned:
            self._warned.add("trace")
            reason = (str(error).strip().splitlines() or [""])[0]
            log.warning(
                "%s: what the blocks keep cannot be traced (%s: %s); they are all recomputed, as with "
                "activation_checkpointing=full",
                SETTING,
                type(error).__name__,
                reason,
            )


def _by_call(calls: list[BlockCall], options: list[Option]) -> Choice:
    return {(c.block, c.number): option for c, option in zip(calls, options, strict=True)}


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
    chosen = Chosen()
    chosen.begin(choice)

    def wrapping(index: int, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        if index % every:
            return forward
        return functools.partial(chosen.call, index // every, BlockState(block, "budget"), forward)

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
        skeleton.forward_and_backward(fake, autocast, counter)
    return counter.peak - before
