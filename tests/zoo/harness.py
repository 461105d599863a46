"""Runs cells of the zoo with faults, and records all that must not depend on them."""

import contextlib
import dataclasses
import functools
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import runs
import torch
from faults import Fault
from harness import Record, Recorded
from runs import differences
from torch import nn

from trainapp.config.schema import Config, Target, UpdateSettings
from trainapp.oom import recovery
from trainapp.oom.failure import Failure
from trainapp.parallel.ranks import Ranks
from trainapp.state.snapshot import Snapshot
from trainapp.training.session import Session

from . import catalogue
from .batches import index_of
from .catalogue import Cell

STEPS = 4
OVERRIDES = (
    "oom.grow=false",
    "model=mlp",
    "data=digits",
    "data.num_workers=0",
    "user_packages=[zoo]",
    "task=zoo.losses.classify",
    "objective=min loss",
    "optimizer.lr=0.01",
    "schedule=constant",
    "batch.global_size=16",
    "batch.micro_size=8",
    "batch.eval_micro_size=8",
    f"train.max_steps={STEPS}",
)


def configure(cell: Cell, run_dir: Path, changes: dict[str, Any] | None = None) -> Config:
    """The cell's configuration; changes: see `runs.changed`."""
    config = runs.configure(run_dir, *OVERRIDES)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, target=f"zoo.{cell.model}", arguments={}),
        data=dataclasses.replace(config.data, target=f"zoo.{cell.data}", arguments={}),
        task=f"zoo.{cell.task}",
        metrics={} if cell.metric is None else {"own": Target(f"zoo.{cell.metric}", {})},
        updates=[
            UpdateSettings(name=name, task=f"zoo.{task}", parameters=[parameters], optimizer=config.optimizer)
            for name, task, parameters in cell.updates
        ],
    )
    return runs.changed(config, {**dict(cell.changes), **(changes or {})})


class _Watched:
    """The task, noting which samples it is given for which step, and where an evaluation's first batch ends."""

    def __init__(self, task: Any, training: "Training"):
        self.unwatched, self.training = task, training

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unwatched, name)

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        return self._noted(self.unwatched, model, batch)

    def embed(self, model: nn.Module, batch: Any) -> Any:
        """Of a task that has it. With gradients it repeats what was noted without them."""
        embed = self.unwatched.embed
        return embed(model, batch) if torch.is_grad_enabled() else self._noted(embed, model, batch)

    def _noted(self, task: Any, model: nn.Module, batch: Any) -> Any:
        session, operations = self.training.run, self.training.injector.operations
        progress = session.state.progress
        if session.engine.phase == "evaluate":
            result = task(model, batch)
            operations.setdefault(("first evaluation batch", progress.step), operations["evaluate", progress.step])
            return result
        if not progress.update:  # the others are on the same samples
            place = (progress.epoch, progress.consumed)
            self.training.trained.setdefault(place, []).append(index_of(batch).tolist())
        self.training.on_batch(session)
        return task(model, batch)


class Training(Recorded):
    """One run of a cell, with its configuration.

    on_batch, on_sample: called before every training micro-batch, and for every fetched sample.
    `error` is what ended the run, if not its end; `trained` has the samples of each micro-batch by position (epoch,
    samples consumed), without those of aborted attempts; `began` is the position of the first attempt.
    """

    def __init__(
        self,
        cell: Cell,
        config: Config,
        *faults: Fault,
        on_batch: Callable[[Session], None] = lambda session: None,
        on_sample: Callable[[Session], None] | None = None,
        **options: Any,
    ):
        self.cell, self.on_batch, self.on_sample = cell, on_batch, on_sample
        self.error: BaseException | None = None
        self.trained: dict[tuple[int, int], list[list[int]]] = {}
        self.began: tuple[int, int] | None = None
        catalogue.as_in_a_new_process(cell)
        super().__init__(config, *faults, **options)

    def _perform(self, config: Config, ranks: Ranks | None) -> None:
        try:
            super()._perform(config, ranks)
        except (Exception, SystemExit) as error:
            self.error = error

    def watch(self, session: Session) -> None:
        session.engine.evaluated_task = _Watched(session.task, self)
        session.engine.tasks = {name: _Watched(task, self) for name, task in session.engine.tasks.items()}
        if self.on_sample is not None:
            fetcher = session.batches._loader.fetcher
            fetcher.dataset = _Failing(fetcher.dataset, functools.partial(self.on_sample, session))

    def begin(self, session: Session) -> None:
        super().begin(session)
        here = (session.state.progress.epoch, session.state.progress.consumed)
        self.began = min(here, self.began or here)  # a run that went back to an older checkpoint repeats its steps
        first_is_done = session.state.progress.update > 0
        self.trained = {p: samples for p, samples in self.trained.items() if p < here or (p == here and first_is_done)}

    @property
    def schedule(self) -> dict[int, Any]:
        """`micro_schedule` of result.json."""
        result = json.loads((self.run_dir / "result.json").read_text())
        return schedule_of(json.dumps(result["micro_schedule"]))


class _Failing:
    """The data set, with a call before every sample."""

    def __init__(self, dataset: Any, before: Callable[[], None]):
        self.dataset, self.before = dataset, before

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, index: int) -> Any:
        self.before()
        return self.dataset[index]


def check_samples(training: Training) -> None:
    """Each finished epoch has each of its samples once; an unfinished one has none twice."""
    batches = training.run.batches
    samples = batches.epoch_samples or len(batches.dataset.vectors)  # of a stream there is no number
    by_epoch: dict[int, list[int]] = {}
    for (epoch, _), micro_batches in sorted(training.trained.items()):
        by_epoch.setdefault(epoch, []).extend(index for micro in micro_batches for index in micro)
    for epoch, indices in by_epoch.items():
        assert len(indices) == len(set(indices)), f"epoch {epoch} has samples twice: {sorted(indices)}"
        if epoch < training.run.state.progress.epoch:
            assert len(indices) == samples, f"epoch {epoch} lacks samples: {sorted(indices)}"


def schedule_of(text: str) -> dict[int, Any]:
    """A schedule from JSON, whose keys are strings; of several updates, by their names."""
    schedule = json.loads(text)
    if not all(step.isdecimal() for step in schedule):
        return {name: schedule_of(json.dumps(own)) for name, own in schedule.items()}
    return {
        int(step): {int(shape): size for shape, size in plan.items()} if isinstance(plan, dict) else plan
        for step, plan in schedule.items()
    }


def compare(session: Record, replay: Record, exact_evaluations: bool = True) -> list[str]:
    """Where a run differs from the replay of its schedule."""
    found = differences(session.state, replay.state) + differences(session.logged, replay.logged, "metrics")
    if exact_evaluations:
        return found + differences(session.evaluations, replay.evaluations, "evaluations")
    of_evaluations = (".progress.objective", ".progress.best")
    found = [difference for difference in found if not difference.startswith(of_evaluations)]
    for line, wanted in zip(session.evaluations, replay.evaluations, strict=True):
        found += [f"evaluations.{k}" for k in wanted if abs(line[k] - wanted[k]) > 1e-5 * (1 + abs(wanted[k]))]
    return found


def stop_at(step: int) -> Callable[[Session], None]:
    """A signal arrives during the step after `step` finished ones."""

    def on_batch(session: Session) -> None:
        if session.state.progress.step == step:
            session.stop.signal = int(signal.SIGTERM)

    return on_batch


LEFT: dict[str, tuple[Any, str, Callable[..., None]]] = {
    "registries": (Snapshot, "_restore_registries", lambda self, structure, contents: None),
    "tensors": (Snapshot, "_restore_tensors", lambda self, state: None),
    "owners": (Snapshot, "_restore_owners", lambda self, owned, except_kinds=(): None),
    "gradients": (torch.optim.Optimizer, "zero_grad", lambda self, set_to_none=True: None),
}


@contextlib.contextmanager
def leaving(part: str) -> Iterator[None]:
    """A wrong variant of the transaction: what the failed attempt did to `part` stays after the rollback."""
    undo_attempt = recovery.undo_attempt

    def forgetful(session: Session, failure: Failure) -> None:
        with mock.patch.object(*LEFT[part]):
            undo_attempt(session, failure)

    with mock.patch.object(recovery, "undo_attempt", forgetful):
        yield
