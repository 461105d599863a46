"""Faults at a chosen place of a chosen step: memory that runs out, errors, signals, values that are not numbers.

`injected` patches the loop of this process: of a run in the test's own process, of a rank in a worker of `pool`, or,
through `parallel.saboteur`, of a worker of the real launcher.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import os
import resource
import signal
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainapp.checkpoint import directory
from trainapp.data.loader import Fetcher
from trainapp.data.stream import Stream
from trainapp.parallel.ddp import Exchange
from trainapp.torch_private import fsdp_collectives
from trainapp.training import loop, memory_watch
from trainapp.training.session import Session

ENVIRONMENT = "TRAINAPP_TEST_FAULTS"  # {"folder": ..., "faults": [...]}
# Phases of `session.engine.reported_phase`, recognised by their tensor operations: those of a step in order, then those
# that follow a finished step.
PHASES = ("data", "forward", "loss", "backward", "clip", "metric")
BETWEEN = ("after the commit", "weight average", "evaluate", "save", "manifest")
# Places that are functions; so is "data", in which no tensor operation runs on the CPU.
FUNCTIONS = ("data", "read", "gather buffer", "reduce buffer", "bucket", "manifest")
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 20.00 MiB. (injected)"
NO_ENGINE = "GET was unable to find an engine to execute this computation"  # pytorch/pytorch#108645
ERRORS = {
    "oom": (torch.OutOfMemoryError, OUT_OF_MEMORY),
    "exception": (ValueError, "out of memory, says the user"),
    "io error": (OSError, "injected failure"),
    # May mean memory: only if an allocation was refused, too.
    "no engine": (RuntimeError, NO_ENGINE),
    "no engine for memory": (RuntimeError, NO_ENGINE),
    "swallowed exception": (ValueError, "the labels are wrong"),
    "kernel": (RuntimeError, "CUDA error: invalid configuration argument"),
    # From these no process recovers.
    "driver": (RuntimeError, "CUDA driver error: out of memory"),
    "nccl": (
        torch.distributed.DistBackendError,
        "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version "
        "2.27.3\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc async 608 "
        "bytes",
    ),
}
# An allocation is refused, which the allocator counts; what asked for it catches the error, or raises another.
REFUSALS = ("swallowed", "no engine for memory", "swallowed exception")
SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "term": signal.SIGTERM, "usr1": signal.SIGUSR1}
POISON = {"nan": float("nan"), "inf": float("inf")}  # added to the result of the operation


@dataclasses.dataclass(frozen=True)
class Fault:
    """One failure of `rank`, in `phase` of step `step` (from 1; those that were skipped count).

    operation: how many operations of the phase (or calls of the place) in this attempt precede it. times: how often it
    strikes, at most once in an attempt at a step. above: as long as the micro-batch is larger than this. update: the
    name of the step's update, of several.
    kind: one of ERRORS, REFUSALS, SIGNALS or POISON, "slow" or "disk full".
    """

    phase: str
    step: int
    operation: int = 0
    kind: str = "oom"
    rank: int = 0
    times: int = 1
    above: int | None = None
    update: str = ""

    def marker(self, folder: Path, number: int) -> Path:
        """The file left by its `number`-th strike."""
        place = f"rank_{self.rank}_step_{self.step}_{self.phase}_{self.kind}_{number}".replace(" ", "_")
        return folder / f"{place}_operation_{self.operation}"


def fired(folder: Path, fault: Fault) -> int:
    """How often a fault struck in processes that had this folder."""
    return sum(fault.marker(folder, number).exists() for number in range(fault.times))


def environment(folder: Path, *faults: Fault) -> dict[str, str]:
    """For the workers of the real launcher: see `parallel.saboteur`."""
    plan = {"folder": str(folder), "faults": [dataclasses.asdict(fault) for fault in faults]}
    tests = Path(__file__).parent.parent
    path = [str(tests), str(tests / "helpers"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {ENVIRONMENT: json.dumps(plan), "PYTHONPATH": os.pathsep.join(path)}


def arm() -> None:
    """Fail as planned in $TRAINAPP_TEST_FAULTS, if it is set, until this process ends."""
    if ENVIRONMENT in os.environ:
        plan = json.loads(os.environ[ENVIRONMENT])
        injector = Injector([Fault(**fault) for fault in plan["faults"]], Path(plan["folder"]))
        _ARMED.append(injected(injector))
        _ARMED[-1].__enter__()


_ARMED: list[contextlib.AbstractContextManager["Injector"]] = []  # kept: a block whose manager is freed ends


class Injector(TorchDispatchMode):
    """Sees every tensor operation of the loop before it runs, as an allocator would: a view takes no memory.

    fired: how often each fault struck; operations: how many there were in each (phase, step). folder: a file for each
    strike, which a restarted worker finds.
    """

    def __init__(self, faults: Sequence[Fault] = (), folder: Path | None = None):
        super().__init__()
        self.faults, self.folder = faults, folder
        self.fired: collections.Counter[Fault] = collections.Counter()
        self.operations: collections.Counter[tuple[str, int]] = collections.Counter()
        self.refused = 3  # not zero, as in the second run of a process
        self._seen: collections.Counter[Fault] = collections.Counter()
        self._struck: set[int] = set()  # steps, in this attempt
        self._session: Any = lambda: None
        self._in_model = False

    @property
    def run(self) -> Session | None:
        """The session that is watched; not kept alive, or a run that is built again would need memory for both."""
        return self._session()

    def watch(self, session: Session) -> None:
        """A new attempt."""
        self._seen.clear()
        self._struck.clear()
        self._in_model = False
        if session is not self.run:
            self._session = weakref.ref(session)
            session.state.model.register_forward_pre_hook(lambda *_: self._enter(True))
            session.state.model.register_forward_hook(lambda *_: self._enter(False), always_call=True)

    def _enter(self, is_in_model: bool) -> None:
        self._in_model = is_in_model

    def phase(self) -> str:
        """What the tensor operation belongs to. What the task computes outside of the model is the loss."""
        phase = str(self.run.engine.reported_phase)
        return "loss" if phase == "forward" and not self._in_model else phase

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        poison = None
        if self.run is not None and (phase := self.phase()) not in FUNCTIONS and not func.is_view:
            poison = self.strike(phase)
        result = func(*args, **(kwargs or {}))
        if poison is not None and isinstance(result, torch.Tensor) and result.is_floating_point():
            return result + poison
        return result

    def strike(self, phase: str) -> float | None:
        """Called at each operation or function: fails if a fault is due. Returns what to add to the result, if any."""
        progress = self.run.state.progress
        step = progress.step + progress.skipped + (phase not in BETWEEN)
        self.operations[phase, step] += 1
        for fault in self.faults:
            if self._is_due(fault, phase, step) and self._may_strike(fault):
                self._struck.add(step)
                return self.fail(fault)
        return None

    def _is_due(self, fault: Fault, phase: str, step: int) -> bool:
        if (fault.rank, fault.phase, fault.step) != (self.run.ranks.rank, phase, step) or step in self._struck:
            return False
        if fault.update not in ("", self.run.state.update.name):
            return False
        if fault.above is not None and self.run.sizes.train.size <= fault.above:
            return False
        self._seen[fault] += 1
        return self._seen[fault] > fault.operation

    def _may_strike(self, fault: Fault) -> bool:
        """Counts the strike, unless there were enough of them."""
        number = self.fired[fault] if self.folder is None else fired(self.folder, fault)
        if fault.above is None and number >= fault.times:
            return False
        self.fired[fault] += 1
        if self.folder is not None:
            fault.marker(self.folder, number).write_text(f"{self.run.state.progress.step}\n")
        return True

    def fail(self, fault: Fault) -> float | None:
        """As `strike`, of this fault."""
        if fault.kind in REFUSALS:
            self.refused += 1
        if fault.kind in ERRORS:
            error, text = ERRORS[fault.kind]
            raise error(text)
        if fault.kind in SIGNALS:
            os.kill(os.getpid(), SIGNALS[fault.kind])
        elif fault.kind == "slow":
            time.sleep(1.0)
        elif fault.kind == "disk full":  # a real refusal by the kernel, for this process only
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
        return POISON.get(fault.kind)


@contextlib.contextmanager
def injected(injector: Injector) -> Iterator[Injector]:
    """Inside the block, the loop of this process fails as planned."""
    train = loop.train

    def watched(session: Session) -> None:
        injector.watch(session)
        with injector:
            train(session)

    def striking(place: str, function: Any) -> Any:
        @functools.wraps(function)  # DDP reads the annotations of a hook
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if injector.run is not None and (place != "data" or injector.run.engine.phase == "data"):
                injector.strike(place)
            return function(*args, **kwargs)

        return wrapper

    def refused() -> int:
        return injector.refused

    all_gather, reduce_scatter = fsdp_collectives()
    places = [
        (all_gather, "allocate", "gather buffer"),
        (reduce_scatter, "allocate", "reduce buffer"),
        (Exchange, "reduce", "bucket"),
        (Fetcher, "__getitem__", "data"),
        (Stream, "_peek", "read"),
        (directory, "write_manifest", "manifest"),
    ]
    with contextlib.ExitStack() as patches:
        patches.callback(setattr, injector, "_session", lambda: None)  # torch's C++ keeps the patched hook
        for owner, name, place in places:
            patches.enter_context(mock.patch.object(owner, name, striking(place, getattr(owner, name))))
        patches.enter_context(mock.patch.object(loop, "train", watched))
        patches.enter_context(mock.patch.object(memory_watch, "refused_allocations", refused))
        yield injector
