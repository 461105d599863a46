"""Whole runs in this process, or on this rank, with faults; and all that must be equal in an equal run."""

import collections
import contextlib
import dataclasses
import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from faults import Fault, Injector, injected
from torch import Tensor, nn

from trainapp.config.schema import Config
from trainapp.data.loader import Fetcher, Request
from trainapp.oom.failure import Failure
from trainapp.parallel.ranks import Ranks
from trainapp.run import runner
from trainapp.run.result import Result
from trainapp.tracking.tracker import Tracker
from trainapp.training.session import Session


class Recorded:
    """One run through `runner.run`, in which every one of `faults` must strike.

    run: the last session; failures: the reports; fetched: (finished steps, epoch, sample indices) of every micro-batch
    that this process fetched to train on, without those of aborted attempts.
    injector: instead of `faults`, with those that may strike; folder: of their marks; counts: whether operations are
    counted though there are no faults.
    pictures: whether the memory of errors is drawn, which costs more than a tiny run.
    """

    def __init__(
        self,
        config: Config,
        *faults: Fault,
        injector: Injector | None = None,
        counts: bool = False,
        ranks: Ranks | None = None,
        folder: Path | None = None,
        pictures: bool = False,
    ):
        self.run_dir = Path(config.run_dir)
        self.run: Session | None = None
        self.result: Result | None = None
        self.failures: list[Failure] = []
        self.fetched: list[tuple[int, int, tuple[int, ...]]] = []
        self.injector = injector or Injector(faults, folder)
        self.faults = faults
        with contextlib.ExitStack() as stack:
            for owner, name, replacement in (
                (runner, "run_until_oom", functools.partial(self._attempt, runner.run_until_oom)),
                (Fetcher, "__getitem__", self._noting(Fetcher.__getitem__)),
            ):
                stack.enter_context(mock.patch.object(owner, name, replacement))
            if not pictures:
                stack.enter_context(mock.patch.object(Tracker, "queue_picture"))
            if self.injector.faults or injector or counts:
                stack.enter_context(injected(self.injector))
            self._perform(config, ranks)

    def _perform(self, config: Config, ranks: Ranks | None) -> None:
        self.result = runner.run(config, ranks)
        assert self.injector.folder or not [f for f in self.faults if self.injector.fired[f] < f.times]

    def _attempt(self, attempt: Callable[[Session], Failure | None], session: Session) -> Failure | None:
        if session is not self.run:
            self.run = session
            self.watch(session)
        self.begin(session)
        failure = attempt(session)
        if failure is not None:
            self.failures.append(failure)
            assert len(self.failures) < 60, "this never ends"
            if failure.phase.is_partly_applied:
                self.run = None  # a new one is built, in the memory of this one
        return failure

    def watch(self, session: Session) -> None:
        """Called with each session before its first attempt."""

    def begin(self, session: Session) -> None:
        """Called before each attempt: forgets what is done again."""
        self.fetched[:] = [entry for entry in self.fetched if entry[0] < session.state.progress.step]

    def _noting(self, fetch: Callable[[Fetcher, Request], Any]) -> Any:
        def noting(fetcher: Fetcher, request: Request) -> Any:
            if self.run is not None and fetcher is self.run.batches._loader.fetcher:
                place, indices = (self.run.state.progress.step, request.epoch), tuple(request.indices)
                last = self.fetched[-1] if self.fetched else None
                if last is None or last[:2] != place or not set(indices) < set(last[2]):  # what was fetched last is cut
                    self.fetched.append((*place, indices))
            return fetch(fetcher, request)

        return noting

    def record(self) -> "Record":
        """All that must be equal in an equal run."""
        return Record(state_of(self.run), self.fetched, logged(self.run_dir), logged(self.run_dir, "evaluations"))


class Record(NamedTuple):
    """Compare with `runs.differences`."""

    state: dict[str, Any]
    fetched: list[tuple[int, int, tuple[int, ...]]]
    logged: list[dict[str, float]]
    evaluations: list[dict[str, float]]


def logged(run_dir: Path, name: str = "metrics") -> list[dict[str, float]]:
    """The lines of metrics.jsonl or evaluations.jsonl, without times, sizes and memory."""
    path = run_dir / f"{name}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{k: v for k, v in line.items() if not any(part in k for part in INCIDENTAL)} for line in lines]


INCIDENTAL = ("time", "second", "memory", "batch/", "oom", "wait", "per_")


def state_of(session: Session) -> dict[str, Any]:
    """Parameters, buffers, optimizers, average, progress, and what model, task and data own besides."""
    state, task = session.state, getattr(session.task, "unwatched", session.task)
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
        "task": model_state(task) if isinstance(task, nn.Module) else owned(task),
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
    """The attributes of an object that are plain values, tensors, generators, modules, or containers of those."""
    plain = {name: _plain(value) for name, value in getattr(thing, "__dict__", {}).items() if name not in _TORCHS_OWN}
    return {name: value for name, value in plain.items() if value is not _plain}


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
    if isinstance(value, nn.Module):
        return model_state(value)
    return owned(value) if hasattr(value, "__dict__") and not callable(value) else _plain
