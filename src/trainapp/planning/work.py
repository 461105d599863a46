"""The work measured by a plan: a step of an engine, as in `training.loop`, and its batches without values.

Nothing is searched, logged, saved or called back: there is no session.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainapp.assembly.resources import Resources
from trainapp.config.schema import Config
from trainapp.data.batch import MicroBatch, elements_in, map_tensors, tensors_in
from trainapp.data.source import Progress, TrainBatches
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


@dataclass
class Work:
    """An engine and its batches. size: micro-batch size. fetched: transforms fetched batches: a trace removes their
    values.
    """

    config: Config
    engine: Engine
    resources: Resources
    size: int
    fetched: Fetched = iter

    def __post_init__(self) -> None:
        self.memory, engine = self.resources.memory, self.engine
        self.meter = Meter(engine.state, self.memory, engine.gradients, engine.strategy.communication_buffers)
        if isinstance(self.memory, Recorder):
            self.memory.resident, self.memory.phase = self.meter.resident, lambda: engine.reported_phase

    def peak(self, recorder: Recorder, steps: int = 1) -> Breakdown:
        """The memory of training. Runs at least `steps` steps, and one more if the last has left tensors, such as
        optimizer state or a tensor in a list.
        """
        for number in range(1, steps + 2):
            before = recorder.bytes_between_steps()
            self.train_step()
            if number >= steps and recorder.bytes_between_steps() == before:
                break
        return self.described(recorder.highest)

    def described(self, found: Breakdown) -> Breakdown:
        """Adds the plan's facts about the model."""
        model, blocks = self.engine.state.model, 0
        with contextlib.suppress(UserError):
            blocks = len(blocks_of(model, "blocks()"))
        techniques = tuple(available(Situation(self.config, model, self.engine.knows_loss)))
        smallest = smallest_micro_batch(model)
        return dataclasses.replace(found, smallest=smallest, blocks=blocks, techniques=techniques)

    def train_step(self) -> None:
        """One optimizer step, with all its updates; see `training.loop.train_step`."""
        engine, state, batches = self.engine, self.engine.state, self.resources.batches
        with outside_dispatch_modes():  # tensors that a stream makes are real ones
            samples = batches.share(state.progress).total
        logs = self.config.every.log is not None  # a logged step also computes metrics
        for update in state.updates:
            with engine.at(Phase.START), engine.train_only(update):
                engine.begin(UpdateContext(update, state.progress.step + 1, 1, samples, logs))
                engine.snapshot.take("written")
                engine.scaled(engine.weight_of(samples))  # both are retained
                with engine.at(Phase.DATA), self.memory.watch(self.meter.resident()):
                    cut = self.fetched(batches.micro_batches(state.progress, [self.size] * len(state.updates)))
                    micro_batches = engine.micro_batches(cut, self._watched)
                    result = run_update(engine, micro_batches, self._micro_batch_context)
                    if state.progress.finish_update(result.applied, state.cadences):
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


def planned_config(config: Config, size: int, samples: int) -> Config:
    """The configuration of a planned step of `samples` in micro-batches of `size`, without features that cost no device
    memory, or only in the first few steps.
    """
    changes: dict[str, Any] = {
        "batch": dataclasses.replace(config.batch, global_size=samples, micro_size=size, micro_schedule=None),
        "accumulation": dataclasses.replace(config.accumulation, steps="auto"),
        "data": dataclasses.replace(config.data, num_workers=0),
        "model": dataclasses.replace(config.model, init_from=None),
        "train": dataclasses.replace(config.train, check_loss=False),
        "memory": dataclasses.replace(config.memory, limit=None, timeline=False),
        # For a plan, all updates are in one step.
        "updates": [dataclasses.replace(update, every=1, offset=None) for update in config.updates],
    }
    return dataclasses.replace(config, mode="train", **changes)


# --- the representative batch


def longest(batches: TrainBatches, size: int) -> MicroBatch | None:
    """The micro-batch of `size` with the most elements among the first SURVEYED samples; None if all are alike. Ignores
    those with fewer samples than the first.
    """

    def steps() -> Iterator[MicroBatch]:
        progress = Progress()
        while progress.epoch == 0:
            yield from batches.micro_batches(progress, [size])
            batches.advance(progress)

    chosen, elements, samples, seen = None, set[int](), 0, 0
    for micro in steps():
        samples = samples or micro.samples
        if micro.samples == samples:
            own = elements_in(micro.data)
            chosen = micro if own > max(elements, default=-1) else chosen
            elements.add(own)
        seen += micro.samples
        if seen >= max(SURVEYED, 2 * samples):
            break
    return chosen if len(elements) > 1 else None


# --- batches without values


def without_values(real: Iterator[MicroBatch], fake: Fake, instead: MicroBatch | None) -> Iterator[MicroBatch]:
    """The micro-batches with shapes only, fetched outside of all modes."""
    while True:
        with outside_dispatch_modes():
            fetched = next(real, None)
        if fetched is None:
            return
        chosen = instead if instead is not None and instead.samples == fetched.samples else fetched

        def piece(start: int, end: int, chosen: MicroBatch = chosen) -> Any:
            with outside_dispatch_modes():
                batch = chosen.piece(start, end)
            return map_tensors(fake, batch)

        yield fetched._replace(data=map_tensors(fake, chosen.data), piece=piece)
