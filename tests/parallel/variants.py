"""Other runs of one rank than `rank.train`: by another clock, with other texts, watched more closely; and the wrong
variants of negative controls.

A test gives one of them as `function=` of `Cell.run`. Each calls `rank.train` with what it was called with.
"""

import contextlib
import functools
import gc
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from trainapp.checkpoint.checkpointer import Checkpointer
from trainapp.config.schema import Config
from trainapp.data.batch import map_tensors
from trainapp.data.progress import Progress
from trainapp.data.train_batches import TrainBatches
from trainapp.launch import worker
from trainapp.parallel.ddp import DDP
from trainapp.parallel.fsdp import FSDP
from trainapp.parallel.ranks import Flags
from trainapp.parallel.strategy import Strategy
from trainapp.run import runner
from trainapp.run.prepare import SessionStart, prepare
from trainapp.signals import Interrupted, StopRequest
from trainapp.training import loop, stopping
from trainapp.training.engine import Engine
from trainapp.training.session import Session

from .rank import Record, train

# --- another time

STEP = 0.3  # seconds that a step takes by the clock below
AHEAD = 0.5  # seconds by which rank 1's clock is ahead


@contextlib.contextmanager
def steps_saved() -> Iterator[list[int]]:
    """Yield the steps of which checkpoints are saved inside the block."""
    steps: list[int] = []
    save = Checkpointer.save

    def noting_save(checkpointer: Checkpointer, step: int, *about: Any) -> None:
        steps.append(step)
        save(checkpointer, step, *about)

    with mock.patch.object(Checkpointer, "save", noting_save):
        yield steps


def train_by_clock(rank: int, config: Config, *arguments: Any) -> tuple[Record, list[int], list[bool]]:
    """Run by a clock that only steps move. Return the record, the steps saved, and by step, whether this rank's clock
    alone asked for a save.
    """
    now = 0.0
    asked: list[bool] = []
    flags = stopping.flags

    def noting_flags(session: Session) -> Flags:
        nonlocal now
        now += STEP
        flags_here = flags(session)
        asked.append(flags_here.save_is_due)
        return flags_here

    with (
        mock.patch.object(stopping, "flags", noting_flags),
        steps_saved() as saved,
        mock.patch("trainapp.training.stopping.time", mock.Mock(monotonic=lambda: now + AHEAD * rank)),
        mock.patch("trainapp.checkpoint.checkpointer.time", mock.Mock(monotonic=lambda: now)),
    ):
        return train(rank, config, *arguments), saved, asked


def train_out_of_time(rank: int, config: Config, *arguments: Any) -> tuple[int, int]:
    """Run until the time is up, on rank 1 alone. Return this rank's status, and the step of its last checkpoint."""
    with (
        steps_saved() as saved,
        mock.patch.object(runner, "deadline_of", return_value=-math.inf if rank else math.inf),
        worker.process_group(config) as ranks,
    ):
        try:
            runner.run(config, ranks)
        except Interrupted as left:
            return int(left.code or 0), saved[-1]
    return 0, saved[-1]


# --- other data, another torch


def _first_8(batch: Any) -> Any:
    return map_tensors(lambda t: t[:, :8].contiguous(), batch)


def _shorten(micro: Any) -> Any:
    """Cut the texts of a micro-batch, and those of its pieces."""
    return micro._replace(data=_first_8(micro.data), slice_samples=lambda *ends: _first_8(micro.slice_samples(*ends)))


def train_short_but(rank: int, config: Config, *arguments: Any, long_rank: int, steps: Sequence[int]) -> Record:
    """Run with all texts cut to 8 tokens, except those of one rank in these steps."""
    micro_batches = TrainBatches.micro_batches

    def shortened(self: TrainBatches, progress: Progress, *cut: Any) -> Any:
        for micro in micro_batches(self, progress, *cut):
            is_long = rank == long_rank and progress.step + 1 in steps
            yield micro if is_long else _shorten(micro)

    with mock.patch.object(TrainBatches, "micro_batches", shortened):
        return train(rank, config, *arguments)


def train_without_recovery(rank: int, config: Config, *arguments: Any) -> Record:
    """Run as before torch 2.13: FSDP2's half-done backward cannot be reset."""
    with mock.patch.object(FSDP, "recovers_in_place", property(lambda self: False, lambda *_: None)):
        return train(rank, config, *arguments)


# --- watched


def train_counting_wrappers(rank: int, config: Config, *arguments: Any) -> tuple[int, int]:
    """Return how often the model was wrapped for DDP, and how many of the wrappers outlived the run."""
    wrap = DDP._wrap
    wrappers: list[weakref.ref[Any]] = []

    def noting(self: DDP, update: int) -> Any:
        wrapper = wrap(self, update)
        wrappers.append(weakref.ref(wrapper.module))
        return wrapper

    with mock.patch.object(DDP, "_wrap", noting):
        train(rank, config, *arguments)
    gc.collect()
    return len(wrappers), sum(wrapper() is not None for wrapper in wrappers)


def train_counting_threads(rank: int, config: Config, *arguments: Any) -> int:
    """Return the number of gloo threads after the ranks have disconnected."""
    train(rank, config, *arguments)
    names = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has just ended
            names.append((thread / "comm").read_text())
    return sum("gloo" in name for name in names)


@dataclass
class Used:
    """(collective, group) of every tensor that was exchanged on the groups for the device."""

    warming_up: set[tuple[str, str]]
    training: set[tuple[str, str]]


COLLECTIVES = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")


def train_after_warming_up(rank: int, config: Config, *arguments: Any) -> Used:
    """Run with a strategy that warms up first, as on CUDA. Return what was used before training, and in it."""
    with worker.process_group(config) as ranks:
        session = prepare(SessionStart(config), StopRequest(), ranks)
        for_the_host = (ranks._vote_group, ranks._side_group, ranks.saving_group, ranks._flag_group)
        names_for_the_host = {group.group_name for group in for_the_host}
        with collectives_used() as warming_up:
            session.strategy.warm_up()
        with collectives_used() as training:
            loop.train(session)
        session.tracker.close()
    return Used(
        {use for use in warming_up if use[1] not in names_for_the_host},
        {use for use in training if use[1] not in names_for_the_host},
    )


@contextlib.contextmanager
def collectives_used() -> Iterator[set[tuple[str, str]]]:
    """Yield (collective, group) of each call inside the block."""
    used: set[tuple[str, str]] = set()

    def noting(name: str, function: Any) -> Any:
        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group") or dist.group.WORLD
            used.add((name, group.group_name))
            return function(*args, **kwargs)

        return noted

    with mock.patch.multiple(dist, **{name: noting(name, getattr(dist, name)) for name in COLLECTIVES}):
        yield used


# --- wrong variants


def train_averaging(rank: int, config: Config, *arguments: Any) -> Record:
    """Run with the mean over ranks, DDP's and FSDP's default."""
    clip = Engine.clip

    def averaged(engine: Engine, totals: Any) -> torch.Tensor:
        torch._foreach_div_([p.grad for p in engine.parameters], engine.ranks.world_size)
        return clip(engine, totals)

    with mock.patch.object(Engine, "clip", averaged):
        return train(rank, config, *arguments)


def train_without_reset(rank: int, config: Config, *arguments: Any) -> Record:
    """Run without resetting FSDP2's half-done backward."""
    with mock.patch.object(FSDP, "abort_step", lambda self: self.model.zero_grad(set_to_none=True)):
        return train(rank, config, *arguments)


def train_with_torchs_muon(rank: int, config: Config, *arguments: Any) -> Record:
    """Run with torch's Muon as it is."""
    with mock.patch("trainapp.optim.muon.sharded_muon_updates", contextlib.nullcontext):
        return train(rank, config, *arguments)


def train_outside_of_the_wrapper(rank: int, config: Config, *arguments: Any) -> Record:
    """Run with a task that calls the model itself, past DDP."""
    with mock.patch.object(DDP, "compute", Strategy.compute):
        return train(rank, config, *arguments)
