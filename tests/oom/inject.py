"""Raises out of memory at a chosen operation of a chosen phase of a chosen step. Test side only.

A dispatch mode sees every tensor operation before it runs, as an allocator would, and raises torch.OutOfMemoryError
in its place. Fetching runs no tensor operation on the CPU, so the data set raises there.
"""

import collections
import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainapp.config.schema import Config
from trainapp.oom.report import OomReport
from trainapp.parallel.ranks import SingleRank
from trainapp.run import runner
from trainapp.signals import StopRequest
from trainapp.training.session import Session

from .conftest import tiny

# The phases of a step in order, then those between two steps.
PHASES = ("data", "forward", "loss", "backward", "clip", "metric")
BETWEEN = ("after commit", "weight average", "evaluate")  # these follow a finished step


class Injector(TorchDispatchMode):
    """Raises before operation `operation` (from 0) of `phase` in step `step` (from 1).

    Between two steps, `step` is the step just finished. "after commit" is the rest of a step once its parameters have
    changed.
    above: None raises `times` times; a number raises while the micro-batch is larger than it.
    `fired` counts the errors; `where` has the run's phase at each.
    """

    def __init__(self, phase: str, step: int, operation: int = 0, *, times: int = 1, above: int | None = None):
        super().__init__()
        self.phase, self.step, self.operation, self.times, self.above = phase, step, operation, times, above
        self.fired = 0
        self.where: list[str] = []
        self.seen = 0
        self.run: Session | None = None
        self._in_model = False
        self._forward_done = False

    def attach(self, session: Session) -> None:
        """Watch this run. Call again when a recovery has built a new one."""
        self.run, self.seen = session, 0
        session.state.model.register_forward_pre_hook(self._enter)
        session.state.model.register_forward_hook(self._leave, always_call=True)

    def _enter(self, *_: Any) -> None:
        self._in_model, self._forward_done = True, False

    def _leave(self, *_: Any) -> None:
        self._in_model, self._forward_done = False, True

    def arm_attempt(self) -> None:
        """Restart the operation count: each attempt counts from 0."""
        self.seen, self._in_model, self._forward_done = 0, False, False

    def at(self, phase: str) -> bool:
        """Whether the error is due at an operation of `phase`."""
        state = self.run.state
        sizes = self.run.sizes.evaluation if phase == "evaluate" else self.run.sizes.train
        step = state.progress.step + (phase not in BETWEEN)
        if phase != self.phase:
            return False
        if step != self.step:
            return False
        if self.fired >= self.times if self.above is None else sizes.size <= self.above:
            return False
        self.seen += 1
        return self.seen > self.operation

    def fail(self) -> None:
        """Raise out of memory and record it."""
        self.fired += 1
        self.seen = 0
        self.where.append(self.run.engine.phase)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. (injected)")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        if self.run is not None and not func.is_view and self.at(self._phase()):  # a view takes no memory
            self.fail()
        return func(*args, **(kwargs or {}))

    def _phase(self) -> str:
        """The loss follows the model in the forward; the data phase is checked only by the data set."""
        phase = self.run.engine.phase
        if phase == "forward" and not self._in_model:
            return "loss" if self._forward_done else "before the model"
        others = {"data": "between micro-batches"} | {"after the commit": "after commit"}
        return others.get(phase, phase)


class Counts(Injector):
    """Never fires; counts the operations of each (phase, step)."""

    def __init__(self):
        super().__init__("", 0, times=0)
        self.operations: collections.Counter = collections.Counter()

    def at(self, phase: str) -> bool:
        self.operations[phase, self.run.state.progress.step + (phase not in BETWEEN)] += 1
        return False


class Watched:
    """A data set that records which samples are fetched for which step, and runs out of memory on request."""

    def __init__(
        self, dataset: Any, session: Session, injector: Injector | None, fetched: list, changed: Callable | None
    ):
        self.dataset, self.run, self.injector, self.fetched, self.changed = dataset, session, injector, fetched, changed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)

    def __getitem__(self, index: int) -> Any:
        """A stream's sample."""
        return self.dataset[index]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        progress = self.run.state.progress
        if self.injector is not None and self.run.engine.phase == "data" and self.injector.at("data"):
            self.injector.fail()
        if not self._is_piece(progress.step, progress.epoch, indices):
            self.fetched.append((progress.step, progress.epoch, tuple(indices)))
        batch = self.dataset.__getitems__(indices)
        return batch if self.changed is None else self.changed(batch)

    def _is_piece(self, step: int, epoch: int, indices: Sequence[int]) -> bool:
        """Whether these samples were fetched last, and are now cut into smaller micro-batches."""
        return bool(self.fetched) and self.fetched[-1][:2] == (step, epoch) and set(indices) < set(self.fetched[-1][2])


class Recorded:
    """A whole run in this process, built from the runner's own parts: prepare, attempt, recover.

    failures: the reports; fetched: (finished steps, epoch, sample indices) of every micro-batch that was trained on,
    without those of aborted attempts.
    """

    def __init__(
        self,
        config: Config,
        injector: Injector | None = None,
        between: Callable[[Session], None] | None = None,
        changed: Callable[[Any], Any] | None = None,
        most: int = 60,
    ):
        self.failures: list[OomReport] = []
        self.fetched: list[tuple[int, int, tuple[int, ...]]] = []
        self.injector, self.changed = injector, changed
        stop = StopRequest()
        self.run = runner.prepare(config, stop, SingleRank())
        self._attach()
        try:
            while (failure := self._attempt(config)) is not None:
                self.failures.append(failure)
                assert len(self.failures) < most, "this never ends"
                carried = runner.recover(self.run, failure)
                if carried is not None:
                    self.run.close()
                    del self.run
                    if injector is not None:
                        injector.run = None
                    carried.memory.release()
                    self.run = runner.prepare(carried.config, stop, SingleRank(), carried)
                    self._attach()
                done = self.run.state.progress.step
                self.fetched[:] = [entry for entry in self.fetched if entry[0] < done]
                if between is not None:
                    between(self.run)
        finally:
            self.run.close()

    def _attach(self) -> None:
        fetcher = self.run.batches._loader.fetcher
        fetcher.dataset = Watched(fetcher.dataset, self.run, self.injector, self.fetched, self.changed)
        if self.injector is not None:
            self.injector.attach(self.run)

    def _attempt(self, config: Config) -> OomReport | None:
        if self.injector is None:
            return runner.attempt(self.run)
        self.injector.arm_attempt()
        with self.injector:
            return runner.attempt(self.run)

    def samples(self) -> dict[tuple[int, int], list[int]]:
        """`{(finished steps, epoch): sample indices in order}`, however they were cut."""
        found: dict[tuple[int, int], list[int]] = {}
        for step, epoch, indices in self.fetched:
            found.setdefault((step, epoch), []).extend(indices)
        return found

    def state(self) -> dict[str, Any]:
        """All that must survive a recovery unchanged: everything except the sizes of the search."""
        state = self.run.state
        values = state.values(SingleRank())
        values["progress"] = {k: v for k, v in values["progress"].items() if k != "evaluated_at"}
        return {"tensors": state.tensors(), "values": values, "fetched": self.fetched}


def peak_of(run_dir: Path, overrides: Sequence[str], size: int) -> int:
    """Peak bytes of two steps with this micro-batch."""
    changes = {"batch.micro_size": size, "train.max_steps": 2}
    return Recorded(tiny(run_dir, *overrides, changes=changes)).run.memory.peak


def limit_between(folder: Path, overrides: Sequence[str], fits: int, fails: int) -> int:
    """A limit in bytes under which a micro-batch of `fits` fits and one of `fails` does not."""
    peaks = [peak_of(folder / str(size), overrides, size) for size in (fits, fails)]
    assert peaks[0] + 2 < peaks[1]
    return sum(peaks) // 2


@functools.cache
def operations(*overrides: str) -> collections.Counter:
    """The number of operations in each phase of each step."""
    counts = Counts()
    with tempfile.TemporaryDirectory() as folder:
        Recorded(tiny(Path(folder), *overrides), counts)
    return counts.operations


def logged(run_dir: Path) -> list[dict[str, float]]:
    """The training values in the log steps."""
    import json

    names = ("step", "samples", "epoch", "loss", "accuracy", "grad_norm", "lr", "skipped_steps")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in names} for line in lines]
