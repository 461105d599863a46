"""Trial calls of a task: its results for a few samples, together and in halves, which `assembly.checks` compares.

    samples = first_samples(data, seed)
    trial = Trials(task, model, samples, snapshot, device, seed)
    whole, first, second = trial("ab"), trial("a"), trial("b")

Every call has its own copy of the batch, and starts with the same state and the same seeds. None leaves a trace.
"""

import contextlib
import pickle
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from trainapp.data.batch import map_tensors, tensors_in
from trainapp.data.loader import Fetcher, Request
from trainapp.losses.losses import CheckedTask
from trainapp.rng import preserved_rng, seed_from
from trainapp.snapshot import Snapshot
from trainapp.stateful import Stateful
from trainapp.torch_private import BatchNorm

SAMPLES = 4
TOGETHER = ("ab", "ba", "aa", "bb")


class Samples(NamedTuple):
    """The batches to compare, on the CPU.

    batches: `a` and `b` are halves of `number` samples, or both the first half; `ab` is the two together, and `ba`,
    `aa` and `bb` are in other orders, as far as they are known to hold the same values as the halves. same: whether
    `ab` is: padding or graphs may depend on what else is in a batch.
    """

    number: int
    batches: dict[str, Any]
    same: bool


class Sums(NamedTuple):
    """The task's loss and count for a batch. drawn: whether the call may have drawn random numbers."""

    loss: float
    divisor: float
    dtype: torch.dtype = torch.float32
    drawn: bool = False


def first_samples(data: Any, seed: int) -> Samples | None:
    """The first samples of a data set, in batches; None for a single sample."""
    count = min(SAMPLES, len(data))
    if count < 2:
        return None
    halves = {"a": list(range(count // 2)), "b": list(range(count // 2, count))}

    def batch(name: str) -> Any:
        return Fetcher(data, seed)[Request(0, [index for half in name for index in halves[half]])]

    batches = {name: batch(name) for name in ("a", "b", *TOGETHER)}
    known = [name for name in TOGETHER if consists_of(batches[name], [batches[half] for half in name])]
    if "ab" in known:
        return Samples(count, {name: batches[name] for name in ("a", "b", *known)}, True)
    if "aa" in known:
        return Samples(count, {"a": batches["a"], "b": batches["a"], "ab": batches["aa"]}, True)
    return Samples(count, {name: batches[name] for name in ("a", "b", "ab")}, False)


def consists_of(batch: Any, parts: Sequence[Any]) -> bool:
    """Whether each tensor of the batch is the concatenation of its parts in some dimension, ignoring tensors that are
    identical in all of them.
    """
    of_each = [tensors_in(batch), *map(tensors_in, parts)]
    if len({len(tensors) for tensors in of_each}) > 1:
        return False
    together = list(zip(*of_each, strict=True))
    if any(t.layout is not torch.strided or t.is_nested for tensors in together for t in tensors):
        return False
    of_samples = [tensors for tensors in together if not all(torch.equal(tensors[0], t) for t in tensors[1:])]
    return bool(of_samples) and all(_is_made_of(whole, pieces) for whole, *pieces in of_samples)


def _is_made_of(whole: Tensor, pieces: list[Tensor]) -> bool:
    for dimension in range(whole.ndim):
        with contextlib.suppress(RuntimeError):  # other shapes
            if torch.equal(whole, torch.cat(pieces, dimension)):
                return True
    return False


class Trials:
    """Calls of a task with one of the `samples`' batches, by its name, without gradients.

    snapshot: undoes what a call changes, to the state at construction. Collective with FSDP.
    """

    def __init__(
        self, task: CheckedTask, model: nn.Module, samples: Samples, snapshot: Snapshot, device: torch.device, seed: int
    ):
        self.task, self.model, self.samples = task, model, samples
        self.snapshot, self.device, self.seed = snapshot, device, seed
        stateful = Stateful(model=model, task=task.unchecked)
        self.modules = [part for root in (model, *stateful.modules.values()) for part in root.modules()]
        self._generators = [owner for owner in stateful.owners.values() if owner.kind == "generator"]
        self.lost: list[str] = []  # parameters that a call has written, which could not be restored
        snapshot.take("trained")

    @torch.no_grad()
    def __call__(
        self,
        name: str,
        training: bool = False,
        within: contextlib.AbstractContextManager[Any] | None = None,
    ) -> Sums:
        """The task's results for a batch. training: in training mode, except for BatchNorm. within: around the task.

        Raises the task's errors.
        """
        batch = map_tensors(lambda tensor: tensor.to(self.device, copy=True), self.samples.batches[name])
        try:
            with preserved_rng(self.device):
                for module in self.modules:
                    if not training or isinstance(module, BatchNorm):
                        module.eval()
                seed_from(self.device, self.seed)
                before = self._generator_states()
                with within or contextlib.nullcontext():
                    loss, count, _ = self.task(self.model, batch)
                return Sums(float(loss), float(count), loss.dtype, before != self._generator_states())
        finally:
            self.snapshot.restore()
            self.lost += [name for name in self.snapshot.lost if name not in self.lost]

    def _generator_states(self) -> bytes:
        """The states of the global generators and of those in attributes, for comparison."""
        states = [random.getstate(), np.random.get_state(), torch.default_generator.get_state().numpy()]
        if self.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self.device).numpy())
        own = [owner.copy() for owner in self._generators]
        return pickle.dumps((states, [state.numpy() if isinstance(state, Tensor) else state for state in own]))
