"""Runs cells of the zoo through the runner itself, with faults, and records all that must not depend on them."""

import collections
import contextlib
import dataclasses
import functools
import json
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from oom.inject import Counts, Injector
from runs import TINY, differences
from torch import Tensor, nn

from trainapp.config import compose
from trainapp.config.schema import Config, Target, Update
from trainapp.oom import recovery
from trainapp.oom.report import OomReport
from trainapp.run import runner
from trainapp.run.result import Result
from trainapp.snapshot import Snapshot
from trainapp.tracking.tracker import Tracker
from trainapp.training.session import Session

from . import catalogue
from .batches import index_of
from .catalogue import Cell

STEPS = 4
OVERRIDES = (
    *TINY,
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


@functools.cache
def base() -> Config:
    """The configuration that the cells change: composing costs more than a run."""
    return compose.from_command_line(OVERRIDES)


def configure(cell: Cell, run_dir: Path, changes: dict[str, Any] | None = None) -> Config:
    """The cell's configuration. changes: "section.key" to value; of `data` and `model`, constructor arguments."""
    config = base()
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, target=f"zoo.{cell.model}", arguments={}),
        data=dataclasses.replace(config.data, target=f"zoo.{cell.data}", arguments={}),
        task=f"zoo.{cell.task}",
        metrics={} if cell.metric is None else {"own": Target(f"zoo.{cell.metric}", {})},
        updates=[
            Update(name=name, task=f"zoo.{task}", parameters=[parameters], optimizer=config.optimizer)
            for name, task, parameters in cell.updates
        ],
        run_dir=str(run_dir),
    )
    for name, value in {**dict(cell.changes), **(changes or {})}.items():
        section, key = name.split(".")
        part = getattr(config, section)
        is_argument = section in ("data", "model") and not hasattr(part, key)
        change = {"arguments": {**part.arguments, key: value}} if is_argument else {key: value}
        config = dataclasses.replace(config, **{section: dataclasses.replace(part, **change)})
    return config


class Counting(Counts):
    """Also the operations of "first evaluation batch"."""

    def evaluated(self) -> None:
        """A batch of an evaluation has ended."""
        step = self.run.state.progress.step
        self.operations.setdefault(("first evaluation batch", step), self.operations["evaluate", step])


class _Recording:
    """The task, noting which samples it is given for which step, and striking on request."""

    def __init__(self, task: Any, training: "Training"):
        self.task, self.training = task, training

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        return self._noted(self.task, model, batch)

    def embed(self, model: nn.Module, batch: Any) -> Any:
        """Of a task that has it. With gradients it repeats what was noted without them."""
        embed = self.task.embed
        return embed(model, batch) if torch.is_grad_enabled() else self._noted(embed, model, batch)

    def _noted(self, task: Any, model: nn.Module, batch: Any) -> Any:
        session = self.training.run
        if session.engine.phase != "evaluate":
            progress = session.state.progress
            if not progress.update:  # the others are on the same samples
                place = (progress.epoch, progress.consumed)
                self.training.trained.setdefault(place, []).append(index_of(batch).tolist())
            self.training.on_batch(session)
            return task(model, batch)
        result = task(model, batch)
        for fault in self.training.faults:
            if isinstance(fault, Counting):
                fault.evaluated()
        return result


class Training:
    """One run through `runner.run`, in this process.

    faults: injectors; on_batch, on_sample: called before every training micro-batch, and for every fetched sample.
    `error` is what ended the run, if not its end; `trained` has the samples of each micro-batch by position (epoch,
    samples consumed), without those of aborted attempts; `state` is all that must be equal in an equal run.
    """

    def __init__(
        self,
        cell: Cell,
        run_dir: Path,
        changes: dict[str, Any] | None = None,
        faults: Sequence[Injector] = (),
        on_batch: Callable[[Session], None] = lambda session: None,
        on_sample: Callable[[Session], None] = lambda session: None,
    ):
        self.cell, self.run_dir, self.faults = cell, run_dir, faults
        self.on_batch, self.on_sample = on_batch, on_sample
        self.run: Session | None = None
        self.result: Result | None = None
        self.error: BaseException | None = None
        self.failures: list[OomReport] = []
        self.trained: dict[tuple[int, int], list[list[int]]] = {}
        self.began: tuple[int, int] | None = None  # the position of the first attempt
        self.attempts = 0
        catalogue.as_in_a_new_process(cell)
        attempt = runner.attempt
        with (
            mock.patch.object(runner, "attempt", functools.partial(self._attempt, attempt)),
            mock.patch.object(Tracker, "picture"),  # drawing costs more than the run
        ):
            try:
                self.result = runner.run(configure(cell, run_dir, changes))
            except (Exception, SystemExit) as error:
                self.error = error

    def _attempt(self, original: Callable[[Session], OomReport | None], session: Session) -> OomReport | None:
        self.attempts += 1
        assert self.attempts < 60, "this never ends"
        if session is not self.run:
            self.run = session
            session.engine.evaluated_task = _Recording(session.task, self)
            session.engine.tasks = {name: _Recording(task, self) for name, task in session.engine.tasks.items()}
            for fault in self.faults:
                fault.attach(session)
            fetcher = session.batches._loader.fetcher
            fetcher.dataset = _Failing(fetcher.dataset, self)
        here = (session.state.progress.epoch, session.state.progress.consumed)
        self.began = min(here, self.began or here)  # a run that went back to an older checkpoint repeats its steps
        first_is_done = session.state.progress.update > 0
        self.trained = {p: samples for p, samples in self.trained.items() if p < here or (p == here and first_is_done)}
        with contextlib.ExitStack() as stack:
            for fault in self.faults:
                fault.arm_attempt()
                stack.enter_context(fault)
            failure = original(session)
        if failure is not None:
            self.failures.append(failure)
        return failure

    @property
    def schedule(self) -> dict[int, Any]:
        """`micro_schedule` of result.json."""
        result = json.loads((self.run_dir / "result.json").read_text())
        return schedule_of(json.dumps(result["micro_schedule"]))

    def state(self) -> dict[str, Any]:
        """All that must be equal in an equal run: see `state_of`."""
        assert self.run is not None
        return state_of(self.run, self.cell)

    def record(self) -> "Record":
        """What must be equal in an equal run."""
        return Record(self.state(), self.logged(), self.evaluations())

    def logged(self) -> list[dict[str, float]]:
        """The log steps without times, sizes and memory."""
        return [{k: v for k, v in line.items() if not _is_incidental(k)} for line in self._lines("metrics.jsonl")]

    def evaluations(self) -> list[dict[str, float]]:
        """The evaluations, without times."""
        return [{k: v for k, v in line.items() if not _is_incidental(k)} for line in self._lines("evaluations.jsonl")]

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self.run_dir / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _is_incidental(name: str) -> bool:
    parts = ("time", "second", "memory", "batch/", "oom", "wait", "per_")
    return any(part in name for part in parts)


class _Failing:
    """The data set, which fails while a fault of the data phase is due."""

    def __init__(self, dataset: Any, training: Training):
        self.dataset, self.training = dataset, training

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "training"):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, index: int) -> Any:
        self.training.on_sample(self.training.run)
        for fault in self.training.faults:
            if self.training.run.engine.phase == "data" and fault.at("data"):
                fault.fail()
        return self.dataset[index]


def state_of(session: Session, cell: Cell) -> dict[str, Any]:
    """Parameters, buffers, optimizer, average, progress, and what model, task and data own besides."""
    state = session.state
    progress = dataclasses.asdict(state.progress)
    incidental = {"evaluated_at", "oom_restarts"}  # no result depends on them
    return {
        "model": model_state(state.model),
        "optimizer": [
            {number: dict(kept) for number, kept in optimizer.state_dict()["state"].items()}
            for optimizer in state.optimizers
        ],
        "average": [state.average.step, *(average.clone() for average in state.average.averages)],
        "scaler": [update.precision.scaler.state_dict() for update in state.updates],
        "progress": {name: value for name, value in progress.items() if name not in incidental},
        "task": owned(catalogue.find(cell.task)),
        "data": owned(session.batches.dataset),
    }


def model_state(model: nn.Module) -> dict[str, Any]:
    """Every parameter and buffer, those outside the state dict and None included, and the modules' own attributes."""
    found: dict[str, Any] = {}
    for prefix, module in model.named_modules():
        tensors = {**module._parameters, **module._buffers}
        found[prefix] = {name: None if t is None else t.detach().clone() for name, t in tensors.items()}
        found[prefix]["own"] = owned(module)
        found[prefix]["trainable"] = [
            name for name, p in module._parameters.items() if p is not None and p.requires_grad
        ]
    return found


_TORCHS_OWN = frozenset(vars(nn.Module()))


def owned(thing: Any) -> dict[str, Any]:
    """The attributes of an object that are plain values, tensors, generators, or containers of those."""
    if isinstance(thing, nn.Module):
        tensors = {name: buffer.clone() for name, buffer in thing._buffers.items() if buffer is not None}
    else:
        tensors = {}
    plain = {name: _plain(value) for name, value in getattr(thing, "__dict__", {}).items() if name not in _TORCHS_OWN}
    return tensors | {name: value for name, value in plain.items() if value is not _plain}


def _plain(value: Any) -> Any:
    """A copy of a value that can be compared; this function itself for what cannot."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, random.Random):
        return str(value.getstate())
    if isinstance(value, (list, tuple, collections.deque)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, (int, float, str)):
        return value
    if hasattr(value, "__dict__") and not isinstance(value, nn.Module) and not callable(value):
        return owned(value)
    return _plain


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


class Record(NamedTuple):
    """What must be equal in an equal run."""

    state: dict[str, Any]
    logged: list[dict[str, float]]
    evaluations: list[dict[str, float]]


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
    "owners": (Snapshot, "_restore_owners", lambda self, owned, but=(): None),
    "gradients": (torch.optim.Optimizer, "zero_grad", lambda self, set_to_none=True: None),
}


@contextlib.contextmanager
def leaving(part: str) -> Iterator[None]:
    """A wrong variant of the transaction: what the failed attempt did to `part` stays after the rollback."""
    roll_back = recovery.roll_back

    def forgetful(session: Session, failure: OomReport) -> None:
        with mock.patch.object(*LEFT[part]):
            roll_back(session, failure)

    with mock.patch.object(recovery, "roll_back", forgetful):
        yield
