"""Steps and an evaluation of a configuration, traced: the run is built and goes through its loop on fake tensors."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import nn

from trainapp.config.schema import Config
from trainapp.data.batch import elements_in
from trainapp.data.micro_batch import MicroBatch
from trainapp.data.progress import Progress
from trainapp.data.sampler import EvalBatches, TrainBatches
from trainapp.errors import UserError
from trainapp.memory.device import static_bytes
from trainapp.memory.kinds import MemoryKind
from trainapp.memory.levers.catalogue import available
from trainapp.memory.levers.lever import Lever, Situation
from trainapp.optim.optimizers import build_optimizer
from trainapp.parallel.ranks import SingleRank
from trainapp.plan.recorder import Peak, PhaseLog, TracedMemory
from trainapp.plan.step_time import Work, WorkCounter
from trainapp.plan.values import FakeBatches, FakeEvalBatches, MadeUpValues, NoOverflow, shapes_of
from trainapp.signals import StopRequest
from trainapp.torch_private import fake_tensor_mode, outside_dispatch_modes
from trainapp.train import build, losses
from trainapp.train.components import Components
from trainapp.train.evaluate import evaluate
from trainapp.train.loop import train_step, update_weight_average
from trainapp.train.run import Run

SURVEYED = 256  # samples whose shapes are compared, or two micro-batches of more
Which = Literal["shortest", "longest"]


@dataclass(frozen=True)
class Trace:
    """What was measured. training, evaluation: None where not asked for, or where there is none.

    reads: the phases in which the model or the task read values, which were made up. varies: whether the micro-batches
    of the data differ in shape. static: as `Meter.static`. smallest: the model cannot train on fewer samples at once.
    levers: that apply and are not in force. work: of one training step; None if it was not counted.
    """

    training: Peak | None
    evaluation: Peak | None
    reads: tuple[str, ...]
    varies: bool
    static: dict[MemoryKind, int]
    smallest: int
    levers: tuple[Lever, ...]
    work: Work | None = None


def trace(
    config: Config,
    components: Components,
    size: int,
    eval_size: int,
    *,
    training: bool = True,
    evaluation: bool = True,
    otherwise: bool = False,
    which: Which = "longest",
    count_work: bool = False,
) -> Trace:
    """Trace training steps with micro-batches of `size` and an evaluation with `eval_size`, on one process.

    otherwise: answer reads of values the other way. which: where shapes differ, all micro-batches are of this one.
    count_work: also count the operations of the step, for `Speeds`.
    Raises whatever the model raises on tensors without data. Sets torch's global switches and seeds the generators:
    call it in a process of its own.
    """
    planned = _planned(config, size, eval_size)
    looked_at = build.load_parts(planned, SingleRank(), components)
    instead = _training_shapes(looked_at.batches, size, which) if training else None
    eval_instead = None
    if evaluation and looked_at.eval_batches is not None:
        eval_instead = _chosen(looked_at.eval_batches.from_sample(0, eval_size, SingleRank()), which)
    parts = build.load_parts(planned, SingleRank(), components)
    parts.memory = memory = TracedMemory(parts.device)
    values = MadeUpValues(otherwise, lambda: memory.phase if memory.watching else None, config.train.grad_clip)
    with fake_tensor_mode() as mode, values:
        parts.batches = cast(TrainBatches, FakeBatches(parts.batches, mode.from_tensor, instead, memory.passes))
        if parts.eval_batches is not None:
            eval_batches = FakeEvalBatches(parts.eval_batches, mode.from_tensor, eval_instead)
            parts.eval_batches = cast(EvalBatches, eval_batches)
        numerics = {field.name: getattr(parts.numerics, field.name) for field in dataclasses.fields(parts.numerics)}
        parts.numerics = NoOverflow(**numerics, values=values)
        values.state_is_late = late = _creates_state_late(planned, parts.device)
        run = build.run_of(planned, parts, StopRequest(), SingleRank(), initial_device=str(parts.device))
        values.state_is_late = False
        run.attempt = PhaseLog(memory)
        memory.resident = run.meter.resident
        work = WorkCounter(lambda: memory.phase) if count_work else None
        found = _training_peak(run, memory, work) if training else None
        measured = None
        if evaluation and run.eval_batches is not None and run.cadences.evaluate:
            if late and not training:
                train_step(run)  # evaluations find the optimizer's state in memory
            memory.reset()
            evaluate(run)
            measured = memory.highest
    return Trace(
        training=found,
        evaluation=measured,
        reads=tuple(sorted(phase.value for phase in values.model_reads)),
        varies=instead is not None or eval_instead is not None,
        static=run.meter.static,
        smallest=build.smallest_micro_batch(run.state.model),
        levers=tuple(available(Situation(config, run.state.model, losses.is_built_in(run.task)))),
        work=None if work is None else _of_whole_step(work.work, config, planned, size, parts.batches.samples),
    )


def _of_whole_step(work: Work, config: Config, traced: Config, size: int, samples: int) -> Work:
    """The work with its shares of a step's samples and micro-batches: `_planned` may have left out some."""
    whole, taken = (min(of.batch.global_size, samples) for of in (config, traced))
    work.share, work.traced, work.micro_batches = taken / whole, -(-taken // size), -(-whole // size)
    return work


def _training_peak(run: Run, memory: TracedMemory, work: WorkCounter | None) -> Peak:
    """Of one step, or of two where the first has changed what stays in memory: an optimizer that creates its state.

    work: counts the last of them.
    """
    memory.reset()
    with work or contextlib.nullcontext():
        train_step(run)
    update_weight_average(run)
    if static_bytes(run.state.model, run.state.optimizer, run.state.average.averages) != run.meter.static:
        with work.afresh() if work else contextlib.nullcontext():
            train_step(run)
        update_weight_average(run)
    return memory.highest


def _creates_state_late(config: Config, device: torch.device) -> bool:
    """Whether the optimizer has no state before its first step. That depends on values: asked of a tiny real one."""
    with contextlib.suppress(UserError), outside_dispatch_modes():
        tiny = nn.Linear(2, 2, bias=False, device=device)
        return not build_optimizer(config.optimizer, tiny, device, config.user_packages).state
    return False


def _planned(config: Config, size: int, eval_size: int) -> Config:
    """The configuration of the trace: what costs no memory on the device, or only in a few first steps, is off.

    A step of many micro-batches peaks in its second one, as in all later ones: two are traced. (Of less than three, the
    second one need not be full.)
    """
    whole, parts = config.batch.global_size, config.accumulation.steps
    as_given = parts != "auto" and size == -(-whole // parts)
    global_size = whole if as_given or whole < 3 * size else 2 * size
    changes: dict[str, Any] = {
        "batch": dataclasses.replace(
            config.batch,
            global_size=global_size,
            micro_size="auto" if as_given else size,
            eval_micro_size=eval_size,
            micro_schedule=None,
        ),
        "accumulation": dataclasses.replace(config.accumulation, steps=parts if as_given else "auto"),
        # A logged step computes the metrics, too, and sooner or later every run logs one.
        "every": dataclasses.replace(config.every, log=None if config.every.log is None else 1),
        "loader": dataclasses.replace(config.loader, num_workers=0),
        "model": dataclasses.replace(config.model, init_from=None),
        "train": dataclasses.replace(config.train, check_exactness=False),
        "memory": dataclasses.replace(config.memory, limit=None, timeline=False),
        "checkpointing": dataclasses.replace(config.checkpointing, save=False),
    }
    return dataclasses.replace(config, mode="train", **changes)


def _training_shapes(batches: TrainBatches, size: int, which: Which) -> MicroBatch | None:
    """See `_chosen`."""

    def steps() -> Iterator[MicroBatch]:
        progress = Progress()
        while progress.epoch == 0:
            micro_batches = batches.micro_batches(progress, size)
            yield from micro_batches
            batches.advance(progress)

    return _chosen(steps(), which)


def _chosen(micro_batches: Iterator[MicroBatch], which: Which) -> MicroBatch | None:
    """The first micro-batch with the most, or the fewest, elements of the first SURVEYED samples; None where all full
    ones have the same shapes.
    """
    first = chosen = next(micro_batches, None)
    if first is None or chosen is None:
        return None
    samples, varies = first.samples, False
    for micro in itertools.chain([first], micro_batches):
        if micro.samples == first.samples:
            varies = varies or shapes_of(micro.data) != shapes_of(first.data)
            size, best = elements_in(micro.data), elements_in(chosen.data)
            if (size > best) if which == "longest" else (size < best):
                chosen = micro
        samples += micro.samples
        if samples >= max(SURVEYED, 3 * first.samples):
            break
    return chosen if varies else None
