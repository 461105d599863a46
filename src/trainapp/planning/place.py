"""Where a trace takes place: on the CPU of this machine. `plan.cuda.place` has a GPU that is not there."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from trainapp.accelerator import HERE, Accelerator
from trainapp.assembly.build import Parts
from trainapp.config.schema import Config
from trainapp.memory.host_memory import total_bytes
from trainapp.optim.precision import Precision
from trainapp.planning.values import FakeBatches, FakeEvalBatches
from trainapp.train.run import Run
from trainapp.units import parse_memory_size


class Place:
    """What a trace asks of it. `device` None: the one on which the data and the numerics were prepared.

    steps: how many are traced at least. accelerator: stands for the device's generators and streams. batches,
    eval_batches: the classes that fetch without values.
    """

    device: torch.device | None = None
    steps = 1
    accelerator: Accelerator = HERE
    batches: type[FakeBatches] = FakeBatches
    eval_batches: type[FakeEvalBatches] = FakeEvalBatches

    def limit(self, config: Config) -> int:
        """What a run would be limited to: `activation_checkpointing.bytes=auto` reads it."""
        total = total_bytes()
        return total if config.memory.limit is None else parse_memory_size(config.memory.limit, total)

    def outside(self) -> AbstractContextManager[Any]:
        """Entered before the fake tensor mode."""
        return contextlib.nullcontext()

    def inside(self) -> AbstractContextManager[Any]:
        """Entered after it and after what answers reads."""
        return contextlib.nullcontext()

    def numerics(self, config: Config, parts: Parts) -> Precision:
        """Autocast and loss scaler for the device. Called inside the modes."""
        return parts.numerics

    def fake(self, from_tensor: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Makes a tensor of the device without data from one with data. from_tensor: keeps its device."""
        return from_tensor

    @contextlib.contextmanager
    def recording(self, run: Run) -> Iterator[Any]:
        """Around all steps and the evaluation. Yields what becomes the trace's `allocations`; None here."""
        yield None
