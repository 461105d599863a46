"""The work measured by a plan: a step of an engine, as in `training.loop`, and its batches without values.

Nothing is searched, logged, saved or called back: there is no session.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainapp.assembly.resolved_targets import ResolvedTargets
from trainapp.assembly.resources import Resources
from trainapp.config.schema import Config
from trainapp.data.batch import MicroBatch, elements_in, map_tensors, tensors_in
from trainapp.data.progress import Progress
from trainapp.data.stream_reader import at_most
from trainapp.data.train_batches import TrainBatches
from trainapp.errors import UserError
from trainapp.memory.live_tensors import Category
from trainapp.models.inspect import blocks_of, smallest_micro_batch
from trainapp.planning.recorder import Breakdown, Recorder
from trainapp.techniques.catalogue import Situation, available
from trainapp.torch_private import outside_dispatch_modes
from trainapp.tracking.meter import Meter
from trainapp.training.engine import Engine
from trainapp.training.loop import run_update
from trainapp.training.phase import Phase, UpdateContext

SURVEYED = 256  # number of samples whose shapes are compared, or two micro-batches if that is more
Fake = Callable[[Tensor], Tensor]  # makes a tensor without data from one with data
Fetched = Callable[[Iterator[MicroBatch]], Iterator[MicroBatch]]


# --- how much work


def samples_per_step(config: Config, targets: ResolvedTargets) -> int:
    """Return the samples of a step over all ranks: the global batch, or the data set if it is known to be smaller."""
    return at_most(config.batch.global_size, targets.train_data)


def largest_share(config: Config, targets: ResolvedTargets, world_size: int) -> int:
    """Return the samples of a step on the rank with the most."""
    return -(-samples_per_step(config, targets) // world_size)  # rounded up


def planned_config(config: Config, size: int, samples: int) -> Config:
    """Return the configuration of a planned step of `samples` in micro-batches of `size`, without features that cost no
    device memory, or only in the first few steps.
    """
    # For a plan, all updates are in one step.
    updates = [dataclasses.replace(update, every=1, offset=None) for update in config.updates]
    changes: dict[str, Any] = {
        "batch": dataclasses.replace(config.batch, global_size=samples, micro_size=size, micro_schedule=None),
        "accumulation": dataclasses.replace(config.accumulation, steps="auto"),
        "data": dataclasses.replace(config.data, num_workers=0),
        "model": dataclasses.replace(config.model, init_from=None),
        "train": dataclasses.replace(config.train, check_loss=False),
        "memory": dataclasses.replace(config.memory, limit=None, timeline=False),
        "updates": updates,
    }
    return dataclasses.replace(config, mode="train", **changes)


# --- the steps


@dataclass
class Work:
    """An engine and its batches."""

    config: Config
    engine: Engine
    resources: Resources
    size: int  # of a micro-batch
    fetched: Fetched = iter  # transforms fetched batches: a trace removes their values

    def __post_init__(self) -> None:
        engine = self.engine
        self.memory = self.resources.memory
        self.meter = Meter(engine.state, self.memory, engine.gradients, engine.strategy.communication_buffers)
        if isinstance(self.memory, Recorder):
            self.memory.resident = self.meter.resident
            self.memory.phase = lambda: engine.reported_phase

    def peak(self, recorder: Recorder, steps: int = 1) -> Breakdown:
        """Return the memory of training. Runs at least `steps` steps, and one more if the last has left tensors, such
        as optimizer state or a tensor in a list.
        """
        for number in range(1, steps + 2):
            bytes_before = recorder.bytes_between_steps()
            self.train_step()
            if number >= steps and recorder.bytes_between_steps() == bytes_before:
                break
        return self.with_model_facts(recorder.highest)

    def with_model_facts(self, breakdown: Breakdown) -> Breakdown:
        """Return the breakdown with the plan's facts about the model."""
        model = self.engine.state.model
        blocks = 0
        with contextlib.suppress(UserError):
            blocks = len(blocks_of(model, "blocks()"))
        situation = Situation(self.config, model, self.engine.knows_loss)
        techniques = tuple(technique for technique in available(situation) if technique.is_planned)
        smallest = smallest_micro_batch(model)
        return dataclasses.replace(breakdown, smallest=smallest, blocks=blocks, techniques=techniques)

    def train_step(self) -> None:
        """Make one optimizer step, with all its updates; see `training.loop.train_step`."""
        engine = self.engine
        state = engine.state
        batches = self.resources.batches
        sizes = [self.size] * len(state.updates)
        with outside_dispatch_modes():  # tensors that a stream makes are real ones
            samples = batches.share(state.progress).total

        # As in a run: all that a step keeps in memory has to be made here, too.
        is_logged = self.config.every.log is not None  # a logged step also computes metrics
        for update in state.updates:
            with engine.at(Phase.START), engine.train_only(update):
                engine.begin(UpdateContext(update, state.progress.step + 1, 1, samples, is_logged))
                engine.snapshot.take("written")
                engine.scaled(engine.weight_of(samples))  # both are retained
                with engine.at(Phase.DATA), self.memory.watch(self.meter.resident()):
                    split = self.fetched(batches.micro_batches(state.progress, sizes))
                    micro_batches = engine.prepare(split, self._watched)
                    result = run_update(engine, micro_batches, self._micro_batch_context)
                    step_is_complete = state.progress.finish_update(result.applied, state.cadences)
                    if step_is_complete:
                        batches.advance(state.progress)
                    engine.finish_update()
            engine.drop_gradients()
        state.average.catch_up(state.progress.step)

    @contextlib.contextmanager
    def _micro_batch_context(self, micro: MicroBatch) -> Iterator[None]:
        with self.engine.strategy.micro_batch(micro.last), self._watched(micro.data):
            yield

    @contextlib.contextmanager
    def _watched(self, batch: Any) -> Iterator[None]:
        with self.memory.watch(self.meter.resident()), self.memory.watch({Category.BATCH: tensors_in(batch)}):
            yield


# --- the representative batch


def longest(batches: TrainBatches, size: int) -> MicroBatch | None:
    """Return the micro-batch of `size` with the most elements among the first SURVEYED samples; None if all are alike.
    Ignores those with fewer samples than the first.
    """
    longest_batch: MicroBatch | None = None
    most_elements = -1
    element_counts = set[int]()
    full_size = 0  # samples of the first micro-batch
    surveyed = 0
    for micro in _first_epoch(batches, size):
        # Fewer samples have fewer elements, whatever their lengths: they say nothing about these.
        full_size = full_size or micro.samples
        if micro.samples == full_size:
            elements = elements_in(micro.data)
            element_counts.add(elements)
            if elements > most_elements:
                most_elements = elements
                longest_batch = micro
        surveyed += micro.samples
        if surveyed >= max(SURVEYED, 2 * full_size):
            break

    if len(element_counts) == 1:
        return None
    return longest_batch


def _first_epoch(batches: TrainBatches, size: int) -> Iterator[MicroBatch]:
    progress = Progress()
    while progress.epoch == 0:
        yield from batches.micro_batches(progress, [size])
        batches.advance(progress)


# --- batches without values


def without_values(
    micro_batches: Iterator[MicroBatch], fake: Fake, longest_batch: MicroBatch | None
) -> Iterator[MicroBatch]:
    """Yield the micro-batches with shapes only, fetched outside of all modes.

    Args:
        micro_batches: real ones.
        fake: removes the values of a tensor.
        longest_batch: takes the place of each micro-batch with as many samples; None: of none.
    """
    while True:
        with outside_dispatch_modes():
            fetched = next(micro_batches, None)
        if fetched is None:
            return
        shown = fetched
        if longest_batch is not None and longest_batch.samples == fetched.samples:
            shown = longest_batch
        slice_samples = functools.partial(_slice_without_values, shown, fake)
        # No local variable may hold the data: it would stay in memory during the whole step.
        yield fetched._replace(data=map_tensors(fake, shown.data), slice_samples=slice_samples)


def _slice_without_values(micro: MicroBatch, fake: Fake, start: int, end: int) -> Any:
    with outside_dispatch_modes():
        batch = micro.slice_samples(start, end)
    return map_tensors(fake, batch)
