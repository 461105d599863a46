"""Streams: where a position is, that it is reached again exactly, and which rank reads what."""

import multiprocessing
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import own_streams
import psutil
import pytest
import torch

from trainapp.data import stream_reader
from trainapp.data.eval_batches import EvalBatches
from trainapp.data.progress import Progress
from trainapp.data.stream_reader import Shard, is_stream
from trainapp.data.train_batches import TrainBatches
from trainapp.errors import UserError
from trainapp.parallel.ranks import SingleRank

CPU = torch.device("cpu")
SAMPLES = 50


class Quiet(own_streams.Sharded):
    """Without noise: threads that are ranks share the global generators."""

    def sample(self, number):
        return {"number": number, "inputs": torch.full((1, 8, 8), float(number + self.epoch))}


class QuietWhole(Quiet):
    shard = None


class Together(SingleRank):
    """Ranks that are threads of this process."""

    def __init__(self, rank, world, shared):
        self.rank, self.world_size, self.shared = rank, world, shared

    def all_gather_object(self, value):
        values, barrier = self.shared
        values[self.rank] = value
        barrier.wait()
        found = list(values)
        barrier.wait()
        return found

    def all_reduce_max(self, *values):
        return [max(column) for column in zip(*self.all_gather_object(values), strict=True)]


def on_ranks(world, work):
    """What `work(ranks)` returns on each of so many ranks."""
    shared = [None] * world, threading.Barrier(world, timeout=30)

    def run(rank):
        try:
            return work(Together(rank, world, shared))
        except BaseException:
            shared[1].abort()
            raise

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(run, range(world)))


def batches_of(source, size=16, ranks=None, **arguments):
    return TrainBatches(source, global_size=size, seed=0, device=CPU, ranks=ranks, **arguments)


def trained(batches, progress, steps, micro=5):
    """The samples' numbers of each step, and their noisy inputs."""
    numbers, inputs = [], []
    for _ in range(steps):
        parts = [m.data for m in batches.micro_batches(progress, [micro]) if m.real]
        numbers.append([number for part in parts for number in part["number"].tolist()])
        inputs += [row for part in parts for row in part["inputs"].flatten(1)]
        batches.advance(progress)
    return numbers, torch.stack(inputs)


def test_what_is_a_stream():
    assert all(map(is_stream, (own_streams.Plain("train"), iter([1]))))
    assert not any(map(is_stream, ([1, 2], range(3), torch.utils.data.TensorDataset(torch.zeros(3)))))


def until_the_end(source, *position):
    """What is read from there to the end of the epoch."""
    shard = Shard(source, 0)
    shard.go_to(*position)
    return list(iter(iter(shard).__next__, None))


KINDS = [own_streams.Plain, own_streams.Stateful, own_streams.Late]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [1, 7, 16, 17, 49])
def test_reading_continues_at_any_position(kind, at):
    """With the source's state or by skipping; the same samples with the same noise."""
    reads = until_the_end(kind("train"), 1)
    base = reads[at - 1].base  # of the last one that is trained
    if kind in (own_streams.Plain, own_streams.Late):
        assert base.state is None  # `Late` does not count a sample before it is yielded
    elif at > 16:
        assert base.number == 16 * ((at - 1) // 16)
    rest = until_the_end(kind("train"), 1, at, base)
    samples, rest = ([read.sample for read in own] for own in (reads[at:], rest))
    assert [s["number"] for s in rest] == [s["number"] for s in samples]
    assert all(torch.equal(a["inputs"], b["inputs"]) for a, b in zip(rest, samples, strict=True))


def test_epochs_follow_each_other_and_differ():
    batches, progress = batches_of(own_streams.Stateful("train")), Progress()
    numbers, inputs = trained(batches, progress, 8)
    assert [len(step) for step in numbers] == [16, 16, 16, 2] * 2
    assert [number for step in numbers[:4] for number in step] == list(range(SAMPLES))
    assert (progress.epoch, progress.consumed, progress.samples) == (2, 0, 100)
    assert not torch.equal(inputs[:50], inputs[50:])


@pytest.mark.parametrize("kind", [own_streams.Plain, own_streams.Stateful])
@pytest.mark.parametrize(("workers", "stops"), [(0, (2, 3)), (0, (4, 5)), (1, (4, 5)), (1, (1, 6))])
def test_resuming_twice_is_exact(kind, workers, stops):
    """What was fetched ahead, by a step that never came or by a worker, is not in the position."""
    whole = trained(batches_of(kind("train")), Progress(), 8)
    numbers, inputs, state, progress = [], [], None, Progress()
    for until in (*stops, 8):
        batches = batches_of(kind("train"), workers=workers)
        if state is not None:
            batches.source.load_state_dict(state)
        found = trained(batches, progress, until - len(numbers))
        numbers, inputs = numbers + found[0], [*inputs, found[1]]
        next(batches.micro_batches(progress, [3]))  # a step that is begun and not committed
        state = batches.source.state_dict()
        batches.close()
    assert numbers == whole[0]
    assert torch.equal(torch.cat(inputs), whole[1])


def test_samples_that_are_skipped_are_named_when_they_are_read(caplog):
    """On the old code whenever a checkpoint was loaded, also by a mode that reads no training data."""
    caplog.set_level("INFO")
    first, progress = batches_of(own_streams.Plain("train")), Progress()
    trained(first, progress, 2)
    again = batches_of(own_streams.Plain("train"))
    again.source.load_state_dict(first.source.state_dict())
    assert caplog.text == ""
    trained(again, progress, 1)
    assert "the first 32 samples of epoch 0 are read again and skipped" in caplog.text


@pytest.mark.parametrize(("size", "workers"), [(1, 0), (16, 0), (16, 1), (64, 1)])
def test_an_order_that_depends_on_the_epochs_before_is_continued(workers, size):
    """Stopped after the first step of an epoch, at its end, in the middle; the state of an epoch of one step, too."""
    kind, steps = own_streams.TellsEpochs, 8 if size > 1 else 53
    whole = trained(batches_of(kind("train"), size), Progress(), steps)[0]
    for stop in {16: (1, 3, 4, 5, 7), 64: (1, 2, 3), 1: (49, 50, 51)}[size]:
        first, progress = batches_of(kind("train"), size, workers=workers), Progress()
        trained(first, progress, stop)
        again = batches_of(kind("train"), size, workers=workers)
        again.source.load_state_dict(first.source.state_dict())
        first.close()
        assert trained(again, progress, steps - stop)[0] == whole[stop:], stop
        again.close()


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_the_steps_of_a_stream_that_has_no_parts(world):
    """The same samples in every step as on one rank, and the same position, whose number of ranks may change."""
    whole = trained(batches_of(QuietWhole("train")), Progress(), 8)[0]

    def work(ranks):
        batches, progress = batches_of(QuietWhole("train"), ranks=ranks), Progress()
        first = trained(batches, progress, 3)[0]
        return first, batches.source.state_dict(), progress

    found = on_ranks(world, work)
    assert [[n for own, _, _ in found for n in own[step]] for step in range(3)] == whole[:3]
    assert all(state == found[0][1] for _, state, _ in found)
    alone = batches_of(QuietWhole("train"))
    alone.source.load_state_dict(found[1][1])
    assert alone.source.misfit is None
    assert trained(alone, found[1][2], 5)[0] == whole[3:]


@pytest.mark.parametrize(("kind", "world"), [(QuietWhole, 1), (QuietWhole, 3), (Quiet, 3)])
@pytest.mark.parametrize("micro", [16, 3])
def test_the_samples_of_a_streams_step_have_consecutive_positions(kind, world, micro):
    """On each rank, after those of the ranks before it; in an evaluation the index in the set."""

    def work(ranks):
        batches = batches_of(kind("train"), ranks=ranks)
        step = [m for m in batches.micro_batches(Progress(), [micro]) if m.real]
        evaluated = EvalBatches(kind("val"), seed=0, device=CPU, ranks=ranks).from_sample(0, micro, ranks)
        pairs = [(p, int(n)) for m in evaluated for p, n in zip(m.positions, m.data["number"], strict=True)]
        return [p for m in step for p in m.positions], pairs

    found = on_ranks(world, work)
    assert [p for step, _ in found for p in step] == list(range(16))
    assert all(position == number for _, pairs in found for position, number in pairs)


@pytest.mark.parametrize("shards", [1, 2])
def test_ranks_read_parts_of_their_own(shards):
    """Each sample once per epoch; the position of each part is saved."""

    def work(ranks):
        first = batches_of(Quiet("train"), size=15, ranks=ranks, shards=shards)
        progress = Progress()
        numbers, _ = trained(first, progress, 3)
        state = first.source.state_dict()
        rest, _ = trained(first, progress, 5)
        second, later = batches_of(Quiet("train"), size=15, ranks=ranks, shards=shards), Progress()
        later.consumed = later.samples = 45
        second.source.load_state_dict(state)
        assert trained(second, later, 5)[0] == rest
        return numbers + rest, state, progress.epoch

    found = on_ranks(2, work)
    assert [epoch for _, _, epoch in found] == [2, 2]
    steps = [found[0][0][step] + found[1][0][step] for step in range(8)]
    assert [len(step) for step in steps] == [15, 15, 15, 5] * 2
    for epoch in (steps[:4], steps[4:]):
        assert sorted(number for step in epoch for number in step) == list(range(SAMPLES))
    if shards == 1:
        assert all(number % 2 == rank for rank in (0, 1) for step in found[rank][0] for number in step)
    assert found[0][1] != found[1][1]


def test_a_step_has_a_sample_for_each_rank_that_reads_a_part():
    def work(ranks):
        with pytest.raises(UserError, match=r"batch\.global_size=1: each of the 2 ranks reads a shard"):
            trained(batches_of(Quiet("train"), size=1, ranks=ranks), Progress(), 1)
        return True

    assert on_ranks(2, work) == [True, True]


def test_other_workers_continue_the_parts_that_there_were():
    """And processes read what this one would."""
    batches, progress = batches_of(own_streams.Sharded("train"), shards=3), Progress()
    trained(batches, progress, 2)
    state, before = batches.source.state_dict(), Progress(**vars(progress))
    numbers, inputs = trained(batches, progress, 6)
    again = batches_of(own_streams.Sharded("train"), shards=1, workers=1)
    again.source.load_state_dict(state)
    found = trained(again, before, 6)
    again.close()
    assert found[0] == numbers
    assert torch.equal(found[1], inputs)


def test_a_stream_that_does_not_begin_again_is_refused():
    batches, progress = batches_of(own_streams.Once("train")), Progress()
    trained(batches, progress, 4)
    with pytest.raises(UserError, match=r"the stream has no samples in epoch 1; `iter` must start over"):
        batches.share(progress)


def test_a_stream_that_has_become_shorter():
    batches, progress = batches_of(own_streams.Plain("train")), Progress()
    trained(batches, progress, 2)
    again = batches_of(own_streams.Plain("train", samples=20))
    again.source.load_state_dict(batches.source.state_dict())
    with pytest.raises(UserError, match="it ended after 20 samples of epoch 0, of which 32 were trained before"):
        again.share(progress)


@pytest.mark.parametrize(("world", "equal", "workers"), [(1, False, 0), (1, False, 1), (2, True, 0), (3, False, 0)])
def test_evaluation_of_a_stream_sees_each_sample_once(world, equal, workers):
    def work(ranks):
        batches = EvalBatches(own_streams.Plain("val"), seed=0, device=CPU, ranks=ranks, workers=workers)
        batches.equal = equal
        found = []
        for _ in range(2):  # it begins anew each time
            parts = list(batches.from_sample(0, 3, ranks))
            found.append([n for m in parts if m.real for n in m.data["number"].tolist()])
            count = len(parts)
        batches.close()
        assert found[0] == found[1]
        return found[0], count

    found = on_ranks(world, work)
    assert sorted(number for own, _ in found for number in own) == list(range(20))
    assert not equal or len({count for _, count in found}) == 1


@pytest.mark.parametrize("finished", [0, 4, 6])
def test_an_interrupted_prediction_continues(finished):
    """In the middle of a batch of four, too."""
    batches = EvalBatches(own_streams.Plain("val"), seed=0, device=CPU)
    opened = batches.from_sample(0, 4, SingleRank())
    for _ in range(finished // 4 + 1):
        next(opened)
    del opened
    rest = [n for m in batches.from_sample(finished, 2, SingleRank()) for n in m.data["number"].tolist()]
    assert rest == list(range(finished, 20))
    again = [n for m in batches.from_sample(0, 2, SingleRank()) for n in m.data["number"].tolist()]
    assert again == list(range(20))


class Rows:
    """As a script's loop has it: each sample is a view of the whole table."""

    table = torch.arange(4000.0).reshape(1000, 4)

    def __iter__(self):
        for number, row in enumerate(self.table):
            yield {"number": number, "inputs": row, "again": row, "object": SimpleNamespace(row=row[1:])}


class CollatedRows(Rows):
    @staticmethod
    def collate(samples):
        return samples


def storage_bytes(tensor):
    return tensor.untyped_storage().nbytes()


def test_a_sample_is_sent_without_the_table_of_which_it_is_a_view():
    """On the old code each of them took the whole data set with it."""
    shard = Shard(Rows(), 0, in_process=False)
    shard.available(0, 2)
    sample = shard.sample(1)
    shard.close()
    assert sample["inputs"].tolist() == [4, 5, 6, 7]
    assert sample["object"].row.tolist() == [5, 6, 7]
    assert (storage_bytes(sample["inputs"]), storage_bytes(sample["object"].row)) == (16, 12)
    assert sample["again"] is sample["inputs"]


def test_tensors_that_fill_their_storage_are_sent_as_they_are():
    """With their strides; a copy of a part still requires gradients."""
    whole, expanded = torch.zeros(3, 5).t(), torch.zeros(1).expand(4)
    part, sparse = torch.zeros(9, requires_grad=True)[:2], torch.eye(3).to_sparse()
    sent = pickle.loads(stream_reader._pickled((whole, expanded, part, sparse)))
    assert [tensor.stride() for tensor in sent[:3]] == [(1, 5), (0,), (1,)]
    assert (sent[2].requires_grad, storage_bytes(sent[2])) == (True, 8)
    assert torch.equal(sent[3].to_dense(), torch.eye(3))


def test_a_collate_gets_copies_of_views_without_their_table():
    batches = batches_of(CollatedRows())
    (micro,) = batches.micro_batches(Progress(), [16])
    sample = micro.data[1]
    assert storage_bytes(sample["inputs"]) == 16
    assert sample["again"] is sample["inputs"]
    sample["inputs"].zero_()
    assert Rows.table[1].tolist() == [4, 5, 6, 7]


def read_and_wait(connection):
    shard = Shard(Endless(), 0, in_process=False)
    shard.available(0, 1)
    connection.send([child.pid for child in psutil.Process().children()])
    time.sleep(60)


class Endless:
    """More than a pipe holds."""

    def __iter__(self):
        while True:
            yield torch.zeros(100_000)


def has_ended(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_the_reader_ends_soon_after_its_run_was_killed():
    """On the old code it waited forever for its samples to be read."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    run = multiprocessing.get_context("fork").Process(target=read_and_wait, args=(sender,))
    run.start()
    readers = [psutil.Process(pid) for pid in receiver.recv()]
    run.kill()
    run.join()
    deadline = time.monotonic() + 20
    while not all(map(has_ended, readers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    lost = [reader for reader in readers if not has_ended(reader)]
    for reader in lost:
        reader.kill()
    assert readers
    assert lost == []
