"""What one rank of a cell does in a worker of `pool`: a run, fully recorded. Other runs: `variants`."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from faults import Fault
from harness import Recorded

from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.launch import worker
from trainapp.oom.failure import Failure
from trainapp.parallel.ranks import SingleRank
from trainapp.torch_private import is_shard, outside_dispatch_modes
from trainapp.training.session import Session


@dataclass
class Record:
    """One rank's view of a run: by step as committed, unless it says otherwise. Vectors are full, not shards."""

    losses: list[float] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    votes_enabled: list[bool] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)  # the loss scale, with fp16
    samples: dict[int, list[int]] = field(default_factory=dict)  # this rank's, by step
    evaluated: list[dict[str, float]] = field(default_factory=list)  # the metrics of each evaluation
    failures: list[Failure] = field(default_factory=list)
    log: list[str] = field(default_factory=list)  # its messages

    # At the end of the run
    weights: torch.Tensor | None = None
    average: torch.Tensor | None = None  # of the weights, with `train.ema`
    progress: dict[str, Any] = field(default_factory=dict)
    votes: int = 0
    peak: int = 0  # bytes, of the rank that needs most
    shapes: dict[int, int] = field(default_factory=dict)  # the micro-batch size by shape
    schedule: dict[int, Any] = field(default_factory=dict)  # the sizes that were used, as in result.json
    error: str | None = None  # the message of a UserError


def vector(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return all tensors as one, whole and in double precision. Collective: call on every rank."""
    parts = []
    for tensor in tensors:
        whole = tensor.full_tensor() if is_shard(tensor) else tensor
        parts.append(whole.detach().double().flatten().clone())
    return torch.cat(parts)


class _Noting(Recorded):
    """Fills a record."""

    def __init__(self, record: Record, config: Config, *faults: Fault, **options: Any):
        self.noted = record
        super().__init__(config, *faults, **options)

    def watch(self, session: Session) -> None:
        record = self.noted
        record.failures = self.failures
        engine = session.engine
        batches = session.batches
        commit = engine.commit
        advance = batches.advance
        log_evaluation = session.tracker.log_evaluation

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
            log_evaluation(step, samples, means)

        engine.commit = noting_commit
        batches.advance = noting_advance
        session.tracker.log_evaluation = noting_evaluation

    def finish(self) -> None:
        """Note how the run ended. Its session is gone before the ranks disconnect, as outside of tests."""
        record = self.noted
        session = self.run
        state = session.state
        record.weights = vector(list(state.model.parameters()))
        if state.average.averages:
            record.average = vector(state.average.averages)
        record.progress = dataclasses.asdict(state.progress)
        record.votes = getattr(session.ranks, "votes", 0)
        record.peak = max(session.ranks.all_gather_object(session.memory.peak))
        record.shapes = {bucket: search.size for bucket, search in session.sizes.train.searches.items()}
        record.schedule = session.sizes.micro_schedule()


def train(rank: int, config: Config, faults: Sequence[Fault] = (), folder: str = "", single: bool = False) -> Record:
    """Run `config` as this rank of the cell. Return its record.

    Args:
        rank: of this process.
        config: of the run.
        faults: those that strike, on any rank.
        folder: where faults that have fired are marked.
        single: whether to run as a plain single process.
    """
    record = Record()
    with logged_to(record):
        try:
            with contextlib.nullcontext(SingleRank()) if single else worker.process_group(config) as ranks:
                _Noting(record, config, *faults, ranks=ranks, folder=Path(folder)).finish()
        except UserError as error:
            record.error = str(error)
            leave_group()
    return record


@contextlib.contextmanager
def logged_to(record: Record) -> Iterator[None]:
    """Add the messages of the block to a record."""
    handler = _Lines(record.log)
    logging.getLogger("trainapp").addHandler(handler)
    logging.getLogger("trainapp").setLevel(logging.INFO)
    try:
        yield
    finally:
        logging.getLogger("trainapp").removeHandler(handler)


def leave_group() -> None:
    """Leave a process group after a UserError, which every rank has raised: `process_group` keeps it after an error."""
    if dist.is_initialized():
        dist.destroy_process_group()


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]):
        super().__init__()
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
