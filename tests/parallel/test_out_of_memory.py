"""One rank runs out of memory: all ranks roll the step back and repeat it with a smaller micro-batch, in place.

The reference is a run on the same number of ranks whose `batch.micro_schedule` changes its size at that step. Every
cell asserts that its error struck, that no step was lost and no sample repeated, that all ranks resumed at the same
size, and that every gradient matches the reference to a relative error below 1e-6.
"""

import functools
import itertools
import json

import pytest
import runs
import torch
from faults import Fault

from trainapp.sizes.failures import ErrorKind

from .cell import TINY, Cell, needs_reset
from .comparing import error, errors, together
from .pool import CellFailed
from .rank import Record, train
from .variants import train_counting_wrappers, train_short_but, train_without_recovery, train_without_reset

EXACT = 1e-6
WHOLE = ("train.ema=0.5", "data.min_length=9")  # all texts of one shape: the reference schedule has one size


def assert_recovered(records: list[Record], wanted: list[Record], culprits: list[Fault]) -> None:
    """Assert what the module's docstring says of every cell."""
    assert [record.error for record in records] == [None] * len(records)
    for record, other in zip(records, wanted, strict=True):
        assert record.sizes == other.sizes
        assert record.losses == pytest.approx(other.losses, rel=EXACT)
        assert len(record.gradients) == len(other.gradients) == 4
        assert max(errors(record, other)) < EXACT
        assert error(record.average, other.average) < EXACT
        assert [failure.step for failure in record.failures] == sorted({fault.step for fault in culprits})
        for failure in record.failures:
            ranks = sorted({fault.rank for fault in culprits if fault.step == failure.step})
            assert failure.failed_ranks == ranks
    assert together(records) == together(wanted)


def recovers(cell: Cell, world: int, spread: str, faults: list[Fault], *overrides: str) -> list[Record]:
    """Run with the faults, and as configured to match: half the size from each fault on. Return the records of the
    first.
    """
    size = 4
    schedule = {}
    for step in sorted({fault.step for fault in faults}):
        size //= 2
        schedule[step] = size
    wanted = cell.reference(world, f"parallel={spread}", *WHOLE, *overrides, schedule=schedule)
    records = cell.run(world, f"parallel={spread}", *WHOLE, *overrides, faults=faults)
    assert_recovered(records, wanted, faults)
    return records


# Operations of a phase are counted over the attempt's micro-batches: 60 is in the first forward's second block, 150 in
# the second micro-batch.
PLACES = [
    ("data", 0),
    ("data", 1),
    ("forward", 0),
    ("forward", 60),
    ("forward", 150),
    ("backward", 2),
    ("backward", 60),
    ("backward", 200),
    ("metric", 0),
    ("metric", 6),
    ("clip", 0),
    ("clip", 3),
]
BUFFERS = {
    "ddp": [("bucket", 0)],
    "fsdp": [("gather buffer", 0), ("gather buffer", 4), ("reduce buffer", 0), ("reduce buffer", 3)],
    "hsdp": [("gather buffer", 2), ("reduce buffer", 1)],
}
# The phase that the report of an error names, where it is not the place of the fault.
REPORTED_AS = {
    "forward": ("forward", "loss"),
    "gather buffer": ("forward", "backward"),
    "reduce buffer": ("backward",),
    "bucket": ("backward",),
}
EACH_PHASE = [("data", 0), ("forward", 60), ("backward", 60), ("metric", 6), ("clip", 0)]
NIGHTLY = pytest.mark.nightly
DDP_OR_NIGHTLY = ["ddp", pytest.param("fsdp", marks=NIGHTLY)]
FSDP_OR_NIGHTLY = [pytest.param("ddp", marks=NIGHTLY), "fsdp"]


def grid():
    """With each push: each strategy in each phase and each of its buffers, on one rank at one step; HSDP, whose four
    processes take long, once. Nightly: every place, on both ranks and at both steps.
    """
    for spread in ("ddp", "fsdp", "hsdp"):
        often = [("gather buffer", 2)] if spread == "hsdp" else [*EACH_PHASE, *BUFFERS[spread][:3:2]]
        for place, rank, step in itertools.product(PLACES + BUFFERS[spread], (0, 1), (1, 3)):
            cell = (spread, rank, step, *place)
            marks = () if place in often and (rank, step) == (1, 3) else NIGHTLY
            yield pytest.param(*cell, marks=marks, id="-".join(map(str, cell)))


@pytest.mark.slow
@pytest.mark.parametrize(("spread", "rank", "step", "phase", "operation"), grid())
def test_recovered_in_place(cell, spread, rank, step, phase, operation):
    world = 4 if spread == "hsdp" else 2  # two replicas of two shards each: on two ranks there is nothing to gather
    share = f"batch.global_size={8 * world}"
    records = recovers(cell, world, spread, [Fault(phase, step, operation, rank=rank)], share)
    assert [record.failures[0].by_peer for record in records] == [other != rank for other in range(world)]
    assert records[rank].failures[0].phase in REPORTED_AS.get(phase, (phase,))


@pytest.mark.slow
@pytest.mark.parametrize("spread", DDP_OR_NIGHTLY)
def test_an_error_that_something_caught(cell, spread):
    """The allocator's count has risen on one rank only; all ranks retry the step."""
    fault = Fault("forward", 2, 60, kind="swallowed", rank=1)
    records = recovers(cell, 2, spread, [fault], "batch.global_size=16")
    assert [record.failures[0].by_peer for record in records] == [True, False]
    assert "1 allocation failed in this micro-batch and the error was caught" in records[1].failures[0].message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "reason"), [("nccl", "the NCCL communicator"), ("driver", "the allocator of expandable segments")]
)
def test_an_error_that_breaks_the_process(cell, tmp_path, kind, reason):
    """No vote is held, in which the others might never take part: the rank ends at once, with the size in a file."""
    fault = Fault("backward", 2, 60, kind=kind, rank=1)
    with pytest.raises(CellFailed, match=r"rank 1: ended\nexit code 82"):
        cell.run(2, "parallel=ddp", *WHOLE, faults=[fault], run_dir=tmp_path / "run")
    left = json.loads((tmp_path / "run" / "restart.json").read_text())
    assert left["oom_restarts"] == 1
    assert [entry[0] for entry in left["micro"]["buckets"].values()] == [2]
    (report,) = (tmp_path / "run" / "oom").glob("*.json")
    assert json.loads(report.read_text())["broken"] == reason


@pytest.mark.slow
@pytest.mark.parametrize("spread", FSDP_OR_NIGHTLY)
def test_several_culprits_at_once(cell, spread):
    # The second fires only if its rank gets that far before it learns of the first; both must recover either way.
    first, second = (Fault("forward", 2, 60, rank=rank) for rank in (0, 1))
    wanted = cell.reference(2, f"parallel={spread}", *WHOLE, schedule={2: 2})
    records = cell.run(2, f"parallel={spread}", *WHOLE, faults=[first, second], must_fire="any")
    for record, other in zip(records, wanted, strict=True):
        steps = [failure.step for failure in record.failures]
        assert steps in ([2], [2, 2])  # a fault that did not fire in the first attempt fires in the second
        if steps == [2]:
            assert record.sizes == other.sizes
        assert max(errors(record, other)) < (EXACT if steps == [2] else 2e-5)
    assert len({tuple(record.sizes) for record in records}) == 1
    assert together(records) == together(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("spread", DDP_OR_NIGHTLY)
def test_again_and_again(cell, spread):
    # Each rank fails in turn, in the first step and in a later one: 4 -> 2 -> 1.
    recovers(cell, 2, spread, [Fault("backward", 1, 2, rank=1), Fault("forward", 3, 60)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spread", "overrides"),
    [
        ("ddp", ("parallel.ddp.bucket_mb=0.001",)),
        pytest.param("ddp", ("precision=bf16",), marks=NIGHTLY),
        ("ddp", ("activation_checkpointing=full",)),
        ("fsdp", ("parallel.fsdp.sync_every_micro_batch=false",)),
        ("fsdp", ("model.dropout=0.1",)),  # drawn again alike
        *(
            pytest.param("fsdp", overrides, marks=NIGHTLY)
            for overrides in (
                ("parallel.fsdp.reshard_after_forward=false",),
                ("parallel.fsdp.prefetch=2",),
                ("parallel.fsdp.cpu_offload=true",),
                ("precision=bf16",),
                ("activation_checkpointing=full",),
                ("activation_checkpointing=selective",),
                ("optimizer=adamw", "optimizer.lr=0.001"),
            )
        ),
    ],
)
def test_recovered_with_other_settings(cell, spread, overrides):
    recovers(cell, 2, spread, [Fault("backward", 2, 60, rank=1)], *overrides)


@pytest.mark.slow
@pytest.mark.parametrize("spread", FSDP_OR_NIGHTLY)
def test_fp16(cell, spread):
    fault = Fault("backward", 2, rank=1)
    records = recovers(cell, 2, spread, [fault], "precision=fp16", "precision.initial_scale=256", "train.grad_clip=0.1")
    assert [record.scales for record in records] == [[256.0] * 4] * 2


EVALUATION = ("every.eval=1", "batch.eval_micro_size=8", "data.val_size=37")
SECOND = {"ddp": 96, "fsdp": 300}  # operations of an evaluation until its second forward


@pytest.mark.slow
@pytest.mark.parametrize("spread", FSDP_OR_NIGHTLY)
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=NIGHTLY)])
@pytest.mark.parametrize(
    ("place", "operation"),
    [
        *(pytest.param("first", n, marks=() if n else NIGHTLY) for n in (0, 60)),
        *(pytest.param("second", n, marks=() if n in (4, 12, 20) else NIGHTLY) for n in range(24)),
    ],
)
def test_evaluation(cell, spread, rank, place, operation):
    """Every sample counts once, and training is unaffected.

    Between two forwards, in every operation: either both ranks have the micro-batch or none has, and none waits for the
    other.
    """
    operation += SECOND[spread] if place == "second" else 0
    wanted = cell.reference(2, f"parallel={spread}", *WHOLE, *EVALUATION)
    records = cell.run(
        2, f"parallel={spread}", *WHOLE, *EVALUATION, faults=[Fault("evaluate", 2, operation, rank=rank)]
    )
    for record, other in zip(records, wanted, strict=True):
        assert record.error is None
        # DDP's forward without gradients is local to each rank: the others need not know.
        knows = spread == "fsdp" or record is records[rank]
        wanted_failures = [(2, "evaluate", 8, 4)] if knows else []
        assert [(f.step, f.phase, f.recovery.old_size, f.recovery.new_size) for f in record.failures] == wanted_failures
        assert record.sizes == other.sizes == [4] * 4
        assert max(errors(record, other)) == 0
        for metrics, expected in zip(record.evaluated, other.evaluated, strict=True):
            assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            assert metrics["accuracy"] == pytest.approx(expected["accuracy"], abs=1e-9)


EITHER = ("ddp", pytest.param("fsdp", marks=needs_reset))


@pytest.mark.slow
@pytest.mark.parametrize("spread", EITHER)
def test_votes_end_when_the_size_is_validated(cell, spread):
    # oom.clean_steps=3: three steps with votes, then none, on all ranks; after a failure they are enabled again.
    records = cell.run(2, f"parallel={spread}", *WHOLE, "train.max_steps=6")
    assert [record.votes_enabled for record in records] == [[True] * 3 + [False] * 3] * 2
    assert len({record.votes for record in records}) == 1
    failing = cell.run(2, f"parallel={spread}", *WHOLE, "train.max_steps=7", faults=[Fault("forward", 2, 60)])
    assert [record.votes_enabled for record in failing] == [[True] * 4 + [False] * 3] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "function"),
    [
        (("parallel=ddp", "parallel.vote_on_oom=never"), train),
        (("parallel=fsdp", "every.eval=2"), train_without_recovery),  # as before torch 2.13
    ],
)
def test_where_no_step_is_recovered_in_place_there_is_no_vote(cell, overrides, function):
    records = cell.run(2, *overrides, function=function)
    assert [record.votes for record in records] == [0, 0]
    assert [record.votes_enabled for record in records] == [[False] * 4] * 2


@pytest.mark.slow
def test_the_schedule_of_a_search_over_ranks_replays_it(cell):
    """Ranks see different shapes; sizes fall on one rank's error and grow again. All of it is in the schedule."""
    faults = [Fault("backward", 2, 20, rank=1), Fault("forward", 7, 20)]
    searching = ("parallel=ddp", "oom.grow=true", "oom.clean_steps=2", "train.max_steps=16", "batch.micro_size=auto")
    searching = (*searching, "parallel.vote_on_oom=always", "model.dropout=0.1")
    records = cell.run(2, *searching, faults=faults)
    schedule = records[0].schedule
    assert len(schedule) > 3
    assert any(isinstance(plan, dict) for plan in schedule.values())
    for record, again in zip(records, cell.run(2, *searching, schedule=schedule), strict=True):
        assert [failure.step for failure in record.failures] == [2, 7]
        assert (again.failures, again.schedule) == ([], schedule)
        assert again.losses == record.losses
        assert torch.equal(again.weights, record.weights)


SHAPES = ("model.context_length=64", "data.min_length=4", "train.max_steps=8", "oom.grow=true", "oom.clean_steps=1")


@pytest.mark.slow
@pytest.mark.parametrize("spread", DDP_OR_NIGHTLY)
def test_one_long_text_does_not_shrink_the_others(cell, spread):
    # Text lengths differ by rank; what is too long for one rank is cut, into equally many pieces on all ranks.
    free = cell.run(2, f"parallel={spread}", *SHAPES, "batch.micro_size=8")
    wide = cell.run(2, f"parallel={spread}", *SHAPES, "batch.micro_size=2")
    limit = (free[0].peak + wide[0].peak) // 2
    records = cell.run(2, f"parallel={spread}", *SHAPES, "batch.micro_size=8", f"memory.limit={limit}")
    assert [record.error for record in records] == [None, None]
    assert records[0].failures
    shapes = records[0].shapes
    assert shapes == records[1].shapes
    assert shapes[max(shapes)] < 8 == max(shapes.values())
    assert records[0].votes_enabled == records[1].votes_enabled
    assert together(records) == together(free)
    for record, other in zip(records, free, strict=True):
        assert max(errors(record, other)) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("spread", DDP_OR_NIGHTLY)
def test_a_new_shape_on_one_rank_is_news_to_all(cell, spread):
    # Only rank 1 gets long texts: first while voting is off, later when all ranks know that such a shape exists. From
    # then on votes are held while that shape is in use, and an error in it is recovered in place.
    texts = ("model.context_length=64", "data.min_length=33", "train.max_steps=10", "oom.clean_steps=2")
    fault = Fault("backward", 9, 2, rank=1)
    function = functools.partial(train_short_but, long_rank=1, steps=(5, 6, 9, 10))
    records = cell.run(2, f"parallel={spread}", *texts, faults=[fault], function=function)
    assert [record.error for record in records] == [None, None]
    assert [[failure.step for failure in record.failures] for record in records] == [[9], [9]]
    assert records[0].shapes == records[1].shapes == {16: 4, 128: 2}
    wanted = [True] * 2 + [False] * 4 + [True, False, True, True]
    assert [record.votes_enabled for record in records] == [wanted, wanted]


@pytest.mark.slow
@pytest.mark.parametrize("spread", EITHER)
def test_nothing_left_to_halve(cell, spread):
    settings = (f"parallel={spread}", "batch.micro_size=1", "oom.techniques=none")
    records = cell.run(2, *settings, faults=[Fault("backward", 2, rank=1)])
    assert all("micro-batch" in record.error for record in records)


@pytest.mark.slow
def test_without_the_cleaning_gradients_are_wrong(cell):
    # The negative control of all the above: FSDP2's half-done backward is not reset.
    wanted = cell.reference(2, "parallel=fsdp", schedule={2: 2})
    worst = 0.0
    for operation in (60, 120, 200):
        fault = Fault("backward", 2, operation, rank=1)
        try:
            records = cell.run(2, "parallel=fsdp", faults=[fault], function=train_without_reset, limit=15)
        except AssertionError:
            return  # an error or a deadlock between ranks is detected, too
        if any(record.error for record in records):
            return
        worst = max(worst, *(max(errors(record, other)) for record, other in zip(records, wanted, strict=True)))
    assert worst > 1e-3


@pytest.mark.slow
def test_nothing_of_the_old_wrapper_stays(cell):
    """DDP's buckets are as large as the gradients; a cycle through its hook, held by C++, would never be freed."""
    faults = [Fault("backward", step, 60, rank=1) for step in (1, 3)]
    counts = cell.run(2, "parallel=ddp", *WHOLE, faults=faults, function=train_counting_wrappers)
    assert counts == [(3, 0), (3, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("share", [33, 34])
def test_too_few_samples_for_the_model(cell, share):
    """BatchNorm of a single sample, left over on both ranks, or cut off on one as the other has a micro-batch more."""
    tiny = (*TINY, *runs.own_model("own_models.NormedPoint"), "data=digits", "user_packages=[own_models]")
    declared = (*TINY, *runs.own_model("own_models.NormedPair"), *tiny[-2:])
    settings = ("parallel=ddp", f"batch.global_size={share}", "batch.micro_size=2")
    records = cell.run(2, *settings, tiny=tiny)
    wanted = cell.run(2, *settings, tiny=declared)
    for record, other in zip(records, wanted, strict=True):
        assert [(failure.step, failure.kind) for failure in record.failures] == [(1, ErrorKind.TOO_FEW_SAMPLES)]
        assert other.failures == []
        assert record.losses == other.losses
        assert torch.equal(record.weights, other.weights)
    assert together(records) == together(wanted)


@pytest.mark.slow
def test_a_larger_size_that_the_model_refuses_on_ranks(cell):
    """All ranks go back to the validated size, and lose one retried step."""
    tiny = (*TINY, *runs.own_model("own_models.Grouped"), "data=digits", "user_packages=[own_models]")
    # 64 samples of a rank do not fit, and the search tries others than multiples of 8.
    settings = ("parallel=ddp", "batch.global_size=128", "batch.micro_size=auto", "oom.grow=true", "train.max_steps=8")
    faults = [Fault("forward", 1, rank=0), Fault("forward", 1, 2, rank=0)]
    records = cell.run(2, *settings, tiny=tiny, faults=faults)
    for record in records:
        *out_of_memory, rejected = record.failures
        assert {failure.kind for failure in out_of_memory} == {ErrorKind.OUT_OF_MEMORY}
        assert rejected.kind is ErrorKind.SIZE_REJECTED
        assert rejected.recovery.old_size % 8
        assert record.sizes[-1] == rejected.recovery.new_size == record.sizes[0]
        assert len(record.losses) == 8
    assert together(records)


@pytest.mark.slow
def test_too_few_samples_where_ranks_do_not_vote(cell, tmp_path):
    """The restart is no error out of memory, but is left as a recovery: otherwise it would count as a crash."""
    settings = ("parallel=ddp", "parallel.vote_on_oom=never", "batch.global_size=33", "batch.micro_size=2")
    tiny = (*TINY, *runs.own_model("own_models.NormedPoint"), "data=digits", "user_packages=[own_models]")
    with pytest.raises(CellFailed, match=r"ended\nexit code 82"):
        cell.run(2, *settings, tiny=tiny, run_dir=tmp_path / "run")
    left = json.loads((tmp_path / "run" / "restart.json").read_text())
    assert (left["oom_restarts"], left["recoveries"]) == (0, 1)
    (report,) = (tmp_path / "run" / "oom").glob("*.json")
    record = json.loads(report.read_text())
    assert (record["too_few"], record["rejects_size"]) == (1, False)
    assert record["action"].endswith("with at least 2 samples in every micro-batch of this shape")
