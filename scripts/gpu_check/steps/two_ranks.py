"""Two processes on one device, over gloo: an out-of-memory error of one of them in each phase of a step.

NCCL refuses two ranks on one GPU. The cells, the faults and their reference are those of tests/parallel.
"""

import contextlib
import datetime
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel import cells
from parallel.conftest import Cell
from parallel.faults import fail_at
from parallel.pool import Pool
from parallel.test_equality import errors, together

from trainapp.config.schema import Config
from trainapp.launch import worker
from trainapp.parallel.ddp import Exchange
from trainapp.parallel.ranks import DistributedRanks, Ranks

from ..table import Table

Run = Callable[..., list[cells.Record]]
STEP = 3
# (phase, operations before the error)
PLACES = (("fetch", 0), ("forward", 60), ("backward", 60), ("bucket", 0), ("metric", 0), ("clip", 0))
EXACT = 1e-5  # relative error of gradients; atomic additions may come in any order
SETTINGS = ("parallel=ddp", "train.ema=0.5", "data.min_length=9")  # all texts of one shape: a schedule has one size


def check(table: Table, device: str, folder: Path) -> None:
    """One row per phase of a step, and one for the evaluation."""
    pool = Pool()
    try:
        function = on_cuda if device == "cuda" else cells.train
        run = functools.partial(Cell(pool, folder).run, 2, *SETTINGS, f"train.device={device}", function=function)
        reference = run(schedule={STEP: 2})
        for phase, operation in PLACES:
            in_step(table, run, reference, phase, operation)
        in_evaluation(table, run)
    finally:
        pool.close()


def in_step(table: Table, run: Run, reference: list[cells.Record], phase: str, operation: int) -> None:
    """An error before this operation of a phase."""
    name = f"DDP, rank 1 runs out in {phase}"
    expected = f"step {STEP} retried at half the size, the gradients of a run configured so to {EXACT:g}"
    with table.attempt(name, expected):
        records = without_problems(run(faults=[fail_at(1, STEP, phase, operation=operation)]))
        error = worst_error(records, reference)
        sizes = [record.sizes for record in records]
        met = sizes == [record.sizes for record in reference] and together(records) == together(reference)
        got = f"micro-batches {sizes[0]} and {sizes[1]}, relative error {error:.1e}"
        table.expect(name, expected, got, met and error <= EXACT)


def in_evaluation(table: Table, run: Run) -> None:
    """There a rank recovers alone."""
    name, expected = "DDP, rank 1 runs out in its evaluation", "metrics and training of a run without the error"
    with table.attempt(name, expected):
        settings = ("every.eval=2", "train.ema=null")  # an average is swapped in by views, which take no memory
        reference = without_problems(run(*settings))
        records = without_problems(run(*settings, faults=[fail_at(1, 2, "evaluate", operation=30)]))
        phases = [failure["phase"] for failure in records[1].failures]
        error = worst_error(records, reference)
        losses = [[means["loss"] for means in one[0].evaluated] for one in (records, reference)]
        same = all(math.isclose(a, b, rel_tol=EXACT) for a, b in zip(*losses, strict=True))
        got = f"losses {rounded(losses[0])} and {rounded(losses[1])}, relative error of training {error:.1e}"
        table.expect(name, expected, got, same and error <= EXACT and phases == ["evaluate"])


def without_problems(records: list[cells.Record]) -> list[cells.Record]:
    """The records. Raises RuntimeError for a rank whose run ended with an error."""
    for record in records:
        if record.error:
            raise RuntimeError(record.error)
    return records


def worst_error(records: list[cells.Record], reference: list[cells.Record]) -> float:
    """Of all steps' gradients and the weights, on all ranks."""
    return max(max(errors(*pair)) for pair in zip(records, reference, strict=True))


def rounded(losses: list[float]) -> str:
    """To six digits."""
    return ", ".join(f"{loss:.6g}" for loss in losses)


def on_cuda(rank: int, config: Config, *arguments: Any) -> cells.Record:
    """`cells.train` with both ranks on the first GPU. The record's tensors are on the host, to be sent."""
    originals = worker.process_group, Exchange.reduce
    worker.process_group, Exchange.reduce = over_gloo, reduce_and_wait
    try:
        record = cells.train(rank, config, *arguments)
    finally:
        worker.process_group, Exchange.reduce = originals
    record.gradients = [gradient.cpu() for gradient in record.gradients]
    record.weights = None if record.weights is None else record.weights.cpu()
    record.average = None if record.average is None else record.average.cpu()
    return record


def reduce_and_wait(self: Exchange, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """`Exchange.reduce`, waiting for the sum.

    gloo copies it from the host on a stream of its own, which the current one waits for only in `Work.wait`; NCCL's
    futures take care of that themselves (torch 2.13, ProcessGroupGloo.cpp, `AsyncAllreduceCUDAWork`).
    """
    if self.due and not (self.ranks.votes_enabled and self.ranks.vote(False)):
        dist.all_reduce(bucket.buffer())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


@contextlib.contextmanager
def over_gloo(config: Config) -> Iterator[Ranks]:
    """As `worker.process_group`, but over gloo and on the first GPU."""
    timeout = config.parallel.timeout
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
    ranks = DistributedRanks(torch.device("cuda", 0), timeout, config.parallel.vote_on_oom)
    yield ranks
    ranks.release_groups()
    dist.destroy_process_group()
