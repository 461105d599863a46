"""What a plan measures: a step and an evaluation of an engine, as `training.loop` and `training.evaluate` take them.

Nothing is searched, logged, saved or called back: there is no session.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from trainapp.assembly.build import smallest_micro_batch
from trainapp.assembly.parts import Parts
from trainapp.config.schema import Config
from trainapp.data.batch import MicroBatch, tensors_in
from trainapp.data.source import EvalBatches
from trainapp.errors import UserError
from trainapp.losses.losses import evaluate_metrics
from trainapp.memory.device import static_bytes
from trainapp.memory.live_tensors import Category
from trainapp.models.inspect import blocks_of
from trainapp.planning.recorder import Breakdown, PhaseLog, Recorder
from trainapp.techniques.catalogue import Situation, available
from trainapp.tracking.meter import Meter
from trainapp.training.engine import Engine, Totals
from trainapp.training.evaluate import LossOfEmbeddings, SumsOfBatches, as_evaluated, collector_for
from trainapp.training.session import Phase, Step

Fetched = Callable[[Iterator[MicroBatch]], Iterator[MicroBatch]]


@dataclass
class Work:
    """An engine and its batches. size, eval_size: of micro-batches.

    of_training, of_evaluation: what becomes of fetched batches, the latter by the name of the set: a trace takes their
    values away.
    """

    config: Config
    engine: Engine
    parts: Parts
    size: int
    eval_size: int
    of_training: Fetched = iter
    of_evaluation: Callable[[str, Iterator[MicroBatch]], Iterator[MicroBatch]] = lambda name, fetched: fetched

    def __post_init__(self) -> None:
        self.memory = self.parts.memory
        self.meter = Meter(self.engine.state, self.memory, self.engine.strategy.communication_buffers)
        if isinstance(self.memory, Recorder):
            self.engine.attempt = PhaseLog(self.memory)
            self.memory.resident = self.meter.resident

    @property
    def evaluates(self) -> bool:
        """Whether the run does."""
        return bool(self.parts.eval_sets) and self.config.every.eval is not None

    def peak(self, recorder: Recorder, training: bool, evaluation: bool, steps: int = 1) -> Breakdown:
        """What training and an evaluation need. At least so many steps; one more follows if the last has left
        something, such as optimizer state or a tensor in a list.
        """
        found = Breakdown()
        if training:
            found = found.joined(self._peak_of_training(recorder, steps))
        if evaluation and self.evaluates:
            if not training and not all(optimizer.state for optimizer in self.engine.state.optimizers):
                self.train_step()  # creates the state, which evaluations find in memory
            recorder.reset()
            self.evaluate()
            found = found.joined(recorder.highest)
        return self.described(found)

    def described(self, found: Breakdown) -> Breakdown:
        """With what a plan must know of the model."""
        model, blocks = self.engine.state.model, 0
        with contextlib.suppress(UserError):
            blocks = len(blocks_of(model, "blocks()"))
        techniques = tuple(available(Situation(self.config, model, self.engine.knows_loss)))
        return dataclasses.replace(found, smallest=smallest_micro_batch(model), blocks=blocks, techniques=techniques)

    def _peak_of_training(self, recorder: Recorder, steps: int) -> Breakdown:
        recorder.reset()
        for number in range(1, steps + 2):
            kept = recorder.kept_bytes()
            self.train_step()
            state = self.engine.state
            static = static_bytes(state.model, state.optimizers, state.average.averages, state.keeps_gradients)
            if number >= steps and static == self.meter.static and recorder.kept_bytes() == kept:
                break
        return recorder.highest

    def train_step(self) -> None:
        """One optimizer step, with all its updates; see `training.loop.train_step`."""
        engine, state, batches = self.engine, self.engine.state, self.parts.batches
        samples = batches.share(state.progress).total
        logs = self.config.every.log is not None  # sooner or later every run logs a step, which computes metrics, too
        for update in state.updates:
            engine.attempt.phase = Phase.START
            with engine.alone(update):
                engine.begin(Step(update, state.progress.step + 1, 1, samples, logs, is_drawn=False))
                engine.snapshot.take("written")
                engine.scaled(engine.weight_of(samples))  # both live on
                engine.attempt.phase = Phase.DATA
                with self.memory.watch(self.meter.resident()):
                    totals = Totals()
                    cut = self.of_training(batches.micro_batches(state.progress, [self.size] * len(state.updates)))
                    for micro in engine.micro_batches(cut, self._watched):
                        with engine.strategy.micro_batch(micro.last), self._watched(micro.data):
                            loss, totals = engine.forward(micro, totals)
                            engine.backward(loss, micro)
                        if not engine.attempt.phase.is_torn:
                            engine.attempt.phase = Phase.DATA
                    totals = engine.reduce(totals)
                    applied = engine.commit(totals, engine.clip(totals))
                    if state.progress.finish_update(applied, state.every):
                        batches.advance(state.progress)
                    engine.attempt.phase = Phase.COMMITTED
            engine.drop_gradients()
        state.average.catch_up(state.progress.step)

    @torch.no_grad()
    def evaluate(self) -> None:
        """The first batch of each set, since no other has more samples; see `training.evaluate`. Of a loss of
        embeddings all batches, each of which leaves some.
        """
        engine = self.engine
        engine.attempt.phase = Phase.EVALUATE
        for name, batches in self.parts.eval_sets.items():
            collector = collector_for(engine.evaluated_task)
            with as_evaluated(engine, name):
                totals = self._of_batches(name, batches, collector)
                if isinstance(collector, LossOfEmbeddings):
                    size = self.config.batch.global_size
                    for _, chosen in collector.gathered(engine.ranks, batches.is_stream, size):
                        with self._watched(chosen), engine.state.precision.autocast:
                            loss, count, metrics = collector.loss_of(chosen, engine.state.device)
                            totals = totals.plus(loss.clone(), count, evaluate_metrics(metrics, frozenset()))
            if engine.strategy.forward_is_collective:
                engine.strategy.finish_accumulation()

    def _of_batches(self, name: str, batches: EvalBatches, collector: SumsOfBatches) -> Totals:
        engine, totals = self.engine, Totals()
        for micro in self.of_evaluation(name, batches.from_sample(0, self.eval_size, engine.ranks)):
            with self._watched(micro.data):
                loss, count, metrics = engine.evaluate(collector.task, micro)
                totals = totals.plus(loss.clone(), count, evaluate_metrics(metrics, frozenset()))
            collector.keep(micro.real)
            engine.snapshot.take()
            if not isinstance(collector, LossOfEmbeddings):
                break
        return totals

    @contextlib.contextmanager
    def _watched(self, batch: Any) -> Iterator[None]:
        with self.memory.watch(self.meter.resident()), self.memory.watch({Category.BATCH: tensors_in(batch)}):
            yield
