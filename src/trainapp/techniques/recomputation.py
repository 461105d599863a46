"""Restores a block's state for recomputation, to that at the start of its forward."""

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from torch import Tensor, nn

from trainapp.errors import TrainingStopped
from trainapp.snapshot import Snapshot, State
from trainapp.stateful import Owner, Stateful
from trainapp.torch_private import version_of

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
_GLOBAL = {  # torch's own are handled by its `checkpoint`
    "python": Owner(random.getstate, random.setstate, "generator"),
    "numpy": Owner(np.random.get_state, np.random.set_state, "generator"),
}


class Recomputed:
    """The `Snapshot` of a block, with Python's and NumPy's global generators, taken in each of its forwards."""

    def __init__(self, block: nn.Module):
        self.block = block

    @functools.cached_property
    def _snapshot(self) -> Snapshot:
        stateful = Stateful(model=self.block)
        stateful.owners |= _GLOBAL
        return Snapshot.of(stateful, verified=0)

    def contexts(self, inputs: Sequence[Any], select: Callable[[], Contexts]) -> Contexts:
        """The contexts of a forward and of its recomputation, for `context_fn` of torch's `checkpoint`.

        inputs: the forward's inputs. select: makes contexts to use inside these, so that the selection of operations to
        keep does not see the copies.
        """
        self._snapshot.take()
        state, (forward, recomputation) = self._snapshot.released(), select()
        versions = [(tensor, version_of(tensor)) for tensor in inputs if isinstance(tensor, Tensor)]
        return (
            _Reusable(functools.partial(self._forward, state, versions, forward)),
            _Reusable(functools.partial(self._recomputation, state, recomputation)),
        )

    @contextlib.contextmanager
    def _forward(
        self, state: State, inputs: list[tuple[Tensor, int]], selecting: AbstractContextManager[Any]
    ) -> Iterator[None]:
        """Raises TrainingStopped for a block that has modified the state from which its recomputation starts."""
        with selecting:
            yield
        written = "a tensor that it is called with" if any(version_of(t) != version for t, version in inputs) else None
        inputs.clear()  # they must not live as long as the graph
        if state.versions != state.structure.versions():
            written = "a parameter"
        if written:
            raise TrainingStopped(
                f"activation_checkpointing: the forward of a {type(self.block).__name__} writes in place to {written}, "
                "so that it cannot be recomputed; write to a copy (a first `inplace=True` often writes to the input), "
                "or use activation_checkpointing=none"
            )
        state.drop_unwritten()

    @contextlib.contextmanager
    def _recomputation(self, state: State, selecting: AbstractContextManager[Any]) -> Iterator[None]:
        if state.has_lost():
            raise TrainingStopped(
                f"activation_checkpointing: a tensor of a {type(self.block).__name__} was written by something "
                "else between its forward and its backward, so that it cannot be recomputed; register it as a "
                "buffer of the block, or use activation_checkpointing=none"
            )
        try:
            with self._snapshot.replayed(state), selecting:
                yield
        except RuntimeError as error:
            if "has been mutated" not in str(error):
                raise
            raise RuntimeError(
                "activation_checkpointing=selective: a block writes in place to a result that is kept, as "
                "ReLU(inplace=True) after a linear layer does; use activation_checkpointing=full"
            ) from error


class _Reusable:
    """A context that can be entered once per backward: a retained graph has several."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]):
        self._make, self._stack = make, contextlib.ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(self._make())

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)
