"""Streams: where a position is, that it is reached again exactly, and which rank reads what."""

import threading

import own_streams
import pytest
import torch

from trainapp.data.eval_stream import EvalStream
from trainapp.data.progress import Progress
from trainapp.data.sample_fingerprint import fingerprint
from trainapp.data.sampler import TrainBatches
from trainapp.data.stream import is_stream
from trainapp.data.stream_batches import StreamBatches
from trainapp.data.stream_parts import stream_shards
from trainapp.data.stream_reader import Position, Read, Reader
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
        self.rank, self.world, self.shared = rank, world, shared
        self.is_rank_zero = rank == 0

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
    shared, results = ([None] * world, threading.Barrier(world, timeout=30)), [None] * world

    def run(rank):
        try:
            results[rank] = work(Together(rank, world, shared))
        except BaseException as error:
            results[rank] = error
            shared[1].abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        raise errors[0]
    return results


def own_generator(source):
    return {"generator": source.generator} if hasattr(source, "generator") else {}


def batches_of(source, size=16, ranks=None, **arguments):
    arguments = {"generators_of": own_generator} | arguments
    return StreamBatches(source, global_size=size, seed=0, device=CPU, ranks=ranks or SingleRank(), **arguments)


def trained(batches, progress, steps, micro=5):
    """The samples' numbers of each step, and their noisy inputs."""
    numbers, inputs = [], []
    for _ in range(steps):
        parts = [m.data for m in batches.micro_batches(progress, micro) if m.real]
        numbers.append([number for part in parts for number in part["number"].tolist()])
        inputs += [row for part in parts for row in part["inputs"].flatten(1)]
        batches.advance(progress)
    return numbers, torch.stack(inputs)


@pytest.mark.parametrize(
    ("source", "streams"),
    [
        (own_streams.Plain("train"), True),
        (iter([1]), True),
        ([1, 2], False),
        (range(3), False),
        (torch.utils.data.TensorDataset(torch.zeros(3)), False),
    ],
)
def test_what_is_a_stream(source, streams):
    assert is_stream(source) is streams


KINDS = [own_streams.Plain, own_streams.Stateful, own_streams.Late, own_streams.ShuffledAtOnce]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [1, 7, 16, 17, 49])
def test_a_reader_continues_at_any_position(kind, at):
    """With the source's state or by skipping; the same samples with the same noise."""
    reader = Reader(kind("train"), 0, 0, 1)
    first = reader[Read(Position(1), 16)]
    samples, bases = list(first.samples), [first.base]
    while not first.ended:
        first = reader[Read(None, 16)]
        samples += first.samples
        bases.append(first.base)
    base = max((base for base in bases if base.number < at), key=lambda base: base.number)
    if kind in (own_streams.Plain, own_streams.Late):
        assert base.state is None  # `Late` does not count a sample before it is yielded
    position = Position(1, at, base=base, last=tuple(map(fingerprint, samples[max(0, at - 4) : at])))
    chunk = Reader(kind("train"), 0, 0, 1)[Read(position, 100)]
    assert chunk.problem is None
    assert [s["number"] for s in chunk.samples] == [s["number"] for s in samples[at:]]
    assert all(torch.equal(a["inputs"], b["inputs"]) for a, b in zip(chunk.samples, samples[at:], strict=True))


def test_epochs_follow_each_other_and_differ():
    batches, progress = batches_of(own_streams.Stateful("train")), Progress()
    numbers, inputs = trained(batches, progress, 8)
    assert [len(step) for step in numbers] == [16, 16, 16, 2] * 2
    assert [number for step in numbers[:4] for number in step] == list(range(SAMPLES))
    assert (progress.epoch, progress.consumed, progress.samples) == (2, 0, 100)
    assert not torch.equal(inputs[:50], inputs[50:])


@pytest.mark.parametrize("kind", [own_streams.Plain, own_streams.Stateful, own_streams.ShuffledAtOnce])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("stops", [(2, 3), (4, 5), (1, 6)])
def test_resuming_twice_is_exact(kind, workers, stops):
    """What was fetched ahead, by a step that never came or by a worker, is not in the position."""
    whole = trained(batches_of(kind("train")), Progress(), 8)
    numbers, inputs, state, progress = [], [], None, Progress()
    for until in (*stops, 8):
        batches = batches_of(kind("train"), workers=workers)
        if state is not None:
            batches.load_state_dict(state)
        found = trained(batches, progress, until - len(numbers))
        numbers, inputs = numbers + found[0], [*inputs, found[1]]
        next(batches.micro_batches(progress, 3))  # a step that is begun and not committed
        state = batches.state_dict()
        batches.close()
    assert numbers == whole[0]
    assert torch.equal(torch.cat(inputs), whole[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [own_streams.OwnGenerator, own_streams.TellsEpochs])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("size", [1, 16, 64])
def test_an_order_that_depends_on_the_epochs_before_is_continued(kind, workers, size):
    """Stopped after the first step of an epoch, at its end, in the middle; the state of an epoch of one step, too."""
    steps = 8 if size > 1 else 103
    whole = trained(batches_of(kind("train"), size), Progress(), steps)[0]
    for stop in {16: (1, 3, 4, 5, 7), 64: (1, 2, 3), 1: (49, 50, 51, 102)}[size]:
        first, progress = batches_of(kind("train"), size, workers=workers), Progress()
        trained(first, progress, stop)
        again = batches_of(kind("train"), size, workers=workers)
        again.load_state_dict(first.state_dict())
        first.close()
        assert trained(again, progress, steps - stop)[0] == whole[stop:], stop
        again.close()


def test_generators_as_they_were_built_would_repeat_an_epoch():
    """Negative control: without the generators, the position of the second epoch is not reached again."""
    whole, progress = batches_of(own_streams.OwnGenerator("train"), generators_of=lambda source: {}), Progress()
    trained(whole, progress, 8)
    again = batches_of(own_streams.OwnGenerator("train"), generators_of=lambda source: {})
    again.load_state_dict(whole.state_dict())
    with pytest.raises(UserError, match=r"sample 50 of epoch 1 is not the one .* depends on the epochs before"):
        again.step_samples(progress)


def test_a_state_that_nothing_tells_is_reached_once_and_then_refused():
    """The end of the first epoch is reached by reading it again; that of the second cannot be."""
    whole = trained(batches_of(own_streams.CountsEpochs("train")), Progress(), 8)[0]
    for stop in (2, 4, 6, 8):
        first, progress = batches_of(own_streams.CountsEpochs("train")), Progress()
        trained(first, progress, stop)
        again = batches_of(own_streams.CountsEpochs("train"))
        again.load_state_dict(first.state_dict())
        if stop <= 4:
            assert trained(again, progress, 8 - stop)[0] == whole[stop:]
        else:
            with pytest.raises(UserError, match="is not the one that was trained before"):
                again.step_samples(progress)


@pytest.mark.parametrize(
    ("samples", "message"), [(60, "epoch 0 continues after the 50"), (40, "epoch 0 ended after 40")]
)
def test_a_stream_of_another_length_is_refused_at_the_end_of_an_epoch(samples, message):
    batches, progress = batches_of(own_streams.Plain("train")), Progress()
    trained(batches, progress, 4)
    again = batches_of(own_streams.Plain("train", samples=samples))
    again.load_state_dict(batches.state_dict())
    with pytest.raises(UserError, match=message):
        again.step_samples(progress)


def test_a_source_may_seed_its_generator_in_set_epoch():
    class Seeds(own_streams.OwnGenerator):
        def set_epoch(self, epoch):
            self.generator.seed(epoch)

    steps, _ = trained(batches_of(Seeds("train")), Progress(), 8)
    own = Seeds("train")
    own.set_epoch(1)
    assert [number for step in steps[4:] for number in step] == [sample["number"] for sample in own]


def test_a_stream_that_fails_returns_to_its_generators():
    """The same source is read again, by the process whose first try has moved its generator."""
    source = own_streams.OwnGenerator("train")
    whole = trained(batches_of(own_streams.OwnGenerator("train")), Progress(), 8)[0]
    batches, progress, steps, digits = batches_of(source), Progress(), [], source.digits
    for step in range(8):
        if step in (0, 2, 4, 5):
            source.digits = None
            with pytest.raises(TypeError):
                batches.step_samples(progress)
            source.digits = digits
        steps += trained(batches, progress, 1)[0]
    assert steps == whole


def test_samples_that_are_objects_are_compared():
    batches, progress = batches_of(own_streams.Objects("train")), Progress()
    for _ in range(2):
        list(batches.micro_batches(progress, 16))
        batches.advance(progress)
    again = batches_of(own_streams.Objects("train"))
    again.load_state_dict(batches.state_dict())
    with pytest.raises(UserError, match="of epoch 0 is not the one that was trained before"):
        again.step_samples(progress)


def test_samples_that_cannot_be_compared_are_named(caplog):
    batches, progress = batches_of(iter([{"x": (n for n in ())}] * 4), size=2, ranks=None), Progress()
    for _ in range(2):
        batches.step_samples(progress)
        batches.advance(progress)
        batches.state_dict()
    assert caplog.text.count("hold what cannot be compared (builtins.") == 1


def test_a_position_of_what_was_fetched_would_lose_samples():
    """Negative control: the reader's own state, sixteen samples ahead."""
    source = own_streams.Stateful("train")
    batches, progress = batches_of(source), Progress()
    trained(batches, progress, 1)
    next(batches.micro_batches(progress, 3))
    assert source.state_dict()["position"] > batches.state_dict()["parts"][0]["number"] == 16


def test_a_retried_step_has_the_same_samples_in_another_cut():
    """They are held: the source is not asked again."""
    source = own_streams.Plain("train")
    batches, progress = batches_of(source), Progress()
    whole = next(batches.micro_batches(progress, 16)).data["inputs"]
    source.digits = None  # reading on would fail
    for size in (8, 3, 16):
        batches.drop_fetched()
        again = torch.cat([m.data["inputs"] for m in batches.micro_batches(progress, size)])
        assert torch.equal(again, whole)


def test_a_smaller_global_batch_keeps_the_rest():
    batches, progress = batches_of(own_streams.Stateful("train")), Progress()
    assert batches.step_samples(progress) == 16
    batches.global_size = 6
    numbers, _ = trained(batches, progress, 2)
    assert numbers == [list(range(6)), list(range(6, 12))]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_the_steps_of_a_stream_that_has_no_parts(world):
    """The same samples in every step as on one rank, and the same position, whose number of ranks may change."""
    whole = trained(batches_of(QuietWhole("train")), Progress(), 8)[0]

    def work(ranks):
        batches, progress = batches_of(QuietWhole("train"), ranks=ranks), Progress()
        first = trained(batches, progress, 3)[0]
        return first, batches.state_dict(), progress

    found = on_ranks(world, work)
    assert [[n for own, _, _ in found for n in own[step]] for step in range(3)] == whole[:3]
    assert all(state == found[0][1] for _, state, _ in found)
    alone = batches_of(QuietWhole("train"))
    alone.load_state_dict(found[1][1])
    assert alone.misfit is None
    assert trained(alone, found[1][2], 5)[0] == whole[3:]


@pytest.mark.parametrize("shards", [1, 2])
def test_ranks_read_parts_of_their_own(shards):
    """Each sample once per epoch; the position of each part is saved."""

    def work(ranks):
        first = batches_of(Quiet("train"), size=15, ranks=ranks, shards=shards)
        progress = Progress()
        numbers, _ = trained(first, progress, 3)
        state = first.state_dict()
        rest, _ = trained(first, progress, 5)
        second, later = batches_of(Quiet("train"), size=15, ranks=ranks, shards=shards), Progress()
        later.consumed = later.samples = 45
        second.load_state_dict(state)
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


def test_other_ranks_cannot_continue_parts():
    batches, progress = batches_of(own_streams.Sharded("train"), shards=2), Progress()
    trained(batches, progress, 1)
    state = batches.state_dict() | {"world": 2}
    again = batches_of(own_streams.Sharded("train"), shards=2)
    again.load_state_dict(state)
    assert again.misfit == (
        "every rank of the 2 that read the stream had a position in a part of its own, and now there are 1"
    )


def test_other_workers_continue_the_parts_that_there_were():
    batches, progress = batches_of(own_streams.Sharded("train"), shards=3), Progress()
    trained(batches, progress, 2)
    state, before = batches.state_dict(), Progress(**vars(progress))
    expected = trained(batches, progress, 4)[0]
    again = batches_of(own_streams.Sharded("train"), shards=1)
    again.load_state_dict(state)
    assert trained(again, before, 4)[0] == expected


def test_processes_change_nothing():
    source = own_streams.Sharded("train")
    found = []
    for workers in (0, 1):
        batches = batches_of(source, shards=2, workers=workers)
        found.append(trained(batches, Progress(), 6))
        batches.close()
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_number_of_parts(caplog):
    caplog.set_level("INFO")
    assert stream_shards(own_streams.Sharded("train"), 3, 3) == {"shards": 3, "workers": 1}
    assert stream_shards(own_streams.Sharded("train"), "auto", 7) == {"shards": 1, "workers": 1}
    assert stream_shards(own_streams.Sharded("train"), 0, 0) == {"shards": 1, "workers": 0}
    assert not caplog.text
    assert stream_shards(own_streams.Plain("train"), 3, 3) == {"shards": 1, "workers": 1}
    assert "one process reads the stream, since a Plain cannot be read in parts" in caplog.text


def test_a_stream_in_another_order_is_refused():
    batches, progress = batches_of(own_streams.Unseeded("train")), Progress()
    trained(batches, progress, 2)
    again = batches_of(own_streams.Unseeded("train"))
    again.load_state_dict(batches.state_dict())
    with pytest.raises(UserError, match=r"sample 32 of epoch 0 is not the one that was trained before: .*a seed"):
        again.step_samples(progress)


def test_a_stream_that_does_not_begin_again_is_refused():
    batches, progress = batches_of(own_streams.Once("train")), Progress()
    trained(batches, progress, 4)
    with pytest.raises(UserError, match=r"the stream has no samples in epoch 1; `iter` must begin anew"):
        batches.step_samples(progress)


def test_a_stream_that_has_become_shorter():
    batches, progress = batches_of(own_streams.Plain("train")), Progress()
    trained(batches, progress, 2)
    again = batches_of(own_streams.Plain("train", samples=20))
    again.load_state_dict(batches.state_dict())
    with pytest.raises(UserError, match="it ended after 20 samples of epoch 0, of which 32 were trained before"):
        again.step_samples(progress)


def test_an_example_is_trained_later():
    batches, progress = batches_of(own_streams.Stateful("train")), Progress()
    assert batches.example(2)["number"].tolist() == [0, 1]
    assert trained(batches, progress, 1)[0] == [list(range(16))]


def test_samples_are_as_in_a_data_set():
    """The same collate and micro-batches as for indexable data."""

    class Indexed(own_streams.Plain):
        def __len__(self):
            return self.samples

        def __getitem__(self, index):
            return {"number": index}

    listed = [{"number": number} for number in range(20)]
    stream, indexed = batches_of(iter(listed), size=10), TrainBatches(listed, global_size=10, seed=0, device=CPU)
    for size, parts in ((4, None), (3, 4), (10, None)):
        sizes = [
            [(m.samples, m.last, m.real) for m in kind.micro_batches(Progress(), size, parts)]
            for kind in (stream, indexed)
        ]
        assert sizes[0] == sizes[1]


def evaluated(batches, times=3):
    return [
        [micro.data["inputs"].flatten(1) for micro in batches.from_sample(0, 8, SingleRank())] for _ in range(times)
    ]


@pytest.mark.parametrize("workers", [0, 1])
def test_every_evaluation_begins_with_the_generators_as_they_were_built(workers, caplog):
    source = own_streams.OwnGenerator("val")
    batches = EvalStream(source, seed=0, device=CPU, workers=workers, generators_of=own_generator)
    first, *others = evaluated(batches)
    batches.close()
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    assert "begins with other samples" not in caplog.text


def test_evaluations_that_differ_are_noticed(caplog):
    evaluated(EvalStream(own_streams.CountsEpochs("val"), seed=0, device=CPU))
    assert caplog.text.count("the evaluation stream CountsEpochs begins with other samples than before") == 1


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_evaluation_of_a_stream_sees_each_sample_once(world, equal, workers):
    if workers and world > 1:
        pytest.skip("ranks are threads here")

    def work(ranks):
        batches = EvalStream(
            own_streams.Plain("val"), seed=0, device=CPU, rank=ranks.rank, world=world, equal=equal, workers=workers
        )
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


@pytest.mark.parametrize("finished", [0, 1, 4, 6])
def test_an_interrupted_evaluation_continues(finished):
    """In the middle of a batch of four, too; what was read is not read again."""
    source = own_streams.Plain("val")
    batches = EvalStream(source, seed=0, device=CPU)
    opened = batches.from_sample(0, 4, SingleRank())
    for _ in range(finished // 4 + 1):
        next(opened)
    del opened
    rest = [n for m in batches.from_sample(finished, 2, SingleRank()) for n in m.data["number"].tolist()]
    assert rest == list(range(finished, 20))
    again = [n for m in batches.from_sample(0, 2, SingleRank()) for n in m.data["number"].tolist()]
    assert again == list(range(20))


def test_an_evaluation_that_failed_after_its_last_uneven_batch_ends():
    """Of the 20 samples, three ranks have 7, 7 and 6: the last read lacks one."""
    batches = EvalStream(own_streams.Plain("val"), seed=0, device=CPU, rank=0, world=3)
    opened = batches.from_sample(0, 7, SingleRank())
    assert next(opened).data["number"].tolist() == list(range(0, 20, 3))
    del opened
    assert list(batches.from_sample(7, 7, SingleRank())) == []
