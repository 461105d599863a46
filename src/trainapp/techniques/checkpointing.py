"""Activation checkpointing trades time for memory: a block's activations are recomputed in backward, not stored.

Source: Chen et al. 2016, "Training deep nets with sublinear memory cost". The operations whose results "selective"
keeps follow Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models".
"""

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from trainapp.config.schema import ActivationCheckpointing
from trainapp.errors import TrainingStopped, UserError
from trainapp.models.inspect import blocks_of
from trainapp.state.snapshot import Snapshot, State
from trainapp.state.stateful import Owner, Stateful
from trainapp.torch_private import ATTENTION_OPERATORS, draws_numbers, set_activation_memory_budget, version_of

Mode = Literal["none", "selective", "full"]
# Cost of a mode relative to recomputing a block in full: for choosing, not for predicting time.
_COST: Mapping[Mode, float] = {"none": 0.0, "selective": 0.3, "full": 1.0}
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_MATMULS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "scaled_int8_mm")  # the last: torchao's
_SAVED_OPERATIONS = frozenset({*_MATMULS, "convolution", *ATTENTION_OPERATORS})  # by `selective`
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]  # of a forward and its recomputation
_GLOBAL_GENERATORS = {  # torch's own are handled by its `checkpoint`
    "python": Owner(random.getstate, random.setstate, "generator"),
    "numpy": Owner(np.random.get_state, np.random.set_state, "generator"),
}


def choose_modes(peaks: Mapping[Mode, int], limit: int, blocks: int) -> list[Mode]:
    """Return a mode for each block: the cheapest modes whose peak stays within the limit, or else the lowest peak.

    Every block is assumed to have an equal share of the difference between the peaks. The first blocks are recomputed
    the most, the last ones not at all: backward frees their activations before it recomputes earlier blocks.

    Args:
        peaks: bytes of a step with all blocks in one mode.
        limit: bytes.
        blocks: number of blocks.
    """
    # Compare all mixes: a mix is the number of blocks that are recomputed in full, and of those in part.
    savings = {mode: peaks["none"] - peaks[mode] for mode in _COST}  # of all blocks together
    best_mix = (0, 0)
    best_score: tuple[int, float] | None = None  # excess over the limit and cost; lower is better
    for full in range(blocks + 1):
        for selective in range(blocks + 1 - full):
            # Bytes times `blocks`, so that it is an integer.
            saved = full * savings["full"] + selective * savings["selective"]
            excess = blocks * (peaks["none"] - limit) - saved
            cost = full * _COST["full"] + selective * _COST["selective"]
            score = (max(0, excess), cost)
            if best_score is None or score < best_score:
                best_score = score
                best_mix = (full, selective)

    full, selective = best_mix
    modes: list[Mode] = []
    modes.extend(["full"] * full)
    modes.extend(["selective"] * selective)
    modes.extend(["none"] * (blocks - full - selective))
    return modes


def apply(model: nn.Module, settings: ActivationCheckpointing) -> None:
    """Checkpoint the model's blocks as the settings say. Parameter names are unchanged.

    `auto` must be resolved before, see `choose_modes`; here it means none. Raises UserError for a model without blocks,
    and for `modes` for another number of blocks.
    """
    _set_compiled_budget(model, settings.compiled_budget)
    if settings.mode == "none" and settings.modes is None:
        return

    # One mode per block: as listed, or the same for every n-th block.
    blocks = blocks_of(model, f"activation_checkpointing={settings.mode}")
    modes = settings.modes
    if modes is None:
        modes = ["none"] * len(blocks)
        if settings.mode != "auto":
            for index in range(0, len(blocks), settings.every):
                modes[index] = settings.mode
    if len(modes) != len(blocks):
        raise UserError(
            f"activation_checkpointing.modes={modes}: names {len(modes)} blocks, but {type(model).__name__} has "
            f"{len(blocks)}; give one mode per block, or null"
        )

    for block, mode in zip(blocks, modes, strict=True):
        if mode != "none":
            block.forward = functools.partial(_checkpointed, Recomputed(block), block.forward, mode)


def _set_compiled_budget(model: nn.Module, budget: float | None) -> None:
    """Set the budget for everything that `train.compile` compiles from now on, in this process."""
    if budget is not None and budget < 1:
        for name, module in model.named_modules():
            if isinstance(module, _DROPOUT) and module.p:
                # torch 2.13: the backward would draw other numbers than the forward (pytorch/pytorch#190758).
                raise UserError(
                    f"activation_checkpointing.compiled_budget={budget}: torch would recompute dropout ({name}) with "
                    "other random numbers and give wrong gradients; use dropout 0, or activation_checkpointing=full"
                )
    set_activation_memory_budget(budget)


def _checkpointed(
    recomputed: "Recomputed", forward: Callable[..., Any], mode: Mode, /, *inputs: Any, **options: Any
) -> Any:
    """Call `forward(*inputs, **options)`, recomputed in backward except for results that the mode saves.

    The first arguments are positional: a block may have arguments of the same names.
    """
    if not torch.is_grad_enabled():
        return forward(*inputs, **options)
    called = forward
    if options:  # bound, since `checkpoint` has options of its own
        called = functools.partial(forward, **options)
    make_contexts = None
    if mode == "selective":
        make_contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    # A compiled graph performs its writes once, even if it recomputes: no state needs to be restored.
    if torch.compiler.is_compiling():
        if make_contexts is None:  # the compiler refuses `noop_context_fn` by name (torch 2.13)
            return checkpoint(called, *inputs, use_reentrant=False)
        return checkpoint(called, *inputs, use_reentrant=False, context_fn=make_contexts)

    arguments = (*inputs, *options.values())
    contexts = functools.partial(recomputed.contexts, arguments, make_contexts or noop_context_fn)
    # Stopping early spares the recomputation of the last matmul, but RReLU's noise is saved before it is drawn (2.13).
    early_stop = not any(isinstance(module, nn.RReLU) for module in recomputed.block.modules())
    return checkpoint(called, *inputs, use_reentrant=False, context_fn=contexts, early_stop=early_stop)


def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return whether `selective` saves an operation's result or recomputes it."""
    # Attention with dropout is recomputed: later operations draw the same numbers only if it draws its own again.
    if operation.overloadpacket.__name__ in _SAVED_OPERATIONS and not draws_numbers(operation, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


# --- the state from which a block is recomputed: that at the start of its forward


class Recomputed:
    """The `Snapshot` of a block, with Python's and NumPy's global generators, taken in each of its forwards."""

    def __init__(self, block: nn.Module):
        self.block = block

    @functools.cached_property
    def _snapshot(self) -> Snapshot:
        stateful = Stateful(model=self.block)
        stateful.owners |= _GLOBAL_GENERATORS
        return Snapshot.of(stateful, verified=0)

    def contexts(self, inputs: Sequence[Any], make_contexts: Callable[[], Contexts]) -> Contexts:
        """Return the contexts of a forward and of its recomputation, for `context_fn` of torch's `checkpoint`.

        Args:
            inputs: the forward's inputs.
            make_contexts: makes contexts to use inside these, so that the selection of operations to save does not see
                the copies.
        """
        # The forward checks that it leaves its inputs and the state unchanged; the recomputation restores the state.
        self._snapshot.take()
        state = self._snapshot.released()
        versions = [(tensor, version_of(tensor)) for tensor in inputs if isinstance(tensor, Tensor)]

        inside_forward, inside_recomputation = make_contexts()
        make_forward = functools.partial(self._forward, state, versions, inside_forward)
        make_recomputation = functools.partial(self._recomputation, state, inside_recomputation)
        return _Reusable(make_forward), _Reusable(make_recomputation)

    @contextlib.contextmanager
    def _forward(
        self, state: State, input_versions: list[tuple[Tensor, int]], inside: AbstractContextManager[Any]
    ) -> Iterator[None]:
        """Raise TrainingStopped if the block has modified the state from which its recomputation starts."""
        with inside:
            yield

        written = None
        if any(version_of(tensor) != version for tensor, version in input_versions):
            written = "a tensor that it is called with"
        input_versions.clear()  # the tensors must not live as long as the graph
        if state.has_new_versions():
            written = "a parameter"
        if written is not None:
            raise TrainingStopped(
                f"activation_checkpointing: the forward of a {type(self.block).__name__} writes in place to {written}, "
                "so it cannot be recomputed; write to a copy (a first `inplace=True` often writes to the input), "
                "or use activation_checkpointing=none"
            )
        state.drop_unwritten()

    @contextlib.contextmanager
    def _recomputation(self, state: State, inside: AbstractContextManager[Any]) -> Iterator[None]:
        """Restore the state for the recomputation. Raises TrainingStopped if it was written since the forward."""
        if state.has_lost():
            raise TrainingStopped(
                f"activation_checkpointing: a tensor of a {type(self.block).__name__} was written by something "
                "else between its forward and its backward, so it cannot be recomputed; register it as a "
                "buffer of the block, or use activation_checkpointing=none"
            )
        with self._snapshot.replayed(state), inside:
            yield


class _Reusable:
    """A context that can be entered once per backward: a retained graph has several."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]):
        self._make = make
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(self._make())

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)
