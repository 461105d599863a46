"""Two processes on one device, over gloo: an out-of-memory error of one of them in each phase of a step.

NCCL refuses two ranks on one GPU. The cells, the faults and their reference are those of tests/parallel.
"""

import contextlib
import datetime
from collections.abc import Iterator
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
from trainapp.parallel.ranks import DistributedRanks, Ranks

from ..table import Table

STEP = 3
# (phase, operations before the error)
PLACES = (("fetch", 0), ("forward", 60), ("backward", 60), ("bucket", 0), ("metric", 0), ("clip", 0))
EXACT = 1e-5  # relative error of gradients; atomic additions may come in any order
SETTINGS = ("parallel=ddp", "train.ema=0.5", "data.min_length=9")  # all texts of one shape: a schedule has one size


def check(table: Table, device: str, folder: Path) -> None:
    """One row per phase."""
    pool = Pool()
    try:
        cell = Cell(pool, folder)
        expected = f"step {STEP} retried at half the size, gradients of a run configured so to {EXACT:g}"
        options: dict[str, Any] = {"function": on_cuda if device == "cuda" else cells.train}
        settings = (*SETTINGS, f"train.device={device}")
        reference = cell.run(2, *settings, schedule={STEP: 2}, **options)
        for phase, operation in PLACES:
            with table.attempt(f"DDP, rank 1 runs out in {phase}", expected):
                fault = fail_at(1, STEP, phase, operation=operation)
                records = cell.run(2, *settings, faults=[fault], **options)
                if problems := [record.error for record in records if record.error]:
                    raise RuntimeError(problems[0])
                error = max(max(errors(*pair)) for pair in zip(records, reference, strict=True))
                sizes = [record.sizes for record in records]
                met = sizes == [record.sizes for record in reference] and error <= EXACT
                met = met and together(records) == together(reference) and all(r.failures for r in records)
                got = f"micro-batches {sizes[0]} and {sizes[1]}, relative error {error:.1e}"
                table.expect(f"DDP, rank 1 runs out in {phase}", expected, got, met)
    finally:
        pool.close()


def on_cuda(rank: int, config: Config, *arguments: Any) -> cells.Record:
    """`cells.train` with both ranks on the first GPU. The record's tensors are on the host, to be sent."""
    original, worker.process_group = worker.process_group, over_gloo
    try:
        record = cells.train(rank, config, *arguments)
    finally:
        worker.process_group = original
    record.gradients = [gradient.cpu() for gradient in record.gradients]
    record.weights = None if record.weights is None else record.weights.cpu()
    record.average = None if record.average is None else record.average.cpu()
    return record


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
