"""What the blocks of a model compute and save for backward, read from its forward on tensors without data.

The forward is that of a copy of the model without memory, so that neither the model nor a generator is changed.
"""

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.data.batch import map_tensors
from trainapp.memory.live_tensors import LiveTensors
from trainapp.models.inspect import MODULE_ATTRIBUTES, blocks_of
from trainapp.rng import preserved_rng
from trainapp.techniques.costs import cost_of
from trainapp.torch_operators import CAST, CHECKPOINT_IGNORES, READ_OPERATORS, schema_of
from trainapp.torch_private import (
    DispatchMode,
    buffers_of,
    fake_tensor_mode,
    outside_dispatch_modes,
    parameters_of,
    storage_id,
    tree_leaves,
)

Task = Callable[[nn.Module, Any], tuple[Any, ...]]
OperatorCall = tuple[Any, int]  # the operator, and how many calls of it precede in the same call of the block
Wrapping = Callable[[int, nn.Module, Callable[..., Any]], Callable[..., Any]]


@dataclass
class BlockCall:
    """One call of a block. Sizes are bytes, costs those of `costs.cost_of`.

    block, number: which block, and how many calls of it precede. inputs: of its arguments, which checkpointing keeps.
    saved: what the backward needs without checkpointing. operations: how many the forward has. cost, repeated: of a
    recomputation, which ends at the last tensor to be saved, and how many operations it has. keepable: by operation,
    the size of its results and the cost of computing them again.
    """

    block: int
    number: int
    inputs: int = 0
    saved: int = 0
    operations: int = 0
    cost: float = 0.0
    repeated: int = 0
    keepable: dict[OperatorCall, tuple[int, float]] = field(default_factory=dict)


def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call takes numbers from a generator. Kept results would shift what later calls draw in a
    recomputation, so that only operations that draw nothing may be kept.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in schema_of(func).arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    return bool(
        args[place] if place < len(args) else kwargs.get("dropout_p", schema_of(func).arguments[place].default_value)
    )


class Skeleton:
    """A copy of a model and of its task, with parameters and buffers that have no data.

    device: where the tensors claim to be. Raises whatever copying raises for modules that cannot be copied.
    """

    def __init__(self, model: nn.Module, task: Task, device: torch.device):
        self.device = device
        with outside_dispatch_modes():
            self._mode = fake_tensor_mode()
            memo: dict[int, Any] = {}
            with self._mode, torch.no_grad():
                for module in model.modules():
                    for tensor in (*parameters_of(module).values(), *buffers_of(module).values()):
                        if tensor is not None and id(tensor) not in memo:
                            memo[id(tensor)] = self._without_data(tensor)
                    for name in vars(module).keys() - MODULE_ATTRIBUTES:
                        if isinstance(value := vars(module)[name], Tensor):
                            memo[id(value)] = value  # shared: a mode without data writes into no real tensor
            self._own = list(memo.values())  # `deepcopy` adds what it has copied
            self.model, self.task = copy.deepcopy((model, task), memo)
        self._forwards = [block.forward for block in blocks_of(self.model, "activation_checkpointing")]

    def _without_data(self, tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided:
            return self._mode.from_tensor(tensor)
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(empty, requires_grad=tensor.requires_grad)
        return empty.requires_grad_(tensor.requires_grad)

    @contextlib.contextmanager
    def running(self, batch: Any, wrapping: Wrapping) -> Iterator[tuple[nn.Module, Any]]:
        """The model and a batch like `batch`, with `wrapping(index, block, forward)` for the forwards of its blocks.

        Inside, no tensor has data and no generator is moved.
        """
        blocks = blocks_of(self.model, "activation_checkpointing")
        with outside_dispatch_modes(), preserved_rng(self.device), self._mode:
            for index, (block, forward) in enumerate(zip(blocks, self._forwards, strict=True)):
                block.forward = wrapping(index, block, forward)
            try:
                yield self.model, map_tensors(self._without_data, batch)
            finally:
                for block in blocks:
                    vars(block).pop("forward", None)

    def forward_and_backward(
        self, fake: Any, autocast: contextlib.AbstractContextManager[Any], counter: LiveTensors
    ) -> None:
        """Of the task on a batch that `running` has given, inside it, counted. Leaves no gradients."""
        try:
            with counter:
                with autocast:
                    loss = self.task(self.model, fake)[0]  # metrics hold the logits, and are gone before a backward
                loss.backward()
        finally:
            for parameter in self.model.parameters():
                parameter.grad = None

    def calls(self, batch: Any, autocast: contextlib.AbstractContextManager[Any], every: int) -> list[BlockCall]:
        """The calls of every `every`-th block, in order. Raises what the model raises on tensors without data."""
        recorder = _Recorder({storage_id(tensor.untyped_storage()) for tensor in self._own if _has_storage(tensor)})

        def wrapping(index: int, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
            return forward if index % every else functools.partial(recorder.record, index // every, forward)

        with self.running(batch, wrapping) as (model, fake), recorder, autocast:
            self.task(model, fake)
        return recorder.calls


class _Recorder(DispatchMode):
    """Notes what happens inside blocks. Reads of values are answered with False, 1 or 1.0.

    own: the storages of parameters and buffers, which no backward has to keep alive.
    """

    def __init__(self, own: set[int]):
        super().__init__()
        self.calls: list[BlockCall] = []
        self._own = own
        self._numbers: Counter[int] = Counter()
        self._counted: set[int] = set()  # storages that are an input of an earlier call
        self._alive: list[Any] = []  # results: a storage's number is used again once it is gone
        self._current: _Current | None = None

    def record(self, index: int, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """`forward(*inputs, **options)`, noted as a call of block `index`."""
        if self._current is not None or not torch.is_grad_enabled():
            return forward(*inputs, **options)
        given = {storage_id(t.untyped_storage()): t for t in tree_leaves((inputs, options)) if _has_storage(t)}
        fresh = given.keys() - self._counted - self._own
        self._counted |= fresh
        call = BlockCall(index, self._numbers[index], sum(given[key].untyped_storage().nbytes() for key in fresh))
        self._numbers[index] += 1
        # What an earlier call keeps as its input counts there.
        current = self._current = _Current(call, self._own | (given.keys() - fresh))
        try:
            with torch.autograd.graph.saved_tensors_hooks(current.saves, lambda tensor: tensor):
                result = forward(*inputs, **options)
        finally:
            self._current = None
        current.finish({storage_id(t.untyped_storage()) for t in tree_leaves(result) if _has_storage(t)})
        self._alive.append((given, result))
        self.calls.append(call)
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in READ_OPERATORS and getattr(args[0], "constant", None) is None:
            kind = args[0].dtype
            return False if kind == torch.bool else 1.0 if kind.is_floating_point else 1
        result = func(*args, **(kwargs or {}))
        if self._current is not None and func not in CHECKPOINT_IGNORES:
            self._alive.append(result)
            self._current.note(func, args, kwargs or {}, result)
        return result


class _Current:
    """The call that is being recorded."""

    def __init__(self, call: BlockCall, elsewhere: set[int]):
        self.call = call
        self._elsewhere = elsewhere  # storages that are alive whatever this call keeps
        self._saved: set[int] = set()
        self._written: set[int] = set()
        self._results: list[tuple[OperatorCall, frozenset[int], int, float, bool]] = []
        self._costs: list[float] = []
        self._counts: Counter[Any] = Counter()

    def saves(self, tensor: Tensor) -> Tensor:
        """Note a tensor that is saved for backward."""
        if _has_storage(tensor):
            storage = tensor.untyped_storage()
            key = storage_id(storage)
            if key not in self._elsewhere and key not in self._saved:
                self._saved.add(key)
                self.call.saved += storage.nbytes()
        self.call.repeated = len(self._costs)
        return tensor

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note an operation that was called."""
        operation = (func, self._counts[func])
        self._counts[func] += 1
        given = {storage_id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if _has_storage(t)}
        made = {storage_id(t.untyped_storage()): t for t in tree_leaves(result) if _has_storage(t)}
        if schema_of(func).is_mutable:
            self._written |= given | made.keys()
        size = sum(t.untyped_storage().nbytes() for t in made.values())
        cost = cost_of(func, args, kwargs, result)
        # Casts are cheap, and those of weights belong to all calls that autocast serves with them.
        is_own = size > 0 and not func.is_view and not made.keys() & given
        may_be_kept = is_own and func is not CAST and not draws(func, args, kwargs)
        self._results.append((operation, frozenset(made), size, cost, may_be_kept))
        self._costs.append(cost)

    def finish(self, outputs: set[int]) -> None:
        """Sum up, knowing what the block returns: that is the business of what follows."""
        call = self.call
        call.operations, call.cost = len(self._costs), sum(self._costs[: call.repeated])
        apart = outputs | self._written | self._elsewhere
        for operation, made, size, cost, may_be_kept in self._results[: call.repeated]:
            if may_be_kept and not made & apart:
                call.keepable[operation] = (size, cost)


def _has_storage(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided
