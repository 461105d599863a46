"""A trace on CUDA tensors of a device that this machine does not have, and what CUDA's allocator makes of it."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from trainapp.accelerator import Accelerator
from trainapp.assembly.build import Parts
from trainapp.config.schema import Config
from trainapp.data.batch import MicroBatch, map_tensors
from trainapp.data.progress import Progress
from trainapp.errors import UserError
from trainapp.optim import precision
from trainapp.optim.nonfinite import NonFiniteCheck
from trainapp.parallel.fsdp import FSDP
from trainapp.parallel.ranks import Ranks
from trainapp.planning.cuda import self_test
from trainapp.planning.cuda.allocations import Allocations, CountedByStream
from trainapp.planning.cuda.blocks import MIB
from trainapp.planning.cuda.devices import Device, communicators_of
from trainapp.planning.cuda.pretend import EngineOnCuda, pretended
from trainapp.planning.place import Place
from trainapp.planning.ranks import world_of
from trainapp.planning.values import FakeBatches, FakeEvalBatches
from trainapp.train.run import Run
from trainapp.units import parse_memory_size

CUDA = torch.device("cuda", 0)
THREADS = 2  # that multiply matrices: the program's own and the autograd engine's, each with a workspace of cuBLAS


class _Ahead:
    """Keeps the next batch on the device while one is in use, as `data.loader` does on CUDA, between steps too."""

    _next: MicroBatch | None = None

    def ahead(self, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        current = next(micro_batches, None)
        while current is not None:
            following = next(micro_batches, None)
            copy = (
                current._replace(data=map_tensors(torch.empty_like, current.data)) if following is None else following
            )
            self.__dict__["_next"] = copy  # to keep it in memory; `__setattr__` would hand it to the real batches
            yield current
            current = following


class AheadBatches(FakeBatches, _Ahead):
    """As `FakeBatches`, on a device to which batches are copied ahead."""

    def micro_batches(self, progress: Progress, size: int, parts: int | None = None) -> Iterator[MicroBatch]:
        """As `TrainBatches.micro_batches`."""
        return self.ahead(super().micro_batches(progress, size, parts))


class AheadEvalBatches(FakeEvalBatches, _Ahead):
    """As `FakeEvalBatches`, on a device to which batches are copied ahead."""

    def from_sample(self, done: int, size: int, ranks: Ranks) -> Iterator[MicroBatch]:
        """As `EvalBatches.from_sample`."""
        return self.ahead(super().from_sample(done, size, ranks))


class AllFinite(NonFiniteCheck):
    """On a GPU the first bad step is recorded on the device, and read when a step is logged: here there is none."""

    def check(self) -> None:
        """Nothing is read."""


class NotHere(Accelerator):
    """Generators of the host, from which nothing is drawn, and no streams: no tensor of a trace has values.

    Memory is as with streams: `techniques.offload` allocates and frees on the device's own stream alone, in an order
    that does not depend on how far copies have come.
    """

    def generator(self, device: torch.device) -> torch.Generator:
        """Torch makes none for CUDA without a device."""
        return torch.Generator()

    def has_streams(self, device_type: str) -> bool:
        """Nor streams, nor pinned memory."""
        return False


class CudaPlace(Place):
    """See the module. The first trace in it shows that everything pretended is in force."""

    device = CUDA
    steps = 2  # the allocator's cache is not the same after the first one
    accelerator = NotHere()
    batches, eval_batches = AheadBatches, AheadEvalBatches

    def __init__(self, named: Device):
        self.named = named
        self.convolutions = False  # whether the last trace had any
        self._tested = False
        self._engine: EngineOnCuda | None = None  # that of the trace at work

    def limit(self, config: Config) -> int:
        """What a run on the device would be limited to."""
        setting = config.memory.limit
        if setting is None:
            return self.named.cap_with(communicators_of(config.parallel) if world_of(config) > 1 else 0)
        return parse_memory_size(setting, self.named.memory)

    def outside(self) -> contextlib.AbstractContextManager[Any]:
        """What is pretended of torch."""
        return pretended(self.named)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Raises NotInForce where something pretended is not; NotImplementedError for generators that code makes by
        itself.
        """
        with EngineOnCuda() as engine:
            self._engine = engine
            if not self._tested:
                self_test.require(self.named, engine)
                self._tested = True
            try:
                yield
            except UserError as error:  # an optimizer of the user's that draws in its first step
                if "CUDA generator" in str(error.__cause__):
                    raise NotImplementedError("torch.Generator: CUDA's exist only with CUDA") from error
                raise

    def numerics(self, config: Config, parts: Parts) -> precision.Precision:
        """As on the device."""
        return precision.build(config.precision, CUDA)

    def fake(self, from_tensor: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """On the device."""
        return lambda tensor: from_tensor(tensor).to(CUDA)

    @contextlib.contextmanager
    def recording(self, run: Run) -> Iterator[Allocations]:
        """Yields what is complete only at the end of the block."""
        scaled = run.state.precision.scaler.is_enabled()
        run.nonfinite = AllFinite(run.config.train.nonfinite, CUDA, scaled, lambda: None)
        # launch.prepare_process gives cuBLAS a fixed workspace where runs must be deterministic.
        workspace = 32 * MIB if run.config.train.deterministic else self.named.cublas_workspace
        counter = CountedByStream()
        if isinstance(run.strategy, FSDP) and not run.config.parallel.fsdp.meta_init:
            _shard_on_the_device(run, run.strategy, counter)
        for tensors in run.meter.resident().values():
            for tensor in tensors:
                counter.count(tensor)
        allocations = Allocations(THREADS * workspace, building=list(counter.events), streams=counter.streams)
        counter.events.clear()
        with counter:
            run.strategy.warm_up()  # again: it was not counted while the run was built, and leaves a cache
        allocations.warm_up = list(counter.events)
        counter.events.clear()
        with self._engine_above(counter) as engine:
            yield allocations
        self.convolutions = engine.convolutions > 0
        allocations.events += [(-1 - number, workspace) for number in range(THREADS)] + counter.events

    @contextlib.contextmanager
    def _engine_above(self, counter: CountedByStream) -> Iterator[EngineOnCuda]:
        """The engine moves above the counter, which sees its workspaces only from below: every mode costs time."""
        assert self._engine is not None, "the innermost mode of `inside`"
        with contextlib.ExitStack() as stack:
            self._engine.__exit__(None, None, None)
            stack.callback(self._engine.__enter__)
            stack.enter_context(counter)
            yield stack.enter_context(EngineOnCuda())


def _shard_on_the_device(run: Run, strategy: FSDP, counter: CountedByStream) -> None:
    """Count what is there before the run is built: the whole model, in fp32 first, until its modules are sharded."""
    numbers = itertools.count(-1 - THREADS, -1)
    whole = list(run.state.model.parameters())
    casts = run.config.precision.mode == "bf16_pure"
    held = {p: (next(numbers), p.numel() * (4 if casts else p.dtype.itemsize)) for p in whole}
    counter.events += held.values()
    for buffer in run.state.model.buffers():
        counter.count(buffer)
    for parameter in whole if casts else ():
        old, size = held[parameter]
        held[parameter] = next(numbers), parameter.numel() * parameter.dtype.itemsize
        counter.events += [held[parameter], (old, -size)]
    for parameters in strategy.sharded_together():
        for parameter in parameters:
            counter.count(parameter)
        counter.events += [(number, -size) for number, size in (held[parameter] for parameter in parameters)]
