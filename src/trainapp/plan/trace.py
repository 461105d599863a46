"""The memory that a step would need, without allocating it: the real build and step run on fake tensors, which have
shapes but no data.

On the CPU the traced peak equals the measured one to the byte; on CUDA the allocator adds its rounding and workspaces.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch

from trainapp.checkpoint.checkpointer import NullCheckpointer
from trainapp.config import targets
from trainapp.config.durations import RunLength
from trainapp.config.schema import Config
from trainapp.data.batch import map_tensors
from trainapp.data.micro_batch import MicroBatch
from trainapp.data.micro_batch_sizes import MicroBatchSizes
from trainapp.data.progress import Progress
from trainapp.data.sampler import TrainBatches
from trainapp.optim import precision
from trainapp.optim.nonfinite import NonFiniteCheck
from trainapp.parallel.ranks import SingleRank
from trainapp.plan.recorder import PhaseLog, TracedMemory
from trainapp.plan.values import MadeUpValues
from trainapp.rng import preserved_rng
from trainapp.signals import StopRequest
from trainapp.torch_private import fake_tensor_mode
from trainapp.tracking.meter import Meter
from trainapp.tracking.tracker import SilentTracker
from trainapp.train.assemble import Assembled, assemble
from trainapp.train.components import Components
from trainapp.train.loop import train_step
from trainapp.train.losses import Task
from trainapp.train.restore_point import RestorePoint
from trainapp.train.run import Cadences, Objective, Run
from trainapp.train.sizes import Sizes


def traced_peak(run: Run, samples: int, **settings: Any) -> int:
    """Peak bytes of a step of `run` with micro-batches of `samples` and the given sections of settings.

    settings: such as `precision=Precision(mode="bf16")`. Raises what `traced_step` raises.
    """
    config = dataclasses.replace(run.config, **settings)
    return traced_step(config, run.task, run.batches, run.state.device, samples).memory.peak


def traced_step(config: Config, task: Task, batches: TrainBatches, device: torch.device, samples: int) -> Run:
    """A run of this configuration after a step with micro-batches of `samples`, for one rank with the whole model.

    The task and the data set are used themselves: what they keep of the step stays, fake tensors included. Raises
    whatever the model raises on tensors without data: not every model can be traced.
    """
    config = _with_fake_kernels(config, device)
    components = Components(
        model=targets.locate(config.model.target, "model._target_", config.user_packages),
        task=task,
        train_data=None,
        eval_data=None,
        spec=dict(getattr(batches.dataset, "spec", {})),
    )
    example = batches.example(samples)
    with preserved_rng(device):
        numerics = precision.build(config.precision, device)
        memory = TracedMemory(device)
        with fake_tensor_mode() as mode, MadeUpValues(phase=lambda: memory.phase if memory.watching else None):
            # Two micro-batches: from the second on, gradients are already in memory.
            parts = min(2, batches.accumulation(samples))
            examples = ExampleBatches([_on_device(mode, example, device) for _ in range(parts)], samples)
            assembled = assemble(
                config,
                components,
                SingleRank(),
                device,
                numerics,
                initial_device=str(device),
                example=lambda _: examples.parts[0],
            )
            twin = _run_of(config, assembled, examples, memory)
            train_step(twin)
    return twin


def _with_fake_kernels(config: Config, device: torch.device) -> Config:
    """The configuration without a fused optimizer that has no kernel for fake tensors: torch would run the real one, on
    real memory of the device. Of torch 2.13's, only Adam and AdamW have one.
    """
    if device.type == "cpu" or config.optimizer.target.rpartition(".")[2] in ("Adam", "AdamW"):
        return config
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, fused=False))


def _on_device(mode: Any, example: Any, device: torch.device) -> Any:
    """The example as fake tensors on the device, where the loader would put it."""
    return map_tensors(lambda tensor: mode.from_tensor(tensor).to(device), example)


class ExampleBatches:
    """A step's micro-batches, as `TrainBatches` gives them: the same samples in each step."""

    def __init__(self, parts: list[Any], samples: int):
        self.parts, self.samples = parts, samples
        self.global_size = self.epoch_samples = samples * len(parts)

    def step_samples(self, progress: Progress) -> int:
        """Samples per step."""
        return self.global_size

    def accumulation(self, size: int, parts: int | None = None) -> int:
        """Micro-batches per step."""
        return len(self.parts)

    def micro_batches(self, progress: Progress, size: int, parts: int | None = None) -> Iterator[MicroBatch]:
        """The same micro-batches in every step."""
        for number, data in enumerate(self.parts, start=1):
            yield MicroBatch(data, number == len(self.parts), real=True, samples=self.samples, piece=_unused)

    def after(self, epoch: int, consumed: int) -> tuple[int, int]:
        """Every step is an epoch."""
        return epoch + 1, 0

    def advance(self, progress: Progress) -> None:
        """Count the step."""
        progress.samples += self.global_size
        progress.epoch += 1


def _unused(start: int, end: int) -> Any:
    raise AssertionError("an example has the size of its micro-batch: it is never cut")


def _run_of(config: Config, assembled: Assembled, batches: ExampleBatches, memory: TracedMemory) -> Run:
    """A run of one rank that writes nothing and has no end."""
    state = assembled.state
    is_scaled = state.precision.scaler.is_enabled()
    return Run(
        config=config,
        state=state,
        strategy=assembled.strategy,
        ranks=SingleRank(),
        task=assembled.task,
        batches=cast(TrainBatches, batches),  # it has the methods that a step calls
        eval_batches=None,
        length=RunLength(1, batches.global_size, None),
        schedule=lambda step: 1.0,
        sizes=Sizes(train=MicroBatchSizes(batches.samples), evaluation=MicroBatchSizes(1)),
        memory=memory,
        meter=Meter(state, memory),
        tracker=SilentTracker(Path(config.run_dir)),
        checkpointer=NullCheckpointer(),
        nonfinite=NonFiniteCheck(config.train.nonfinite, state.device, is_scaled, lambda: None),
        restore_point=RestorePoint(state.model, state.device),
        stop=StopRequest(),
        cadences=Cadences(log=0, evaluate=0, save=0),
        objective=Objective("min", "loss"),
        attempt=PhaseLog(memory),
    )
