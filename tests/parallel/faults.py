"""`fail_at(rank, step, phase, kind)`: a chosen rank fails at a chosen place of a chosen step. Test side only.

`injected` patches the loop of this process: in the workers of `pool` and, through `saboteur`, in those of the real
launcher. Every fault that fires leaves a file, so that a cell can assert it and a restarted worker does not refire it.
"""

import contextlib
import dataclasses
import functools
import json
import os
import resource
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainapp.checkpoint import directory
from trainapp.data.loader import Fetcher
from trainapp.data.stream import Stream
from trainapp.memory.device import CpuMemory
from trainapp.parallel.ddp import Exchange
from trainapp.torch_private import fsdp_collectives
from trainapp.training import loop
from trainapp.training.session import Session

ENVIRONMENT = "TRAINAPP_TEST_FAULTS"  # {"folder": ..., "faults": [...]}
# Phases of the loop (`session.engine.phase`), recognised by their tensor operations, and places that are functions.
PLACES = ("fetch", "read", "gather buffer", "reduce buffer", "bucket", "manifest")
BETWEEN = ("weight average", "evaluate", "save", "manifest")  # these follow a finished step


# Out-of-memory errors from which no process recovers, as torch words them.
BREAKING = {
    "driver": (RuntimeError, "CUDA driver error: out of memory"),
    "nccl": (
        torch.distributed.DistBackendError,
        "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version "
        "2.27.3\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc async 608 "
        "bytes",
    ),
}


@dataclasses.dataclass(frozen=True)
class Fault:
    """`operation`: how many operations of the phase (or calls of the place) precede it; `times`: how often it fires."""

    rank: int
    step: int
    phase: str
    kind: str = "oom"
    operation: int = 0
    times: int = 1

    def marker(self, folder: Path, number: int) -> Path:
        """The file left by its `number`-th firing."""
        place = f"rank_{self.rank}_step_{self.step}_{self.phase}_{self.kind}_{number}".replace(" ", "_")
        return folder / f"{place}_operation_{self.operation}"


def fail_at(rank: int, step: int, phase: str, kind: str = "oom", operation: int = 0, times: int = 1) -> Fault:
    """One fault.

    Kinds: oom, swallowed, driver, nccl, exception, io error, kill, freeze, term, usr1, nan, inf, slow, disk full.

    "swallowed": an allocation fails and something catches the error. driver, nccl: what no process recovers from.
    """
    return Fault(rank, step, phase, kind, operation, times)


def fired(folder: Path, fault: Fault) -> int:
    """How often a fault fired."""
    return sum(fault.marker(folder, number).exists() for number in range(fault.times))


def environment(folder: Path, *faults: Fault) -> dict[str, str]:
    """For the workers of the real launcher: see `saboteur`."""
    plan = {"folder": str(folder), "faults": [dataclasses.asdict(fault) for fault in faults]}
    tests = Path(__file__).parent.parent
    path = [str(tests), str(tests / "helpers"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {ENVIRONMENT: json.dumps(plan), "PYTHONPATH": os.pathsep.join(path)}


class Injector(TorchDispatchMode):
    """Sees every tensor operation of the loop before it runs, as an allocator would."""

    def __init__(self, faults: Iterable[Fault], folder: Path):
        super().__init__()
        self.faults, self.folder = list(faults), folder
        self.run: Session | None = None
        self.seen: dict[Fault, int] = {}
        self.refused = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        poison = self.strike(self.run.engine.phase) if self.run is not None else None
        result = func(*args, **(kwargs or {}))
        if poison is not None and isinstance(result, torch.Tensor) and result.is_floating_point():
            return result + poison
        return result

    def strike(self, phase: str) -> float | None:
        """Called at `phase`: fails if a fault is due. Returns what to add to a result, if anything."""
        for fault in self.faults:
            if not self._due(fault, phase):
                continue
            number = next((n for n in range(fault.times) if not fault.marker(self.folder, n).exists()), None)
            if number is None:
                continue
            value = self.run.state.progress.step
            fault.marker(self.folder, number).write_text(f"{value}\n")
            self.seen[fault] = 0
            if fault.kind == "swallowed":  # an allocator's count rises, and what asked catches the error
                self.refused += 1
                return None
            return _do(fault.kind)
        return None

    def _due(self, fault: Fault, phase: str) -> bool:
        session = self.run
        step = session.state.progress.step + (fault.phase not in BETWEEN)
        if (fault.rank, fault.phase) != (session.ranks.rank, phase) or step != fault.step:
            return False
        self.seen[fault] = self.seen.get(fault, 0) + 1
        return self.seen[fault] > fault.operation


def _do(kind: str) -> float | None:
    if kind == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. (injected)")
    if kind in BREAKING:
        error, text = BREAKING[kind]
        raise error(text)
    if kind == "exception":
        raise ValueError("injected failure")
    if kind == "io error":
        raise OSError("injected failure")
    signals = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "term": signal.SIGTERM, "usr1": signal.SIGUSR1}
    if kind in signals:
        os.kill(os.getpid(), signals[kind])
    elif kind == "slow":
        time.sleep(1.0)
    elif kind == "disk full":  # a real refusal by the kernel, for this process only
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
    return {"nan": float("nan"), "inf": float("inf")}.get(kind)


@contextlib.contextmanager
def injected(faults: Iterable[Fault], folder: Path) -> Iterator[Injector]:
    """Inside the block, the loop of this process fails as planned."""
    injector = Injector(faults, folder)
    originals: list[tuple[Any, str, Any]] = []

    def patch(owner: Any, name: str, replacement: Any) -> None:
        originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, replacement)

    train = loop.train

    def watched(session: Session) -> None:
        injector.run = session
        injector.seen.clear()
        with injector:
            train(session)

    def striking(place: str, function: Any) -> Any:
        @functools.wraps(function)  # DDP reads the annotations of a hook
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if injector.run is not None and (place != "fetch" or injector.run.engine.phase == "data"):
                injector.strike(place)
            return function(*args, **kwargs)

        return wrapper

    patch(loop, "train", watched)
    patch(CpuMemory, "refused_allocations", lambda memory: injector.refused)
    all_gather, reduce_scatter = fsdp_collectives()
    patch(all_gather, "allocate", striking("gather buffer", all_gather.allocate))
    patch(reduce_scatter, "allocate", striking("reduce buffer", reduce_scatter.allocate))
    patch(Exchange, "reduce", striking("bucket", Exchange.reduce))
    patch(Fetcher, "__getitem__", striking("fetch", Fetcher.__getitem__))
    patch(Stream, "_peek", striking("read", Stream._peek))
    patch(directory, "write_manifest", striking("manifest", directory.write_manifest))
    try:
        yield injector
    finally:
        injector.run = None  # torch's C++ keeps the patched hook
        for owner, name, original in reversed(originals):
            setattr(owner, name, original)
