"""Two processes on one device, over gloo: an out-of-memory error of one of them in each phase of a step.

NCCL refuses two ranks on one GPU. The cells, the faults and their reference are those of tests/parallel.
"""

import contextlib
import datetime
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults import Fault
from parallel import rank as one_rank
from parallel.cell import Cell
from parallel.comparing import errors, together
from parallel.pool import Pool

from trainapp.config.schema import Config
from trainapp.launch import worker
from trainapp.parallel.ddp import Exchange
from trainapp.parallel.ranks import DistributedRanks, Ranks

Run = Callable[..., list[one_rank.Record]]
STEP = 3
# Operations before the error, by phase.
PLACES = {"data": 0, "forward": 60, "backward": 60, "bucket": 0, "metric": 0, "clip": 0}
EXACT = 1e-5  # relative error of gradients; atomic additions may come in any order
SETTINGS = ("parallel=ddp", "train.ema=0.5", "data.min_length=9")  # all texts of one shape: a schedule has one size


@pytest.fixture(scope="module")
def run(request, tmp_path_factory) -> Iterator[Run]:
    device = request.config.getoption("--device")
    pool = Pool()
    function = on_cuda if device == "cuda" else one_rank.train
    cell = Cell(pool, tmp_path_factory.mktemp("cells"))
    yield functools.partial(cell.run, 2, *SETTINGS, f"train.device={device}", function=function)
    pool.close()


@pytest.fixture(scope="module")
def reference(run) -> list[one_rank.Record]:
    """A run that takes half the size in this step."""
    return run(schedule={STEP: 2})


@pytest.mark.parametrize("phase", PLACES)
def test_rank_1_runs_out_in(run, reference, got, phase):
    """the step is retried at half the size, with the gradients of a run configured so, to 1e-5"""
    records = run(faults=[Fault(phase, STEP, PLACES[phase], rank=1)])
    assert not any(record.error for record in records), records
    error = worst_error(records, reference)
    got(f"micro-batches {records[0].sizes} and {records[1].sizes}, relative error {error:.1e}")
    assert [record.sizes for record in records] == [record.sizes for record in reference]
    assert together(records) == together(reference)
    assert error <= EXACT


def test_rank_1_runs_out_in_its_evaluation(run, got):
    """metrics and training of a run without the error: there a rank recovers alone"""
    settings = ("every.eval=2", "train.ema=null")  # an average is swapped in by views, which take no memory
    whole = run(*settings)
    records = run(*settings, faults=[Fault("evaluate", 2, 30, rank=1)])
    assert not any(record.error for record in (*whole, *records)), records
    error = worst_error(records, whole)
    losses = [[means["loss"] for means in one[0].evaluated] for one in (records, whole)]
    got(f"losses {losses[0]} and {losses[1]}, relative error of training {error:.1e}")
    assert [failure.phase for failure in records[1].failures] == ["evaluate"]
    assert losses[0] == pytest.approx(losses[1], rel=EXACT)
    assert error <= EXACT


def worst_error(records: list[one_rank.Record], reference: list[one_rank.Record]) -> float:
    """Of all steps' gradients and the weights, on all ranks."""
    return max(max(errors(*pair)) for pair in zip(records, reference, strict=True))


def on_cuda(rank: int, config: Config, *arguments: Any) -> one_rank.Record:
    """`one_rank.train` with both ranks on the first GPU. The record's tensors are on the host, to be sent."""
    originals = worker.process_group, Exchange.reduce
    worker.process_group, Exchange.reduce = over_gloo, reduce_and_wait
    try:
        record = one_rank.train(rank, config, *arguments)
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
