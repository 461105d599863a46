"""What one rank of a cell does in a worker of `pool`: a run, fully recorded."""

import contextlib
import dataclasses
import functools
import gc
import logging
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from faults import Fault
from harness import Recorded

from trainapp.checkpoint.checkpointer import Checkpointer
from trainapp.config.schema import Config
from trainapp.data.batch import map_tensors
from trainapp.data.progress import Progress
from trainapp.data.train_batches import TrainBatches
from trainapp.errors import UserError
from trainapp.launch import worker
from trainapp.oom.report import OomReport
from trainapp.parallel.ddp import DDP
from trainapp.parallel.fsdp import FSDP
from trainapp.parallel.ranks import Flags, SingleRank
from trainapp.parallel.strategy import Strategy
from trainapp.run import runner
from trainapp.signals import Interrupted, StopRequest
from trainapp.torch_private import is_shard, outside_dispatch_modes
from trainapp.training import loop, stopping
from trainapp.training.engine import Engine
from trainapp.training.session import Session


@dataclass
class Record:
    """One rank's view of a run. `gradients` (by step, as committed) and `weights` are full vectors."""

    losses: list[float] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    weights: torch.Tensor | None = None
    sizes: list[int] = field(default_factory=list)
    samples: dict[int, list[int]] = field(default_factory=dict)
    evaluated: list[dict[str, float]] = field(default_factory=list)
    failures: list[OomReport] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    votes: int = 0
    votes_enabled: list[bool] = field(default_factory=list)
    average: torch.Tensor | None = None
    error: str | None = None
    peak: int = 0
    shapes: dict[int, int] = field(default_factory=dict)  # the current micro-batch by shape
    schedule: dict[int, Any] = field(default_factory=dict)  # the sizes that were used, as in result.json
    progress: dict[str, Any] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)


def vector(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Full, flat, in double precision. Collective: call on every rank."""
    whole = (t.full_tensor() if is_shard(t) else t for t in tensors)
    return torch.cat([t.detach().double().flatten().clone() for t in whole])


class _Noting(Recorded):
    """Fills a record."""

    def __init__(self, record: Record, config: Config, *faults: Fault, **options: Any):
        self.noted = record
        super().__init__(config, *faults, **options)

    def watch(self, session: Session) -> None:
        record, batches, engine = self.noted, session.batches, session.engine
        record.failures = self.failures
        commit, advance, evaluated = engine.commit, batches.advance, session.tracker.log_evaluation

        def noting_commit(totals: Any, norm: torch.Tensor) -> bool:
            with outside_dispatch_modes():  # it is the test that keeps them, not the run
                gradients = vector([p.grad for p in engine.parameters if p.grad is not None])
            applied = commit(totals, norm)
            record.gradients.append(gradients)
            record.losses.append(totals.means()["loss"])
            record.sizes.append(session.sizes.train.size)
            record.votes_enabled.append(session.ranks.votes_enabled)
            if session.state.precision.scaler.is_enabled():
                record.scales.append(session.state.precision.scaler.get_scale())
            return applied

        def noting_advance(progress: Any) -> None:
            """Samples where they are used: real micro-batches of committed steps."""
            share = batches.source.share(progress.epoch, progress.consumed, batches.global_size)
            record.samples[len(record.samples)] = list(share.numbers)
            advance(progress)

        def noting_evaluation(step: int, samples: int, means: dict[str, float]) -> None:
            record.evaluated.append(dict(means))
            evaluated(step, samples, means)

        engine.commit, batches.advance = noting_commit, noting_advance
        session.tracker.log_evaluation = noting_evaluation

    def finish(self) -> None:
        """Note how the run ended. Its session is gone before the ranks disconnect, as outside of tests."""
        record, session, state = self.noted, self.run, self.run.state
        record.weights = vector(list(state.model.parameters()))
        if state.average.averages:
            record.average = vector(state.average.averages)
        record.progress = dataclasses.asdict(state.progress)
        record.votes = getattr(session.ranks, "votes", 0)
        record.peak = max(session.ranks.all_gather_object(session.memory.peak))
        record.shapes = {bucket: search.size for bucket, search in session.sizes.train.searches.items()}
        record.schedule = session.sizes.micro_schedule()


def train(rank: int, config: Config, faults: Sequence[Fault] = (), folder: str = "", single: bool = False) -> Record:
    """A run of `config` on the ranks of the cell (or alone), with these faults."""
    record = Record()
    handler = _Lines(record.log)
    logging.getLogger("trainapp").addHandler(handler)
    logging.getLogger("trainapp").setLevel(logging.INFO)
    try:
        with contextlib.nullcontext(SingleRank()) if single else worker.process_group(config) as ranks:
            _Noting(record, config, *faults, ranks=ranks, folder=Path(folder)).finish()
    except UserError as error:
        record.error = str(error)
        _leave_group()
    finally:
        logging.getLogger("trainapp").removeHandler(handler)
    return record


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]):
        super().__init__()
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


# Seconds that a step takes by the clock below; rank 1's is half a second ahead.
STEP, AHEAD = 0.3, 0.5


def train_by_clock(rank: int, config: Config, *arguments: Any) -> tuple[Record, list[int], list[bool]]:
    """A run with a clock that only steps move: its record, the steps saved, and whether this rank's clock alone asked
    for a save, by step.
    """
    now, saved, asked = 0.0, [], []
    flags, save = stopping.flags, Checkpointer.save

    def noting_flags(session: Session) -> Flags:
        nonlocal now
        now += STEP
        own = flags(session)
        asked.append(own.save_is_due)
        return own

    def noting_save(checkpointer: Checkpointer, step: int, *about: Any) -> None:
        saved.append(step)
        save(checkpointer, step, *about)

    with (
        mock.patch.object(stopping, "flags", noting_flags),
        mock.patch.object(Checkpointer, "save", noting_save),
        mock.patch("trainapp.training.stopping.time", mock.Mock(monotonic=lambda: now + AHEAD * rank)),
        mock.patch("trainapp.checkpoint.checkpointer.time", mock.Mock(monotonic=lambda: now)),
    ):
        return train(rank, config, *arguments), saved, asked


def train_out_of_time(rank: int, config: Config, *arguments: Any) -> tuple[int, int]:
    """A run whose time is up on rank 1 alone: the status of this rank, and the step of its last checkpoint."""
    saved, save = [], Checkpointer.save

    def noting_save(checkpointer: Checkpointer, step: int, *about: Any) -> None:
        saved.append(step)
        save(checkpointer, step, *about)

    with (
        mock.patch.object(Checkpointer, "save", noting_save),
        mock.patch.object(runner, "deadline_of", return_value=-math.inf if rank else math.inf),
        worker.process_group(config) as ranks,
    ):
        try:
            runner.run(config, ranks)
        except Interrupted as left:
            return int(left.code or 0), saved[-1]
    return 0, saved[-1]


def train_averaging(rank: int, config: Config, *arguments: Any) -> Record:
    """A wrong variant: the mean over ranks, DDP's and FSDP's default."""
    clip = Engine.clip

    def averaged(engine: Engine, totals: Any) -> torch.Tensor:
        torch._foreach_div_([p.grad for p in engine.parameters], engine.ranks.world_size)
        return clip(engine, totals)

    with mock.patch.object(Engine, "clip", averaged):
        return train(rank, config, *arguments)


def train_without_reset(rank: int, config: Config, *arguments: Any) -> Record:
    """A wrong variant: FSDP2's half-done backward is not reset."""
    with mock.patch.object(FSDP, "abort_step", lambda self: self.model.zero_grad(set_to_none=True)):
        return train(rank, config, *arguments)


def train_without_recovery(rank: int, config: Config, *arguments: Any) -> Record:
    """As before torch 2.13: FSDP2's half-done backward cannot be reset."""
    with mock.patch.object(FSDP, "recovers_in_place", property(lambda self: False, lambda *_: None)):
        return train(rank, config, *arguments)


def train_with_torchs_muon(rank: int, config: Config, *arguments: Any) -> Record:
    """A wrong variant: torch's Muon as it is."""
    with mock.patch("trainapp.optim.muon.sharded_muon_updates", contextlib.nullcontext):
        return train(rank, config, *arguments)


def train_outside_of_the_wrapper(rank: int, config: Config, *arguments: Any) -> Record:
    """A wrong variant: a task that calls the model itself, past DDP."""
    with mock.patch.object(DDP, "compute", Strategy.compute):
        return train(rank, config, *arguments)


def train_counting_wrappers(rank: int, config: Config, *arguments: Any) -> tuple[int, int]:
    """How often the model was wrapped for DDP, and how many of the wrappers outlived the run."""
    wrap, wrappers = DDP._wrap, []

    def noting(self: DDP) -> None:
        wrap(self)
        wrappers.append(weakref.ref(self.forward))

    with mock.patch.object(DDP, "_wrap", noting):
        train(rank, config, *arguments)
    gc.collect()
    return len(wrappers), sum(wrapper() is not None for wrapper in wrappers)


def train_counting_threads(rank: int, config: Config, *arguments: Any) -> int:
    """The number of gloo threads after the ranks have disconnected."""
    train(rank, config, *arguments)
    names = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has just ended
            names.append((thread / "comm").read_text())
    return sum("gloo" in name for name in names)


def _first_8(batch: Any) -> Any:
    return map_tensors(lambda t: t[:, :8].contiguous(), batch)


def train_short_but(rank: int, config: Config, *arguments: Any, long_rank: int, steps: Sequence[int]) -> Record:
    """All texts are cut to 8 tokens, except those of one rank in these steps."""
    fetch = TrainBatches.micro_batches

    def shortened(self: TrainBatches, progress: Progress, *cut: Any) -> Any:
        for micro in fetch(self, progress, *cut):
            long = rank == long_rank and progress.step + 1 in steps
            short = micro._replace(data=_first_8(micro.data), piece=lambda *ends, of=micro.piece: _first_8(of(*ends)))
            yield micro if long else short

    with mock.patch.object(TrainBatches, "micro_batches", shortened):
        return train(rank, config, *arguments)


@dataclass
class Used:
    """(collective, group) of every tensor that was exchanged on the groups for the device."""

    warming_up: set[tuple[str, str]] = field(default_factory=set)
    training: set[tuple[str, str]] = field(default_factory=set)


COLLECTIVES = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")


def train_after_warming_up(rank: int, config: Config, *arguments: Any) -> Used:
    """A run whose strategy warms up first, as on CUDA."""
    import torch.distributed as dist

    found = Used()
    record: set[tuple[str, str]] = set()

    def noting(name: str, function: Any) -> Any:
        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group") or dist.group.WORLD
            record.add((name, group.group_name))
            return function(*args, **kwargs)

        return noted

    noted_collectives = {name: noting(name, getattr(dist, name)) for name in COLLECTIVES}
    with worker.process_group(config) as ranks:
        session = runner.prepare(config, StopRequest(), ranks)
        for_the_host = {
            group.group_name for group in (ranks._vote_group, ranks._side_group, ranks.saving_group, ranks._flag_group)
        }
        with mock.patch.multiple(dist, **noted_collectives):
            session.strategy.warm_up()
            found.warming_up, record = {use for use in record if use[1] not in for_the_host}, set()
            loop.train(session)
            found.training = {use for use in record if use[1] not in for_the_host}
        session.tracker.close()
    return found
