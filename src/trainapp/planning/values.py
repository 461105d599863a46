"""What a trace puts in place of values: tensors have shapes but no data, so that reads get made-up answers."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainapp.data.batch import MicroBatch, map_tensors, tensors_in
from trainapp.data.progress import Progress
from trainapp.data.source import EvalBatches, TrainBatches
from trainapp.memory.kept import WeakStorages
from trainapp.memory.live_tensors import LiveTensors
from trainapp.optim.precision import Precision
from trainapp.parallel.ranks import Ranks
from trainapp.parallel.strategy import local
from trainapp.planning.assumed_shapes import AssumedShapes, Share
from trainapp.planning.kernels import CORRECTED, as_on_cpu
from trainapp.planning.probes import PROBED, with_real_workspace
from trainapp.planning.recorder import TracedMemory
from trainapp.torch_operators import ASKS_DEVICE, FUSED_WITHOUT_META, READ_OPERATORS
from trainapp.torch_private import DispatchMode, outside_dispatch_modes, strided_parts
from trainapp.train.phase import Phase


class MadeUpValues(DispatchMode):
    """Answers reads of tensors without data: False, 1 or 1.0 (zero would divide by zero in Adam).

    otherwise: answer the model's reads the other way: True, 0 or 0.0. phase: where a measured step or evaluation is;
    None outside of both. clip_at: `train.grad_clip`. The norm is taken to be above it; with `otherwise`, to be below.
    share: how many elements operations select whose results' shapes depend on values.
    Attributes: `reads` of the model and the task so far; `model_reads`, the phases in which they were; `shapes`, what
    was assumed of shapes; `probed`, the operators that were run for real to know what they allocate.

    Raises RuntimeError after MOST_READS of them, and after MOST_ASSUMED assumed shapes in one forward: a model that
    iterates until it converges, or until nothing is selected, would do so forever.
    """

    MOST_READS = 1000
    MOST_ASSUMED = 20_000  # 256 experts in 60 layers have 15,000; takes half a minute

    def __init__(
        self,
        otherwise: bool = False,
        phase: Callable[[], Phase | None] = lambda: None,
        clip_at: float | None = None,
        share: Share = Share.MOST,
    ) -> None:
        super().__init__()
        self.shapes = AssumedShapes(share)
        self.probed: set[str] = set()
        self.otherwise, self.phase, self.clip_at = otherwise, phase, clip_at
        self.state_is_late = False  # set while the optimizer is built: what it asks about its own state
        self.reads = self._assumed = 0
        self._assumed_in: Phase | None = None
        self.model_reads: set[Phase] = set()
        self._zeros: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_DEVICE:
            return args[0].device
        if func in READ_OPERATORS and getattr(args[0], "constant", None) is None:
            return self._answer(args[0])
        if func is _EQUAL:  # torch.equal reads, too
            return bool(self._answer(torch.empty((), dtype=torch.bool)))
        if func.overloadpacket in FUSED_WITHOUT_META:
            return None
        if self.shapes.handles(func, args):
            self._count_assumed()
            return self.shapes.result(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        self.shapes.follow(func, args, result)
        if func in PROBED and args[0].device.type == "cpu":
            self.probed.add(str(func).removesuffix(".default"))
            return with_real_workspace(func, args, result)
        return as_on_cpu(func, args, result) if func in CORRECTED else result

    def _count_assumed(self) -> None:
        phase = self.phase()
        self._assumed = self._assumed + 1 if phase is self._assumed_in else 1
        self._assumed_in = phase
        if self._assumed > self.MOST_ASSUMED:
            raise RuntimeError("shapes depend on values without end: the model cannot be traced")

    def _answer(self, tensor: Tensor) -> bool | int | float:
        if any(zero() is tensor for zero in self._zeros):
            return 0.0
        kind, phase = tensor.dtype, self.phase()
        if phase in _OF_THE_MODEL:
            self.reads += 1
            self.model_reads.add(phase)
            if self.reads > self.MOST_READS:
                raise RuntimeError("the model reads values without end: it cannot be traced")
        other = self.otherwise and phase in _OF_THE_MODEL
        if kind == torch.bool:
            return other or self.state_is_late
        if not kind.is_floating_point:
            return 0 if other else 1
        if phase is Phase.CLIP and self.clip_at is not None and not self.otherwise:
            return max(2.0, 2 * self.clip_at)
        return 0.0 if other else 1.0

    @contextlib.contextmanager
    def of_construction(self) -> Iterator[None]:
        """While a model is built, reads are not the optimizer's: `nn.init.trunc_normal_` draws until none is True."""
        before, self.state_is_late = self.state_is_late, False
        try:
            yield
        finally:
            self.state_is_late = before

    def are_zero(self, tensors: Iterable[Tensor]) -> None:
        """Answer 0.0 for these tensors, for as long as they exist."""
        self._zeros = [zero for zero in self._zeros if zero() is not None] + [weakref.ref(t) for t in tensors]


_EQUAL = torch.ops.aten.equal.default
# In the others, the step itself reads: counts, norms, the loss scale.
_OF_THE_MODEL = frozenset(
    {Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.BACKWARD_AFTER_UPDATES, Phase.METRIC, Phase.EVALUATE}
)


@dataclass
class NoOverflow(Precision):
    """In a trace, no gradient overflows: the loss scaler would skip the step whose memory is asked for."""

    values: MadeUpValues

    def unscale(self, optimizer: torch.optim.Optimizer, all_reduce_found_inf: Callable[[list[Tensor]], None]) -> None:
        """As usual, except that the flags are answered with 0.0 when they are read."""

        def noted(flags: list[Tensor]) -> None:
            self.values.are_zero(flags)
            all_reduce_found_inf(flags)

        super().unscale(optimizer, noted)


class FakeBatches:
    """A sampler whose micro-batches are fetched as usual and then lose their values.

    fake: makes a tensor without data from one with data. instead: a batch that takes the place of every full one; None
    leaves each as it is. memory: is told what fetching a batch has needed.
    """

    def __init__(
        self,
        real: TrainBatches,
        fake: Callable[[Tensor], Tensor],
        instead: MicroBatch | None,
        memory: TracedMemory,
    ):
        self._real, self._fake, self._instead, self._memory = real, fake, instead, memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def micro_batches(self, progress: Progress, size: int, parts: int | None = None) -> Iterator[MicroBatch]:
        """As `TrainBatches.micro_batches`."""
        real = self._real.micro_batches(progress, size, parts)
        return without_values(real, self._fake, self._instead, self._memory)

    def example(self, samples: int) -> Any:
        """As `TrainBatches.example`."""
        with outside_dispatch_modes():
            batch = self._real.example(samples)
        return map_tensors(self._fake, batch)


class FakeEvalBatches:
    """As `FakeBatches`, but only the first batch of an evaluation: no other has more samples.

    every: all of them, where each leaves something for the next.
    """

    def __init__(
        self,
        real: EvalBatches,
        fake: Callable[[Tensor], Tensor],
        instead: MicroBatch | None,
        every: bool = False,
    ):
        self.__dict__["_real"] = real
        self.__dict__["_fake"], self.__dict__["_instead"], self.__dict__["_every"] = fake, instead, every

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real, name, value)

    def from_sample(self, done: int, size: int, ranks: Ranks) -> Iterator[MicroBatch]:
        """As `EvalBatches.from_sample`."""
        for micro in without_values(self._real.from_sample(done, size, ranks), self._fake, self._instead):
            yield micro if self._every else micro._replace(last=True)
            if not self._every:
                return


def without_values(
    real: Iterator[MicroBatch],
    fake: Callable[[Tensor], Tensor],
    instead: MicroBatch | None,
    memory: TracedMemory | None = None,
) -> Iterator[MicroBatch]:
    """The micro-batches, fetched outside of all modes, with shapes alone."""
    while True:
        fetched, size = fetch(real, None if memory is None else memory.kept.of_data)
        if memory is not None:
            memory.passes(size)
        if fetched is None:
            return
        chosen = instead if instead is not None and instead.samples == fetched.samples else fetched

        def piece(start: int, end: int, chosen: MicroBatch = chosen) -> Any:
            with outside_dispatch_modes():
                batch = chosen.piece(start, end)
            return map_tensors(fake, batch)

        yield fetched._replace(data=map_tensors(fake, chosen.data), piece=piece)


def fetch(real: Iterator[MicroBatch], of_data: WeakStorages | None) -> tuple[MicroBatch | None, int]:
    """The next micro-batch with its values, None at the end; and the peak bytes of the tensors that took, but for those
    of the data sets.
    """
    with outside_dispatch_modes(), LiveTensors(ignored=of_data) as counter:
        return next(real, None), counter.peak


def shapes_of(batch: Any) -> list[tuple[Any, ...]]:
    """What of a batch's tensors its memory depends on."""
    return [
        (tuple(t.shape), t.dtype, *(part.untyped_storage().nbytes() for part in strided_parts(local(t))))
        for t in tensors_in(batch)
    ]
