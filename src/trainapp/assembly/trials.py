"""Trial calls of a task: its results for a few samples, together and in halves, which `assembly.checks` compares.

    trial = Trials(task, model, samples, device, seed)
    whole, first, second = trial("ab"), trial("a"), trial("b")

Every call has its own copy of the batch, and starts with the same state and the same seeds. None leaves a trace.
"""

import contextlib
import copy
import functools
import logging
import pickle
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from trainapp.config.schema import Config
from trainapp.data.batch import map_tensors, tensors_in
from trainapp.data.loader import Fetcher, Request
from trainapp.losses.losses import CheckedTask, evaluate_metrics
from trainapp.memory.device import uncompiled
from trainapp.models.inspect import evaluation_mode
from trainapp.rng import preserved_rng, seed_from
from trainapp.snapshot import Snapshot
from trainapp.stateful import Stateful, held_tensors
from trainapp.torch_private import BatchNorm, DispatchMode, draws_numbers
from trainapp.units import listed

SAMPLES = 4
MOST_COPIED = 64 * 2**20  # bytes of a model that is copied whole
T = TypeVar("T")
log = logging.getLogger(__name__)


class Samples(NamedTuple):
    """The batches to compare, on the CPU.

    batches: `a` and `b` are halves of `number` samples, and `ab` is the two together. same: whether they are known to
    hold the same values: padding and graphs may depend on what else is in a batch. Then there are `ba`, `aa` and `bb`,
    too, or `b` is the first half again.
    """

    number: int
    batches: dict[str, Any]
    same: bool

    def positions(self, name: str) -> list[int]:
        """Of a batch's samples."""
        of = {"a": range(self.number // 2), "b": range(self.number // 2, self.number)}
        return [position for part in name for position in of[part]]


class Sums(NamedTuple):
    """The task's loss, count and metrics for a batch. drawn: whether the call drew from NumPy's or Python's global
    generator, or from one of theirs in an attribute.
    """

    loss: float
    divisor: float
    metrics: Mapping[str, float]
    drawn: bool


def first_samples(data: Any, indices: Sequence[Any], seed: int) -> Samples | None:
    """These samples of a data set, in batches; None for a single sample."""
    number = len(indices) // 2 * 2
    if number < 2:
        return None
    first, second = list(indices[: number // 2]), list(indices[number // 2 : number])
    whole, a, b = (Fetcher(data, seed)[Request(0, own)] for own in (first + second, first, second))
    if joints := joints_of(whole, [a, b]):
        orders = {"ba": (b, a), "aa": (a, a), "bb": (b, b)}
        others = {name: joined(whole, parts, joints) for name, parts in orders.items()}
        return Samples(number, {"ab": whole, "a": a, "b": b, **others}, True)
    twice = Fetcher(data, seed)[Request(0, first * 2)]
    if joints_of(twice, [a, a]):
        return Samples(number, {"ab": twice, "a": a, "b": a}, True)
    return Samples(number, {"ab": whole, "a": a, "b": b}, False)


def joints_of(batch: Any, parts: Sequence[Any]) -> list[int | None]:
    """For each tensor of the batch the dimension in which it is the concatenation of its parts, None for one that is
    identical in all of them. Empty if some tensor is neither, or if all are identical.
    """
    of_each = [tensors_in(batch), *map(tensors_in, parts)]
    if len({len(tensors) for tensors in of_each}) > 1:
        return []
    joints: list[int | None] = []
    for whole, *pieces in zip(*of_each, strict=True):
        if any(tensor.layout is not torch.strided or tensor.is_nested for tensor in (whole, *pieces)):
            return []
        is_same = all(torch.equal(whole, piece) for piece in pieces)
        found = (dim for dim in range(whole.ndim) if not is_same and _are_joined(whole, pieces, dim))
        joints.append(next(found, None))
        if joints[-1] is None and not is_same:
            return []
    return joints if any(joint is not None for joint in joints) else []


def _are_joined(whole: Tensor, pieces: list[Tensor], dimension: int) -> bool:
    with contextlib.suppress(RuntimeError):  # other shapes
        return torch.equal(whole, torch.cat(pieces, dimension))
    return False


def joined(batch: Any, parts: Sequence[Any], joints: Sequence[int | None]) -> Any:
    """The batch with other parts in its place. joints: the batch's, see `joints_of`."""
    pieces = zip(joints, *map(tensors_in, parts), strict=True)

    def replaced(tensor: Tensor) -> Tensor:
        joint, *own = next(pieces)
        return tensor if joint is None else torch.cat(own, joint)

    return map_tensors(replaced, batch)


class Trials:
    """Calls of a task with one of the `samples`' batches, by its name, without gradients.

    stateful_metrics: names of metrics that are not numbers. compute: the results of (task, model, batch on the device);
    None calls the task. around: makes what is entered around a call. to: the dtype of floating-point tensors in
    batches; None: as it is.
    Attributes: `dtype`, which is `to`; `snapshot`, whose `lost` are parameters that a call has written for good.
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
        self._compute = functools.partial(compute, task, model) if compute else functools.partial(task, model)
        self._around, self._stateful_metrics = around, stateful_metrics
        self._roots = [model, *stateful.modules.values()]
        self._batchnorms = [own for root in self._roots for own in root.modules() if isinstance(own, BatchNorm)]
        for root in self._roots:
            root.to(device)  # modules of a task are moved later anyway
        self._generators = [owner for owner in stateful.owners.values() if owner.kind == "generator"]
        self.snapshot = Snapshot.of(stateful)
        self.snapshot.take("all" if _is_small(task, model) else "trained")  # most of the memory may be frozen

    @torch.no_grad()
    def __call__(
        self,
        name: str,
        training: bool = False,
        within: contextlib.AbstractContextManager[Any] | None = None,
        observed: "Observed | None" = None,
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
                with within or contextlib.nullcontext(), observed or contextlib.nullcontext():
                    loss, count, metrics = self._compute(batch)
                if observed is not None:
                    observed.writes = bool(self.snapshot.changed())
                drawn = before != self._generator_states()
                return Sums(float(loss), float(count), self._sums_of(metrics), drawn)
        finally:
            self.snapshot.restore()

    def _copied(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype if tensor.is_floating_point() else None, copy=True)

    def _sums_of(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        with contextlib.suppress(Exception):  # the first logged step raises it again
            return {name: float(value) for name, value in evaluate_metrics(metrics, self._stateful_metrics).items()}
        return {}

    def _generator_states(self) -> bytes:
        states = [random.getstate(), np.random.get_state(), *(owner.copy() for owner in self._generators)]
        return pickle.dumps([state for state in states if not isinstance(state, Tensor)])


class Observed(DispatchMode):
    """Watches the operations inside. Attributes: `draws`, whether any draws random numbers, from whatever generator;
    `epsilon`, the relative rounding error of the coarsest floating-point dtype in their results; `writes`, whether the
    call has changed the model's or the task's state.
    """

    def __init__(self) -> None:
        super().__init__()
        self.draws, self.epsilon, self.writes = False, 0.0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.draws = self.draws or draws_numbers(func, args, kwargs or {})
        dtypes = [tensor.dtype for tensor in tensors_in(result) if tensor.is_floating_point()]
        self.epsilon = max([self.epsilon, *(torch.finfo(dtype).eps for dtype in dtypes)])
        return result


def ways_of(
    task: CheckedTask,
    config: Config,
    parts: Any,
    model: nn.Module,
    noise: float | None = 0.0,
    **options: Any,
) -> list[Callable[[], Trials]]:
    """How a task may be called with the first samples of these `Parts`, the most precise way first; none without
    samples. noise: in small models' copies in fp64, see `in_double`; None: no copies. options: of `Trials`.
    """
    if parts.samples is None:
        return []
    metrics = frozenset(parts.components.hooks["metrics"])
    arguments: Any = (task, model, parts.samples, parts.device, config.train.seed, metrics)
    new: Callable[..., Trials] = functools.partial(Trials, *arguments, **options)
    as_trained = functools.partial(new, around=lambda: parts.numerics.autocast)
    if noise is None or not _is_small(task, model):
        return [new, as_trained]
    double = functools.partial(in_double, *arguments, noise=noise, compute=options.get("compute"))
    return [double, new, as_trained]


def first_that_works(ways: Sequence[Callable[[], Trials]], use: Callable[[Trials], T]) -> T | None:
    """What `use` returns for the first trial that raises no error; None without any. Raises the error of the last."""
    for number, way in enumerate(ways, start=1):
        try:
            with uncompiled():
                found = use(trial := way())
        except Exception as error:
            if number == len(ways):
                raise
            log.debug("trying another precision: %s", error)
            continue
        if lost := trial.snapshot.lost:
            log.warning("a trial call of the task has changed %s in place; frozen, it had no copy", listed(lost))
        return found
    return None


def _is_small(task: CheckedTask, model: nn.Module) -> bool:
    return sum(tensor.nbytes for tensor in held_tensors([model, task.unchecked])) <= MOST_COPIED


def in_double(task: CheckedTask, model: nn.Module, *arguments: Any, noise: float, **options: Any) -> Trials:
    """Trials of copies of task and model in fp64, which is also the default dtype of a call. Raises errors of copying;
    what cannot be converted, such as a tensor in an attribute, fails when called. arguments, options: of `Trials`.

    noise: the standard deviation of what is added to parameters: a layer that begins at zero hides what is before it.
    """
    originals = {id(module) for module in Stateful(model=model, task=task.unchecked).modules.values()}
    doubled, own = copy.deepcopy((model, task.unchecked))
    for module in (doubled, *Stateful(model=doubled, task=own).modules.values()):
        if id(module) not in originals:  # such as a global variable's, which a copied function shares
            module.double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in doubled.parameters():
            if parameter.is_floating_point():
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(drawn.to(parameter.device), alpha=noise)
    task = CheckedTask(own, task.setting)
    return Trials(task, doubled, *arguments, around=_double_by_default, to=torch.float64, **options)


@contextlib.contextmanager
def _double_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
