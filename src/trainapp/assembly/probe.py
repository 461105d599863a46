"""Trial calls of a task: its results for a few samples, together and in halves, which `assembly.checks` compares.

    probe = TaskProbe(task, model, samples, device, seed)
    whole, first, second = probe("ab"), probe("a"), probe("b")

Every call has its own copy of the batch, and starts with the same state and the same seeds. None leaves a trace.
Whatever cannot be tried is recorded in `Resources.checks` with the reason.
"""

import contextlib
import functools
import pickle
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from trainapp.assembly.samples import Samples
from trainapp.data.batch import map_tensors, tensors_in
from trainapp.draws.sample_draws import SampleDraws
from trainapp.errors import summary_of
from trainapp.losses.losses import CheckedTask, evaluate_metrics
from trainapp.models.inspect import evaluation_mode
from trainapp.rng import preserved_rng, seed_from
from trainapp.state.contents import Contents
from trainapp.state.snapshot import Snapshot
from trainapp.state.stateful import Stateful, held_tensors, is_expanded
from trainapp.torch_private import BatchNorm, DispatchMode, draws_numbers, storage_id, strided_parts

Compute = Callable[..., tuple[Tensor, Any, Mapping[str, Any]]]  # of (task, model, batch on the device)

# Bytes of model and task up to which they are copied whole: 16 million numbers in fp32, twice as many bytes in fp64.
MAX_COPIED_BYTES = 64 * 2**20
_ROUNDED_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})  # torch multiplies no fp8


class Sums(NamedTuple):
    """The task's loss, count and metrics for a batch."""

    loss: float
    divisor: float  # the count
    metrics: Mapping[str, float]
    # Whether the call drew from NumPy's or Python's global generator, or from one of theirs in an attribute.
    drew_outside_torch: bool
    metrics_error: str = ""  # why there are no metrics; "" if they could be read


class TaskProbe:
    """Calls of a task with one of the `samples`' batches, by its name.

    Args:
        task: the task.
        model: what it is called with.
        samples: the batches.
        device: to which model, task and batches are moved.
        seed: of each call.
        stateful_metrics: names of metrics that are not numbers.
        compute: the results to compare; None calls the task.
        call_context: makes the context manager of a call, such as autocast.
        dtype: of floating-point tensors in batches; None: as they are.

    Attributes: `snapshot`, whose `lost` are parameters that a call has written for good; `with_gradients`, whether
    calls record a graph, False at first: without one they take less memory.
    """

    def __init__(
        self,
        task: CheckedTask,
        model: nn.Module,
        samples: Samples,
        device: torch.device,
        seed: int,
        stateful_metrics: Collection[str] = (),
        *,
        compute: Compute | None = None,
        call_context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        dtype: torch.dtype | None = None,
    ):
        self.samples = samples
        self.device = device
        self.seed = seed
        self.dtype = dtype
        self.with_gradients = False
        self._compute: Callable[..., Any] = functools.partial(task, model)
        if compute is not None:
            self._compute = functools.partial(compute, task, model)
        self._call_context = call_context
        self._stateful_metrics = stateful_metrics
        self._model_and_task = [model, task.unchecked]

        # Modules of the task are moved, too, which happens later anyway.
        stateful = Stateful(model=model, task=task.unchecked)
        self._roots = [model, *stateful.modules.values()]
        self._batchnorms: list[nn.Module] = []
        for root in self._roots:
            self._batchnorms.extend(module for module in root.modules() if isinstance(module, BatchNorm))
        for root in self._roots:
            root.to(device)

        # The state with which every call starts. Of a large model, most of the memory may be frozen.
        self._generators = [owner for owner in stateful.owners.values() if owner.kind == "generator"]
        self._contents = Contents(model, task.unchecked)
        self.snapshot = Snapshot.of(stateful)
        self.snapshot.take("all" if is_small(model, task.unchecked) else "trained")

    @torch.no_grad()
    def __call__(
        self,
        batch_name: str,
        training: bool = False,
        sample_draws: SampleDraws | None = None,
        dispatch_mode: "Observer | RandomRounding | None" = None,
    ) -> Sums:
        """Return the task's results for a batch. Raises the task's errors.

        Args:
            batch_name: of the samples' batches.
            training: call in training mode, except for BatchNorm.
            sample_draws: around the whole call.
            dispatch_mode: around the operations of the task and of its metrics.
        """
        batch = map_tensors(self._copy_to_device, self.samples.batches[batch_name])
        in_evaluation = self._batchnorms if training else self._roots
        draws_context = sample_draws or contextlib.nullcontext()
        operations_context = dispatch_mode or contextlib.nullcontext()
        recording: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.with_gradients:
            recording = recorded_gradients(self._model_and_task)
        try:
            with preserved_rng(self.device), self._call_context(), evaluation_mode(in_evaluation):
                seed_from(self.device, self.seed)
                states_before = self._generator_states()
                with draws_context:
                    with recording, operations_context:
                        loss, count, metrics = self._compute(batch)
                    # The metrics are watched apart, as their rounding is not the loss's.
                    if isinstance(dispatch_mode, Observer):
                        dispatch_mode.writes = self.snapshot.changed()
                        dispatch_mode.epsilon_of_loss = dispatch_mode.epsilon
                    with operations_context:  # functions among the metrics compute now
                        metric_sums, metrics_error = self._sums_of(metrics, dispatch_mode)
                drew_outside_torch = states_before != self._generator_states()
                return Sums(_as_number(loss), _as_number(count), metric_sums, drew_outside_torch, metrics_error)
        finally:
            self.snapshot.restore()
            self._contents.restore()

    @property
    def written_globals(self) -> Collection[str]:
        """The names of the global variables that the calls have written."""
        return self._contents.written_globals

    def _copy_to_device(self, tensor: Tensor) -> Tensor:
        dtype = self.dtype if tensor.is_floating_point() else None
        return tensor.to(self.device, dtype, copy=True)

    def _generator_states(self) -> bytes:
        """Return the states of Python's and NumPy's generators: torch's are tensors."""
        states: list[Any] = [random.getstate(), np.random.get_state()]
        for owner in self._generators:
            state = owner.copy()
            if not isinstance(state, Tensor):
                states.append(state)
        return pickle.dumps(states)

    def _sums_of(
        self, metrics: Mapping[str, Any], dispatch_mode: "Observer | RandomRounding | None"
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
    """Return whether torch should compute a gradient, or take a hook, of a tensor without a graph, as for a gradient
    penalty: no class of errors tells it (2.13).
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


# --- the operations of a call


class Observer(DispatchMode):
    """A watch over the operations inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = False  # whether any operation draws random numbers, from whatever generator
        # The relative rounding error of the coarsest floating-point dtype in results, of metrics too; 0 without any.
        self.epsilon = 0.0
        self.epsilon_of_loss = 0.0  # the same before the metrics were computed
        self.writes: list[str] = []  # what the call has changed of the model's or the task's state
        self.summands_of_metrics: dict[str, int] = {}  # by name; 0 if unknown
        # Sums, with the number of their summands, by id: tensors, so that no other one gets the id.
        self._sums: dict[int, tuple[Tensor, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.draws = self.draws or draws_numbers(func, args, kwargs or {})
        for tensor in tensors_in(result):
            if tensor.is_floating_point():
                self.epsilon = max(self.epsilon, torch.finfo(tensor.dtype).eps)

        # Remember sums, and casts of sums, with the number of their summands.
        if isinstance(result, Tensor) and args and isinstance(args[0], Tensor):
            summed = args[0]
            is_sum = func.overloadpacket is torch.ops.aten.sum
            is_cast = result.ndim == summed.ndim == 0
            if is_sum or is_cast:
                self._sums[id(result)] = (result, self.summands_of(summed) or summed.numel())
        return result

    def summands_of(self, tensor: Tensor) -> int:
        """Return the number of elements that were added up to this sum; 0 if it is none, or not seen."""
        _, number = self._sums.get(id(tensor), (None, 0))
        return number


class RandomRounding(DispatchMode):
    """A mode that perturbs each new floating-point result by one rounding error, at random: one epsilon of its dtype,
    of fp32 at least. The change of the outcome shows how far rounding may take it, whatever cancels out or is compared
    in between (Parker 1997, Monte Carlo arithmetic). Integers, such as masks and counts, are exact.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator(device).manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)

        # Without numbers that are rounded already, such as in a mask or in `zeros`, the result is exact.
        arguments = [tensor for tensor in tensors_in([list(args), kwargs]) if _has_own_storage(tensor)]
        if not any(tensor.is_floating_point() for tensor in arguments):
            return result

        # Round what is new: not a view, and not written in place, which would round its other values, too.
        argument_storages = {storage_id(tensor.untyped_storage()) for tensor in arguments}
        for tensor in tensors_in(result):
            if not _has_own_storage(tensor):
                continue
            is_new = storage_id(tensor.untyped_storage()) not in argument_storages
            if is_new and tensor.dtype in _ROUNDED_DTYPES and not is_expanded(tensor):
                self._round(tensor)
        return result

    def _round(self, tensor: Tensor) -> None:
        epsilon = max(torch.finfo(tensor.dtype).eps, torch.finfo(torch.float32).eps)

        # Up or down, at random. Suspended, as these numbers are not the samples'.
        with SampleDraws.suspended():
            options: dict[str, Any] = {"device": tensor.device, "generator": self._generator, "dtype": torch.int8}
            bits = torch.randint(0, 2, tensor.shape, **options)
        signs = (2 * bits - 1).to(tensor.dtype)

        # Leave integers as they are. Larger numbers have no fractions, but may have been rounded.
        is_integer = tensor == tensor.round()
        is_exact = is_integer & (tensor.abs() < 0.25 / epsilon)
        signs.masked_fill_(is_exact, 0)
        tensor.mul_(1 + epsilon * signs)


def _has_own_storage(tensor: Tensor) -> bool:
    """Return whether the tensor has one storage of its own kind: it is not sparse, nested or of another subclass."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested
