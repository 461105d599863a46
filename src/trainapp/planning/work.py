"""The work measured by a plan: a step of an engine, as in `training.loop`.

Nothing is searched, logged, saved or called back: there is no session.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from trainapp.assembly.parts import Parts
from trainapp.config.schema import Config
from trainapp.data.batch import MicroBatch, tensors_in
from trainapp.errors import UserError
from trainapp.memory.device import static_bytes
from trainapp.memory.live_tensors import Category
from trainapp.models.inspect import blocks_of, smallest_micro_batch
from trainapp.planning.recorder import Breakdown, PhaseLog, Recorder
from trainapp.techniques.catalogue import Situation, available
from trainapp.tracking.meter import Meter
from trainapp.training.engine import Engine, Totals
from trainapp.training.phase import Phase, Step

Fetched = Callable[[Iterator[MicroBatch]], Iterator[MicroBatch]]


@dataclass
class Work:
    """An engine and its batches. size: micro-batch size. fetched: transforms fetched batches: a trace removes their
    values.
    """

    config: Config
    engine: Engine
    parts: Parts
    size: int
    fetched: Fetched = iter

    def __post_init__(self) -> None:
        self.memory = self.parts.memory
        self.meter = Meter(self.engine.state, self.memory, self.engine.strategy.communication_buffers)
        if isinstance(self.memory, Recorder):
            self.engine.attempt = PhaseLog(self.memory)
            self.memory.resident = self.meter.resident

    def peak(self, recorder: Recorder, steps: int = 1) -> Breakdown:
        """The memory of training. Runs at least `steps` steps, and one more if the last has left tensors, such as
        optimizer state or a tensor in a list.
        """
        for number in range(1, steps + 2):
            kept = recorder.kept_bytes()
            self.train_step()
            state = self.engine.state
            static = static_bytes(state.model, state.optimizers, state.average.averages, state.keeps_gradients)
            if number >= steps and static == self.meter.static and recorder.kept_bytes() == kept:
                break
        return self.described(recorder.highest)

    def described(self, found: Breakdown) -> Breakdown:
        """Adds the plan's facts about the model."""
        model, blocks = self.engine.state.model, 0
        with contextlib.suppress(UserError):
            blocks = len(blocks_of(model, "blocks()"))
        techniques = tuple(available(Situation(self.config, model, self.engine.knows_loss)))
        return dataclasses.replace(found, smallest=smallest_micro_batch(model), blocks=blocks, techniques=techniques)

    def train_step(self) -> None:
        """One optimizer step, with all its updates; see `training.loop.train_step`."""
        engine, state, batches = self.engine, self.engine.state, self.parts.batches
        samples = batches.share(state.progress).total
        logs = self.config.every.log is not None  # a logged step also computes metrics
        for update in state.updates:
            engine.attempt.phase = Phase.START
            with engine.alone(update):
                engine.begin(Step(update, state.progress.step + 1, 1, samples, logs, is_drawn=False))
                engine.snapshot.take("written")
                engine.scaled(engine.weight_of(samples))  # both are retained
                engine.attempt.phase = Phase.DATA
                with self.memory.watch(self.meter.resident()):
                    totals = Totals()
                    cut = self.fetched(batches.micro_batches(state.progress, [self.size] * len(state.updates)))
                    for micro in engine.micro_batches(cut, self._watched):
                        with engine.strategy.micro_batch(micro.last), self._watched(micro.data):
                            loss, totals = engine.forward(micro, totals)
                            engine.backward(loss, micro)
                        if not engine.attempt.phase.is_partial:
                            engine.attempt.phase = Phase.DATA
                    totals = engine.reduce(totals)
                    applied = engine.commit(totals, engine.clip(totals))
                    if state.progress.finish_update(applied, state.every):
                        batches.advance(state.progress)
                    engine.attempt.phase = Phase.COMMITTED
            engine.drop_gradients()
        state.average.catch_up(state.progress.step)

    @contextlib.contextmanager
    def _watched(self, batch: Any) -> Iterator[None]:
        with self.memory.watch(self.meter.resident()), self.memory.watch({Category.BATCH: tensors_in(batch)}):
            yield
