"""Trial calls of a task: its results for a few samples, together and in halves, which `assembly.checks` compares.

    trial = TaskProbe(task, model, samples, device, seed)
    whole, first, second = trial("ab"), trial("a"), trial("b")

Every call has its own copy of the batch, and starts with the same state and the same seeds. None leaves a trace.
Whatever cannot be tried is recorded in `Resources.checks` with the reason.
"""

import contextlib
import copy
import functools
import logging
import pickle
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from trainapp.config.schema import Config
from trainapp.data.batch import map_tensors, tensors_in
from trainapp.data.loader import Fetcher, Request
from trainapp.errors import summary_of
from trainapp.losses.losses import CheckedTask, evaluate_metrics
from trainapp.memory.cpu import uncompiled
from trainapp.models.inspect import evaluation_mode
from trainapp.rng import SampleDraws, preserved_rng, seed_from
from trainapp.state.snapshot import Snapshot
from trainapp.state.stateful import Stateful, held_tensors, is_expanded
from trainapp.torch_private import BatchNorm, DispatchMode, draws_numbers, storage_id, strided_parts
from trainapp.units import listed

SAMPLES = 4
MOST_COPIED = 64 * 2**20  # bytes of a model that is copied whole
DOUBLE = "fp64"  # the precision of copies
_ROUNDED = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})  # torch multiplies no fp8
T = TypeVar("T")
log = logging.getLogger(__name__)


class Cut(NamedTuple):
    """A batch and its halves as training makes them: see `assembly.padding`.

    names: theirs in `Samples.batches`, the whole one first; empty if they are not compared. reason: why; "" for data
    whose batches torch stacks. is_padded: whether the whole batch is known to differ from its halves by padding alone.
    """

    names: tuple[str, ...] = ()
    reason: str = ""
    is_padded: bool = False


UNEVEN = ("first", "rest")  # names of batches: a cut into unequal parts


class Samples(NamedTuple):
    """The batches to compare, on the CPU.

    batches: `a` and `b` are halves of `number` samples, and `ab` is the two together. same: whether they are known to
    hold the same values: padding and graphs may depend on what else is in a batch. Then there are `ba`, `aa` and `bb`,
    too, or `b` is the first half again; and of four samples `first` and `rest`, a cut into unequal parts. cut: batches
    that may hold other values than their halves.
    """

    number: int
    batches: dict[str, Any]
    same: bool
    cut: Cut = Cut()

    def positions(self, name: str) -> list[int]:
        """Of a batch's samples: the letters are halves, `a` and `A` of the first positions."""
        if name == "first":
            return [0]
        if name == "rest":
            return list(range(1, self.number))
        half = self.number // 2
        positions: list[int] = []
        for part in name:
            positions += range(half) if part in "aA" else range(half, self.number)
        return positions


class Sums(NamedTuple):
    """The task's loss, count and metrics for a batch. drawn: whether the call drew from NumPy's or Python's global
    generator, or from one of theirs in an attribute. metrics_error: why there are no metrics; "" if they could be read.
    """

    loss: float
    divisor: float
    metrics: Mapping[str, float]
    drawn: bool
    metrics_error: str = ""


def first_samples(data: Any, indices: Sequence[Any], seed: int) -> Samples | None:
    """These samples of a data set, in batches; None for a single sample."""
    number = len(indices) // 2 * 2
    if number < 2:
        return None
    first, second = list(indices[: number // 2]), list(indices[number // 2 : number])
    whole, a, b = (Fetcher(data, seed)[Request(0, own)] for own in (first + second, first, second))
    if dims := batch_dims(whole, [a, b]):
        orders = {"ba": (b, a), "aa": (a, a), "bb": (b, b)}
        others = {name: joined(whole, parts, dims) for name, parts in orders.items()}
        if number > 2:
            uneven = [Fetcher(data, seed)[Request(0, indices)] for indices in (first[:1], first[1:] + second)]
            if batch_dims(whole, uneven):
                others |= dict(zip(UNEVEN, uneven, strict=True))
        return Samples(number, {"ab": whole, "a": a, "b": b, **others}, True)
    twice = Fetcher(data, seed)[Request(0, first * 2)]
    if batch_dims(twice, [a, a]):
        return Samples(number, {"ab": twice, "a": a, "b": a}, True)
    return Samples(number, {"ab": whole, "a": a, "b": b}, False)


def batch_dims(batch: Any, parts: Sequence[Any]) -> list[int | None]:
    """For each tensor of the batch the dimension in which it is the concatenation of its parts, None for one that is
    identical in all of them. Empty if some tensor is neither, or if all are identical.
    """
    of_each = [tensors_in(batch), *map(tensors_in, parts)]
    if len({len(tensors) for tensors in of_each}) > 1:
        return []
    dims: list[int | None] = []
    for whole, *pieces in zip(*of_each, strict=True):
        is_same = all(equal_tensors(whole, piece) for piece in pieces)
        found = (dim for dim in range(whole.dim()) if not is_same and are_joined(whole, pieces, dim))
        dims.append(next(found, None))
        if dims[-1] is None and not is_same:
            return []
    return dims if any(dim is not None for dim in dims) else []


def equal_tensors(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of a batch are equal, also sparse and nested ones, for which torch has no `equal`."""
    if (a.layout, a.dtype, a.is_nested, a.dim()) != (b.layout, b.dtype, b.is_nested, b.dim()):
        return False
    if a.is_nested:
        rows, others = a.unbind(), b.unbind()
        return len(rows) == len(others) and all(map(torch.equal, rows, others))
    if a.layout is torch.sparse_coo:
        a, b = a.coalesce(), b.coalesce()
    return a.shape == b.shape and all(map(torch.equal, strided_parts(a), strided_parts(b)))


def are_joined(whole: Tensor, pieces: list[Tensor], dimension: int) -> bool:
    """Whether the tensor is the concatenation of the pieces in this dimension."""
    with contextlib.suppress(RuntimeError):  # other shapes
        return equal_tensors(whole, _concatenated(pieces, dimension))
    return False


def _concatenated(tensors: Sequence[Tensor], dimension: int) -> Tensor:
    """`torch.cat`, also for what it does not take: compressed sparse tensors, and nested ones by their rows."""
    first = tensors[0]
    if first.is_nested:
        rows = [row for tensor in tensors for row in tensor.unbind()]
        if dimension:
            raise RuntimeError("nested tensors are joined in their first dimension")
        return torch.nested.as_nested_tensor(rows, layout=first.layout)
    if first.layout in (torch.sparse_csr, torch.sparse_csc):
        return torch.cat([tensor.to_sparse_coo() for tensor in tensors], dimension).to_sparse(layout=first.layout)
    return torch.cat(list(tensors), dimension)


def joined(batch: Any, parts: Sequence[Any], dims: Sequence[int | None]) -> Any:
    """The batch with other parts in its place. dims: the batch's, see `batch_dims`."""
    pieces = zip(dims, *map(tensors_in, parts), strict=True)

    def replaced(tensor: Tensor) -> Tensor:
        dim, *tensors = next(pieces)
        return tensor if dim is None else _concatenated(tensors, dim)

    return map_tensors(replaced, batch)


class TaskProbe:
    """Calls of a task with one of the `samples`' batches, by its name.

    stateful_metrics: names of metrics that are not numbers. compute: the results of (task, model, batch on the device);
    None calls the task. around: makes what is entered around a call. to: the dtype of floating-point tensors in
    batches; None: as it is.
    Attributes: `dtype`, which is `to`; `snapshot`, whose `lost` are parameters that a call has written for good;
    `with_gradients`, whether calls record a graph, False at first: without one they take less memory.
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
        compute: Callable[..., tuple[Tensor, Any, Mapping[str, Any]]] | None = None,
        around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        to: torch.dtype | None = None,
    ):
        stateful = Stateful(model=model, task=task.unchecked)
        self.samples, self.device, self.seed, self.dtype = samples, device, seed, to
        self.with_gradients = False
        self._compute = functools.partial(compute, task, model) if compute else functools.partial(task, model)
        self._around, self._stateful_metrics = around, stateful_metrics
        self._held = [model, task.unchecked]
        self._roots = [model, *stateful.modules.values()]
        self._batchnorms = [own for root in self._roots for own in root.modules() if isinstance(own, BatchNorm)]
        for root in self._roots:
            root.to(device)  # modules of a task are moved later anyway
        self._generators = [owner for owner in stateful.owners.values() if owner.kind == "generator"]
        self.snapshot = Snapshot.of(stateful)
        self.snapshot.take("all" if is_small(model, task.unchecked) else "trained")  # most of the memory may be frozen

    @torch.no_grad()
    def __call__(
        self,
        name: str,
        training: bool = False,
        within: contextlib.AbstractContextManager[Any] | None = None,
        observed: "Observed | Rounding | None" = None,
    ) -> Sums:
        """The task's results for a batch. training: in training mode, except for BatchNorm. within, observed: around
        the task. Raises the task's errors.
        """
        batch = map_tensors(self._copied, self.samples.batches[name])
        try:
            evaluated = self._batchnorms if training else self._roots
            with preserved_rng(self.device), self._around(), evaluation_mode(evaluated):
                seed_from(self.device, self.seed)
                before = self._generator_states()
                with within or contextlib.nullcontext():
                    with self._gradients(), observed or contextlib.nullcontext():
                        loss, count, metrics = self._compute(batch)
                    if isinstance(observed, Observed):
                        observed.writes = self.snapshot.changed()
                        observed.epsilon_of_loss = observed.epsilon
                    with observed or contextlib.nullcontext():  # again: functions among the metrics compute now
                        sums, error = self._sums_of(metrics)
                drawn = before != self._generator_states()
                return Sums(_as_number(loss), _as_number(count), sums, drawn, error)
        finally:
            self.snapshot.restore()

    @contextlib.contextmanager
    def _gradients(self) -> Iterator[None]:
        """Record a graph inside the block, if the probe does. A task that computes gradients leaves none in `grad`."""
        if not self.with_gradients:
            yield
            return
        leaves = [tensor for tensor in held_tensors(self._held) if tensor.is_leaf]
        gradients = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None  # a backward would add to it in place
        try:
            with torch.enable_grad():
                yield
        finally:
            for leaf, gradient in zip(leaves, gradients, strict=True):
                leaf.grad = gradient

    def _copied(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype if tensor.is_floating_point() else None, copy=True)

    def _sums_of(self, metrics: Mapping[str, Any]) -> tuple[dict[str, float], str]:
        """The metrics, and why there are none; the first logged step raises the error again."""
        try:
            found = evaluate_metrics(metrics, self._stateful_metrics)
            return {name: float(value) for name, value in found.items()}, ""
        except Exception as error:
            return {}, summary_of(error)

    def _generator_states(self) -> bytes:
        states = [random.getstate(), np.random.get_state(), *(owner.copy() for owner in self._generators)]
        return pickle.dumps([state for state in states if not isinstance(state, Tensor)])


def _as_number(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


class Observed(DispatchMode):
    """Watches the operations inside. Attributes: `draws`, whether any draws random numbers, from whatever generator;
    `epsilon`, the relative rounding error of the coarsest floating-point dtype in their results, and `epsilon_of_loss`,
    the same before the metrics were computed; `writes`, what the call has changed of the model's or the task's state.
    """

    def __init__(self) -> None:
        super().__init__()
        self.draws, self.epsilon, self.epsilon_of_loss = False, 0.0, 0.0
        self.writes: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.draws = self.draws or draws_numbers(func, args, kwargs or {})
        dtypes = [tensor.dtype for tensor in tensors_in(result) if tensor.is_floating_point()]
        self.epsilon = max([self.epsilon, *(torch.finfo(dtype).eps for dtype in dtypes)])
        return result


class Rounding(DispatchMode):
    """Changes every new floating-point result inside by its rounding error, at random: each number by one epsilon of
    its dtype, of fp32 at least. By how much the outcome changes is then how far rounding may take it, whatever cancels
    out or is compared in between (Parker 1997, Monte Carlo arithmetic). Integers are exact, such as masks and counts.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator(device).manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        arguments = list(filter(_is_plain, tensors_in([list(args), kwargs or {}])))
        if any(tensor.is_floating_point() for tensor in arguments):
            aliased = {storage_id(tensor.untyped_storage()) for tensor in arguments}
            for tensor in filter(_is_plain, tensors_in(result)):
                is_new = storage_id(tensor.untyped_storage()) not in aliased  # no view, and not written in place
                if is_new and tensor.dtype in _ROUNDED and not is_expanded(tensor):
                    self._round(tensor)
        return result

    def _round(self, tensor: Tensor) -> None:
        epsilon = max(torch.finfo(tensor.dtype).eps, torch.finfo(torch.float32).eps)
        with SampleDraws.suspended():
            options: dict[str, Any] = {"device": tensor.device, "generator": self._generator, "dtype": torch.int8}
            bits = torch.randint(0, 2, tensor.shape, **options)
        is_exact = (tensor == tensor.round()) & (tensor.abs() < 0.25 / epsilon)  # larger numbers have no fractions
        change = (2 * bits - 1).to(tensor.dtype).masked_fill_(is_exact, 0)
        tensor.mul_(1 + epsilon * change)


def _is_plain(tensor: Tensor) -> bool:
    """Whether the tensor has one storage of its own kind: not a sparse or nested one, or another subclass."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested


class Way(NamedTuple):
    """A way to call a task. precision: in words."""

    precision: str
    trials: Callable[[], TaskProbe]


def precisions_to_try(
    task: CheckedTask,
    config: Config,
    resources: Any,
    model: nn.Module,
    noise: float | None = 0.0,
    **options: Any,
) -> list[Way]:
    """How a task may be called with the first samples of these `Resources`, the most precise way first; none without
    samples. noise: in small models' copies in fp64, see `in_double`; None: no copies. options: of `TaskProbe`.
    """
    if resources.samples is None:
        return []
    metrics = frozenset(resources.targets.hooks["metrics"])
    arguments: Any = (task, model, resources.samples, resources.device, config.train.seed, metrics)
    new: Callable[..., TaskProbe] = functools.partial(TaskProbe, *arguments, **options)
    as_trained = functools.partial(new, around=lambda: resources.numerics.autocast)
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    ways = [Way("fp32" if dtypes <= {torch.float32} else "the model's dtype", new), Way("as trained", as_trained)]
    if noise is not None and is_small(model, task.unchecked):
        double = functools.partial(in_double, *arguments, noise=noise, compute=options.get("compute"))
        ways.insert(0, Way(DOUBLE, double))
    return ways


@dataclass(frozen=True)
class Tried(Generic[T]):
    """The first result that raised no error. precision: of its way. failures: why not a more precise one, by way."""

    result: T
    precision: str
    failures: dict[str, str]


def first_that_works(ways: Sequence[Way], use: Callable[[TaskProbe], T], is_trained: bool = False) -> Tried[T]:
    """What `use` returns for the first trial that raises no error. Raises the error of the last of them.

    is_trained: whether a run calls the task with gradients. A trial then does so, too, if the task needs them.
    """
    failures: dict[str, str] = {}
    for precision, new in ways:
        try:
            with uncompiled():
                trial = new()
                result = _result_of(trial, use, is_trained)
        except Exception as error:
            failures[precision] = summary_of(error)
            if len(failures) == len(ways):
                raise
            continue
        if lost := trial.snapshot.lost:
            log.warning("a trial call of the task has changed %s in place; frozen, it had no copy", listed(lost))
        return Tried(result, precision, failures)
    raise ValueError("no way to call the task")


def _result_of(trial: TaskProbe, use: Callable[[TaskProbe], T], is_trained: bool) -> T:
    """Return what `use` returns, with gradients where it fails for want of them, as with a gradient penalty."""
    try:
        return use(trial)
    except RuntimeError as error:
        if not (is_trained and _needs_gradients(error)):
            raise
    trial.with_gradients = True
    return use(trial)


def _needs_gradients(error: RuntimeError) -> bool:
    """Whether torch computed a gradient, or was given a hook, of a tensor without a graph: no class tells it (2.13)."""
    text = str(error)
    return "does not require grad" in text or "doesn't require gradient" in text or "has requires_grad=False" in text


def is_small(*roots: Any) -> bool:
    """Whether the tensors of model and task may be copied whole."""
    parts = (part for tensor in held_tensors(roots) for part in strided_parts(tensor))
    return sum(part.nbytes for part in parts) <= MOST_COPIED


def in_double(task: CheckedTask, model: nn.Module, *arguments: Any, noise: float, **options: Any) -> TaskProbe:
    """Return probes of copies of task and model in fp64, also the default dtype of a call. Raises errors of copying,
    and `copy.Error` if a copy shares tensors of a module with its original. What else cannot be converted, such as a
    tensor in a closure, fails when called. arguments, options: of `TaskProbe`.

    noise: the standard deviation of what is added to parameters: a layer that begins at zero hides what is before it.
    """
    originals = _outermost_modules(model, task.unchecked)
    copies = _copies_in_double(originals.values(), task, model)
    copied_model, copied_task = copy.deepcopy((model, task.unchecked), copies)
    doubled = _outermost_modules(copied_model, copied_task)
    _require_separate(doubled, originals)
    for module in doubled.values():
        module.double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in copied_model.parameters():
            if parameter.is_floating_point():
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(drawn.to(parameter.device), alpha=noise)
    task = CheckedTask(copied_task, task.setting)
    return TaskProbe(task, copied_model, *arguments, around=_double_by_default, to=torch.float64, **options)


def _outermost_modules(model: nn.Module, task: Any) -> dict[str, nn.Module]:
    """Return the model and the modules found outside of it, by name."""
    return {"model": model, **Stateful(model=model, task=task).modules}


def _require_separate(copies: Mapping[str, nn.Module], originals: Mapping[str, nn.Module]) -> None:
    """Raises `copy.Error` where converting the copies would convert their originals: `copy.deepcopy` copies neither a
    function's closure nor what a class returns as its own copy.
    """
    original_tensors = {id(tensor) for module in originals.values() for tensor in _registered_tensors(module)}
    for name, copied in copies.items():
        for path, module in copied.named_modules(prefix=name):
            if any(id(tensor) in original_tensors for tensor in _registered_tensors(module, recurse=False)):
                raise copy.Error(f"the copy shares {path} ({type(module).__name__}), such as by a closure")


def _registered_tensors(module: nn.Module, recurse: bool = True) -> Iterator[Tensor]:
    yield from module.parameters(recurse)
    yield from module.buffers(recurse)


def _copies_in_double(modules: Iterable[nn.Module], task: CheckedTask, model: nn.Module) -> dict[int, Tensor]:
    """By id, for `copy.deepcopy`: the tensors in attributes, which `module.double()` does not reach, and those that it
    cannot copy (2.13: compressed sparse and nested ones).
    """
    registered = {id(tensor) for module in modules for tensor in _registered_tensors(module)}
    copies = {}
    for tensor in held_tensors([model, task.unchecked]):
        is_common = tensor.layout is torch.strided and not tensor.is_nested
        if not is_common or (id(tensor) not in registered and tensor.is_floating_point()):
            copied = tensor.detach().clone()
            if tensor.is_floating_point():
                copied = copied.double().requires_grad_(tensor.requires_grad)
            copies[id(tensor)] = copied
    return copies


@contextlib.contextmanager
def _double_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
