"""Trial calls of a task: its results for a few samples, together and in halves, which `trials.loss_check` compares.

    probe = TaskProbe(ProbeInputs(task, model, samples, device, seed))
    whole, first, second = probe(samples.whole), probe(samples.first_half), probe(samples.second_half)

Every call has its own copy of the batch, and starts with the same state and the same seeds. None leaves a trace.
"""

import contextlib
import functools
import pickle
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from trainapp.data.batch import map_tensors, tensors_in
from trainapp.draws.sample_draws import SampleDraws
from trainapp.errors import summary_of
from trainapp.losses import contrastive
from trainapp.losses.losses import CheckedTask, Metrics, evaluate_metrics, has_embeddings
from trainapp.models.inspect import batchnorms_of_task, evaluation_mode
from trainapp.rng import preserved_rng, seed_from
from trainapp.state.contents import Contents
from trainapp.state.snapshot import Snapshot
from trainapp.state.stateful import Owner, Stateful, held_tensors
from trainapp.torch_private import BatchNorm, strided_parts
from trainapp.trials.operations import Observer, RandomRounding
from trainapp.trials.samples import Samples, TrialBatch

# Bytes of model and task up to which they are copied whole: 16 million numbers in fp32, twice as many bytes in fp64.
MAX_COPIED_BYTES = 64 * 2**20


class Sums(NamedTuple):
    """The task's loss, count and metrics for a batch."""

    loss: float
    divisor: float  # the count
    metrics: Mapping[str, float]
    # Whether the call drew from NumPy's or Python's global generator, or from one of theirs in an attribute.
    drew_outside_torch: bool
    metrics_error: str = ""  # why there are no metrics; "" if they could be read


@dataclass(frozen=True)
class ProbeInputs:
    """A task and what it is called with."""

    task: CheckedTask
    model: nn.Module
    samples: Samples
    device: torch.device  # to which model, task and batches are moved
    seed: int  # of each call
    stateful_metrics: Collection[str] = ()  # names of metrics that are not numbers
    # Names of the parameters that forwards are known to write, once training has shown them. Before, in a small model,
    # any parameter may be: None.
    written: Sequence[str] | None = None


class TaskProbe:
    """Calls of a task with one of the samples' batches. Of an embedding loss, those of its `embed`.

    Args:
        inputs: the task and what it is called with.
        call_context: makes the context manager of a call, such as autocast.
        dtype: of floating-point tensors in batches; None: as they are.

    Attributes: `snapshot`, whose `lost` are parameters that a call has written for good; `with_gradients`, whether
    calls record a graph, False at first: without one they take less memory; `batchnorms_of_embed`, see `DrawRecord`.
    """

    def __init__(
        self,
        inputs: ProbeInputs,
        call_context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        dtype: torch.dtype | None = None,
    ):
        task = inputs.task
        model = inputs.model
        self.samples = inputs.samples
        self.device = inputs.device
        self.seed = inputs.seed
        self.dtype = dtype
        self.with_gradients = False
        self._compute: Callable[..., Any] = functools.partial(task, model)
        if has_embeddings(task):
            self._compute = functools.partial(sum_over_embeddings, task, model)
        self._call_context = call_context
        self._stateful_metrics = inputs.stateful_metrics
        self._model_and_task = [model, task.unchecked]

        # Modules of the task are moved, too, which happens later anyway.
        stateful = Stateful(model=model, task=task.unchecked)
        self._roots = [model, *stateful.modules.values()]
        self._batchnorms: list[nn.Module] = []
        for root in self._roots:
            self._batchnorms.extend(module for module in root.modules() if isinstance(module, BatchNorm))
        for root in self._roots:
            root.to(self.device)

        # Of an embedding loss: which of its own BatchNorm layers `embed` calls.
        self.batchnorms_of_embed: set[str] = set()
        self._batchnorms_of_task: dict[nn.Module, str] = {}
        if has_embeddings(task):
            self._batchnorms_of_task = {layer: name for name, layer in batchnorms_of_task(stateful, "task").items()}

        # The state with which every call starts. Of a large model, most of the memory may be frozen.
        self._generators = [owner for owner in stateful.owners.values() if owner.kind == "generator"]
        self._contents = Contents(model=model, task=task.unchecked)
        self.snapshot = Snapshot.of(stateful)
        if inputs.written is not None:
            self.snapshot.add_written(inputs.written)
            self.snapshot.take()
        elif is_small(model, task.unchecked):
            self.snapshot.take("all")
        else:
            self.snapshot.take("trained")

    @torch.no_grad()
    def __call__(
        self,
        batch: TrialBatch,
        training: bool = False,
        sample_draws: SampleDraws | None = None,
        dispatch_mode: Observer | RandomRounding | None = None,
        backward: Callable[[Tensor], None] | None = None,
    ) -> Sums:
        """Return the task's results for a batch. Raises the task's errors.

        Args:
            batch: one of the samples' batches.
            training: call in training mode, except for BatchNorm.
            sample_draws: around the whole call.
            dispatch_mode: around the operations of the task and of its metrics.
            backward: called with the loss, and with its graph; gradients in `grad` are reset afterwards.
        """
        batch_on_device = map_tensors(self._copy_to_device, batch.data)
        in_evaluation = self._batchnorms if training else self._roots
        draws_context = sample_draws or contextlib.nullcontext()
        operations_context = dispatch_mode or contextlib.nullcontext()
        recording: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.with_gradients or backward is not None:
            recording = recorded_gradients(self._model_and_task)
        try:
            with preserved_rng(self.device), self._call_context(), evaluation_mode(in_evaluation):
                seed_from(self.device, self.seed)
                states_before = self._generator_states()
                with draws_context:
                    with recording, operations_context, self._noted_batchnorms():
                        loss, count, metrics = self._compute(batch_on_device)
                        if backward is not None:
                            backward(loss)
                    # The metrics are watched apart, as their rounding is not the loss's.
                    if isinstance(dispatch_mode, Observer):
                        dispatch_mode.writes = self._written_by_call()
                        dispatch_mode.epsilon_of_loss = dispatch_mode.epsilon
                    with operations_context:  # functions among the metrics compute now
                        metric_sums, metrics_error = self._sums_of(metrics, dispatch_mode)
                drew_outside_torch = states_before != self._generator_states()
                return Sums(_as_number(loss), _as_number(count), metric_sums, drew_outside_torch, metrics_error)
        finally:
            self._contents.restore()  # first: names the global variables that the snapshot would put back, too
            self.snapshot.restore()

    @property
    def trained_leaves(self) -> list[Tensor]:
        """The tensors of model and task that have gradients after a backward."""
        return [tensor for tensor in held_tensors(self._model_and_task) if tensor.is_leaf and tensor.requires_grad]

    @property
    def written_globals(self) -> Collection[str]:
        """The names of the global variables that the calls have written."""
        return self._contents.written_globals

    @property
    def advanced_iterators(self) -> Collection[str]:
        """The names of the iterators from which the calls have taken items."""
        return self._contents.advanced_iterators

    def _written_by_call(self) -> list[str]:
        """Return what the call has changed. Not the modes of modules, which are the probe's."""
        return [name for name in self.snapshot.changed() if not name.endswith(".training")]

    @contextlib.contextmanager
    def _noted_batchnorms(self) -> Iterator[None]:
        """Note in the block which BatchNorm layers of an embedding loss are called."""
        if not self._batchnorms_of_task:
            yield
            return

        def note(module: nn.Module, _arguments: Any) -> None:
            if module in self._batchnorms_of_task:
                self.batchnorms_of_embed.add(self._batchnorms_of_task[module])

        handle = register_module_forward_pre_hook(note)  # of all modules: one of the layers' own would be their state
        try:
            yield
        finally:
            handle.remove()

    def _copy_to_device(self, tensor: Tensor) -> Tensor:
        dtype = self.dtype if tensor.is_floating_point() else None
        return tensor.to(self.device, dtype, copy=True)

    def _generator_states(self) -> bytes:
        """Return the states of Python's and NumPy's generators: torch's are tensors."""
        return generator_states(self._generators)

    def _sums_of(
        self, metrics: Mapping[str, Any], dispatch_mode: Observer | RandomRounding | None
    ) -> tuple[dict[str, float], str]:
        """Return the metrics, and why there are none; the first logged step raises the error again."""
        try:
            sums: dict[str, float] = {}
            for name, value in evaluate_metrics(metrics, self._stateful_metrics).items():
                if isinstance(value, tuple):
                    metric_sum, count = value
                    sums[name] = float(metric_sum)
                    sums[f"{name} (its count)"] = float(count)
                    continue
                sums[name] = float(value)
                if isinstance(dispatch_mode, Observer):
                    dispatch_mode.summands_of_metrics[name] = dispatch_mode.summands_of(value)
            return sums, ""
        except Exception as error:
            return {}, summary_of(error)


def sum_over_embeddings(task: Any, model: nn.Module, batch: Any) -> tuple[Tensor, int, Metrics]:
    """Return what is compared in place of an embedding loss: a sum of one number per row of the embeddings, and the
    number of rows. It is that of a batch's parts only if a row does not depend on the other samples.

    No number per row is linear in it, since rows that are normalised over the batch have a constant sum; nor its
    square, as such rows have a constant variance, and those of length 1 a constant square.
    """
    embeddings = tensors_in(contrastive.embed(task, model, batch))
    total: Tensor | None = None
    for embedding in embeddings:
        if embedding.is_complex():
            embedding = torch.view_as_real(embedding.resolve_conj())
        wide = torch.float32 if embedding.device.type == "mps" else torch.float64
        rows = embedding.to(wide).reshape(len(embedding), -1)
        weights = torch.arange(rows.shape[1], dtype=wide, device=rows.device).cos()
        # As a logarithm of large numbers, so that a change of small ones beside them shows, and without one of 0.
        numbers = torch.asinh(rows + 1) @ weights
        total = numbers.sum() if total is None else total.to(numbers.device) + numbers.sum()
    assert total is not None  # `contrastive.embed` refuses results without tensors
    return total, len(embeddings[0]), {}


def generator_states(generators: Iterable[Owner] = ()) -> bytes:
    """Return the states of Python's and NumPy's global generators, and of these others where they are no tensors."""
    states: list[Any] = [random.getstate(), np.random.get_state()]
    for owner in generators:
        state = owner.copy()
        if not isinstance(state, Tensor):
            states.append(state)
    return pickle.dumps(states)


@contextlib.contextmanager
def recorded_gradients(model_and_task: Collection[Any]) -> Iterator[None]:
    """Record a graph inside the block. A task that computes gradients leaves none in `grad`."""
    leaves = [tensor for tensor in held_tensors(model_and_task) if tensor.is_leaf]
    gradients = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None  # a backward would add to it in place
    try:
        with torch.enable_grad():
            yield
    finally:
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient


def lacks_gradients(error: RuntimeError) -> bool:
    """Return whether the call failed because a tensor has no graph, as with a gradient penalty. Reads the message,
    since torch has no error class for it (2.13).
    """
    text = str(error)
    return "does not require grad" in text or "doesn't require gradient" in text or "has requires_grad=False" in text


def _as_number(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


def is_small(*roots: Any) -> bool:
    """Return whether the tensors of model and task may be copied whole."""
    total_bytes = 0
    for tensor in held_tensors(roots):
        total_bytes += sum(part.nbytes for part in strided_parts(tensor))
    return total_bytes <= MAX_COPIED_BYTES
