"""Which samples a step trains on, how they are cut, and that every way of fetching them gives the same."""

import gc
import random
import time

import numpy as np
import pytest
import runs
import torch
from torch.utils.data import Dataset

from trainapp.data.batch import size_for, split_indices, split_micro_batch
from trainapp.data.eval_batches import EvalBatches
from trainapp.data.loader import BatchLoader, Fetcher, Request
from trainapp.data.progress import Cadence, Progress
from trainapp.data.sampler import Permutation
from trainapp.data.sets.digits import Digits
from trainapp.data.sets.synthetic import SyntheticTokens
from trainapp.data.train_batches import TrainBatches
from trainapp.data.workers import worker_count
from trainapp.parallel.ranks import SingleRank

CPU = torch.device("cpu")


class Place(SingleRank):
    """One rank of several, whose collectives are its own."""

    def __init__(self, rank: int, world: int):
        self.rank, self.world_size = rank, world


class Numbers(Dataset):
    """Sample i is the number i, plus one draw from each of the three global random generators."""

    task = "classification"

    def __init__(self, samples: int = 50):
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item(), np.random.rand(), random.random()])


class BatchedNumbers(Numbers):
    """The same, but fetches whole batches and has no notion of epochs, as Hugging Face's data sets do."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


def indices_of(batches: TrainBatches, steps: int) -> list[list[int]]:
    progress, seen = Progress(), []
    for _ in range(steps):
        seen.append(batches.share(progress).numbers)
        batches.advance(progress)
    assert progress.samples == sum(map(len, seen)) or batches.world_size > 1
    return seen


@pytest.mark.parametrize("size", [16, 1437, 5000])
def test_the_order_does_not_depend_on_the_batch_size(size):
    batches = TrainBatches(Digits("train"), global_size=size, seed=3, device=CPU)
    steps = indices_of(batches, 2 * batches.steps_left())
    seen = [i for step in steps for i in step]
    assert seen == Permutation(3, 1437).indices(0, 0, 1437) + Permutation(3, 1437).indices(1, 0, 1437)
    assert len(steps[batches.steps_left() - 1]) == 1437 - (batches.steps_left() - 1) * size


@pytest.mark.parametrize(("world", "size"), [(1, 64), (1, 7), (3, 16), (3, 5), (2, 1)])
def test_a_sample_has_the_same_position_however_the_step_is_cut(world, size):
    """Also where a micro-batch is cut again, and where a rank has fewer samples than the others and keeps in step."""
    data, step = Numbers(200), Permutation(0, 200).indices(0, 0, 37)  # 37: uneven on two and three ranks
    found = []
    for rank in range(world):
        batches = TrainBatches(data, global_size=37, seed=0, device=CPU, ranks=Place(rank, world))
        for micro in filter(lambda micro: micro.real, batches.micro_batches(Progress(), [size])):
            for piece in split_micro_batch(micro, split_indices(range(micro.samples), 3)):
                found += [(p, step[p] == int(row[0])) for p, row in zip(piece.positions, piece.data, strict=True)]
    assert sorted(found) == [(position, True) for position in range(37)]


@pytest.mark.parametrize(("world", "size"), [(1, 50), (1, 7), (3, 4)])
def test_a_position_in_an_evaluation_is_the_index_in_the_set(world, size):
    """Each sample comes once, also where an evaluation continues after an error."""
    found = {0: [], 2: []}
    for rank in range(world):
        batches = EvalBatches(Numbers(50), seed=0, device=CPU, ranks=Place(rank, world))
        for done, positions in found.items():
            first = batches.start + done
            for micro in batches.from_sample(done, size, SingleRank()):
                assert list(micro.positions) == micro.data[:, 0].tolist()
                assert micro.positions[0] >= first
                positions += micro.positions
    assert found[0] == list(range(50))
    assert len(found[2]) == 50 - 2 * world


def test_drop_last_leaves_the_partial_batch_out():
    batches = TrainBatches(Digits("train"), global_size=64, seed=0, device=CPU, drop_last=True)
    steps = indices_of(batches, 23)
    assert batches.steps_left() == 22
    assert {len(step) for step in steps} == {64}
    assert steps[22] == Permutation(0, 1437).indices(1, 0, 64)


@pytest.mark.parametrize("workers", [0, 2])
def test_aborting_in_the_middle_gives_the_same_samples_in_another_cut(workers):
    batches = TrainBatches(Digits("train", augment=True), global_size=64, seed=0, device=CPU, workers=workers)
    progress = Progress()
    whole = next(batches.micro_batches(progress, [64])).data
    for size in (32, 7, 32):
        aborted = batches.micro_batches(progress, [size])
        first = next(aborted).data
        assert torch.equal(first["inputs"], whole["inputs"][: len(first["inputs"])])
        del aborted
        again = torch.cat([micro.data["inputs"] for micro in batches.micro_batches(progress, [size])])
        assert torch.equal(again, whole["inputs"])
    batches.close()


class Mixed(Numbers):
    """Mixes the samples of a batch at random, as mix-up does."""

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        mixed = torch.stack(samples)
        return mixed + random.random() * torch.rand(()) * np.random.rand() * mixed[torch.randperm(len(mixed))]


class MixedBatches(Mixed, BatchedNumbers):
    """The same, in batches."""

    in_memory = True

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


@pytest.mark.parametrize("dataset", [Mixed(), MixedBatches()], ids=["samples", "batches"])
def test_a_collate_that_draws_random_numbers_draws_the_same_again(dataset):
    found = []
    for workers, fetched_before in ((0, 0), (0, 3), (2, 1)):
        torch.manual_seed(workers)
        batches = TrainBatches(dataset, global_size=20, seed=0, device=CPU, workers=workers)
        for _ in range(fetched_before):  # attempts that were aborted
            next(batches.micro_batches(Progress(), [10]))
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        found.append([micro.data for micro in batches.micro_batches(Progress(), [10])])
        after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        assert runs.differences(before, after) == []  # dropout and the like do not notice
        batches.close()
    assert runs.differences(found[0], found[1]) == runs.differences(found[0], found[2]) == []
    assert not torch.equal(found[0][0], found[0][1])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Numbers(), Digits("train", augment=True)], ids=["own", "whole batches"])
def test_a_piece_is_what_would_have_been_fetched(dataset, workers):
    """Random numbers included, and in the second epoch, while batches of the third are fetched ahead."""
    batches = TrainBatches(dataset, global_size=20, seed=0, device=CPU, workers=workers)
    progress = Progress(epoch=1)
    whole = list(batches.micro_batches(progress, [10]))
    pieces = [piece for micro in whole for piece in split_micro_batch(micro, [range(4), range(4, 8), range(8, 10)])]
    batches.close()
    again = TrainBatches(dataset, global_size=20, seed=0, device=CPU)
    indices = again.share(progress).numbers
    found = [(piece.samples, piece.last, piece.real) for piece in pieces]
    assert found == [(size, number == 6, True) for number, size in enumerate([4, 4, 2, 4, 4, 2], start=1)]
    ends = [4, 8, 10, 14, 18, 20]
    for piece, start, end in zip(pieces, [0, *ends], ends, strict=False):
        wanted = again._loader.fetcher[Request(1, indices[start:end])]
        assert runs.differences(piece.data, wanted) == []
    # A piece of a piece, and a dummy for a rank with fewer of them than another.
    _, second, dummy = split_micro_batch(pieces[1], [range(1), range(1, 4), range(0)])
    assert runs.differences(second.data, again._loader.fetcher[Request(1, indices[5:8])]) == []
    assert (dummy.samples, dummy.real) == (1, False)
    assert runs.differences(dummy.data, again._loader.fetcher[Request(1, indices[4:5])]) == []


@pytest.mark.parametrize("data", ["digits", "tokens", "own"])
def test_workers_change_nothing(data):
    """Across the end of an epoch, and for any seeds of the process."""
    kinds = {"digits": lambda: Digits("train", augment=True), "tokens": lambda: SyntheticTokens("train", size=40)}
    dataset = kinds.get(data, Numbers)()
    found = []
    for workers in (0, 2):
        torch.manual_seed(workers), np.random.seed(workers), random.seed(workers)
        size = len(dataset) // 2 + 1
        batches, progress = TrainBatches(dataset, global_size=size, seed=0, device=CPU, workers=workers), Progress()
        samples = []
        for _ in range(3):
            samples += [micro.data for micro in batches.micro_batches(progress, [-(-size // 2)])]
            batches.advance(progress)
        found.append(samples)
        batches.close()
    assert runs.differences(found[0], found[1]) == []
    assert len(found[0]) == 6


@pytest.mark.parametrize("kind", [Numbers, BatchedNumbers])
def test_random_transforms_make_the_same_sample_again(kind):
    """With torch's, NumPy's and Python's global generators, in any batch and order."""
    fetcher = Fetcher(kind(), seed=0)
    torch.manual_seed(1)
    together = fetcher[Request(0, [3, 4, 5])]
    torch.manual_seed(2), np.random.seed(2), random.seed(2)
    apart = torch.cat([fetcher[Request(0, [5])], fetcher[Request(0, [3, 4])]])
    assert torch.equal(apart, together[[2, 0, 1]])
    assert not torch.equal(fetcher[Request(1, [3, 4, 5])], together)  # another epoch draws new numbers
    assert not torch.equal(Fetcher(kind(), seed=1)[Request(0, [3, 4, 5])], together)
    assert len(set(together[:, 1:].flatten().tolist())) == 9


def test_workers_end_at_once_when_a_run_is_over():
    """If left to the garbage collector, each loader would wait five seconds for each of its workers."""
    batches = TrainBatches(Numbers(), global_size=8, seed=0, device=CPU, workers=2)
    list(batches.micro_batches(Progress(), [4]))
    started = time.monotonic()
    batches.close()
    del batches
    gc.collect()
    assert time.monotonic() - started < 3


def test_worker_count():
    assert worker_count(3, Numbers()) == 3
    assert worker_count(0, Numbers()) == 0
    assert worker_count("auto", Digits("train")) == 0  # in memory: workers would only add overhead
    assert 0 <= worker_count("auto", Numbers()) <= 8
    assert worker_count("auto", Numbers(), ranks=10_000) == 0


def test_batches_without_workers_are_lazy():
    """An aborted step has not fetched the rest of the epoch."""
    data = Counted(50)
    next(BatchLoader(data, 0, 0, CPU).batches(Request(0, [i]) for i in range(50)))
    assert data.fetched == 1


@pytest.mark.parametrize(
    ("cadence", "steps"),
    [
        (Cadence(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
        (Cadence(5), [1, 5, 10]),
        (Cadence(5, 1), [1, 6, 11]),
        (Cadence(5, 0), [5, 10]),
        (Cadence(5, 5), [5, 10]),
        (Cadence(5, 2), [2, 7]),
    ],
)
def test_the_steps_that_have_an_update(cadence, steps):
    assert list(filter(cadence.includes, range(1, 12))) == steps
    assert cadence.first_step == steps[0]


def test_batches_of_the_next_update_are_fetched_ahead():
    """The same samples again, cut by its own size, from the same iteration: none is fetched twice for one update."""
    data = Counted(20)
    batches = TrainBatches(data, global_size=8, seed=0, device=CPU)
    sizes, cadences, progress, opened = (8, 3), (Cadence(), Cadence()), Progress(), []
    for update, size in enumerate(sizes):
        progress.update = update
        cut = [micro.data.tolist() for micro in batches.micro_batches(progress, sizes, cadences)]
        opened.append(batches._open)
        assert [len(piece) for piece in cut] == ([8] if size == 8 else [3, 3, 2])
        assert [number for piece in cut for number in piece] == Permutation(0, 20).indices(0, 0, 8)
    assert opened[0] is opened[1]
    assert data.fetched == 16
    progress.update = 0
    batches.advance(progress)
    assert next(iter(batches.micro_batches(progress, sizes, cadences))).data.tolist() == Permutation(0, 20).indices(
        0, 8, 16
    )


class Counted(Numbers):
    """Counts how many were asked for."""

    fetched = 0

    def __getitem__(self, index):
        self.fetched += 1
        return index


# How samples are cut into micro-batches


def test_cut_keeps_every_sample_in_order():
    for samples in range(1, 30):
        for size in range(1, 35):
            parts = split_indices(list(range(samples)), size)
            assert [i for part in parts for i in part] == list(range(samples))
            assert len(parts) == -(-samples // size)
            assert size <= 2 or samples == 1 or min(map(len, parts)) >= 2
            assert max(map(len, parts)) <= size
            pieces = split_indices(list(range(samples)), samples, size)
            assert [i for piece in pieces for i in piece] == list(range(samples))
            assert len(pieces) == size
            assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


def test_no_micro_batch_has_fewer_samples_than_the_model_needs():
    """A smaller size before a larger one; without a need, or a need that is met, the size itself."""
    for fewest in range(1, 7):
        for samples in range(1, 40):
            for size in range(fewest, 45):
                chosen = size_for(samples, size, fewest)
                parts = split_indices(range(samples), chosen)
                assert samples < fewest or min(map(len, parts)) >= fewest
                assert chosen <= size or all(
                    min(map(len, split_indices(range(samples), smaller))) < fewest
                    for smaller in range(fewest, size + 1)
                )
                if min(map(len, split_indices(range(samples), size))) >= fewest:
                    assert chosen == size


def test_ranks_have_as_many_micro_batches_though_the_model_needs_several_samples():
    """Where another rank has a sample more, some may be empty; none has too few."""
    for fewest in range(1, 6):
        for samples in range(fewest, 40):
            for count in range(1, 12):
                parts = split_indices(range(samples), -(-samples // count), count, fewest)
                assert [i for part in parts for i in part] == list(range(samples))
                assert len(parts) >= count
                assert all(not part or len(part) >= fewest for part in parts)


@pytest.mark.parametrize("samples", [65, 130])
def test_a_dummy_has_as_many_samples_as_the_model_needs(samples):
    """65 samples on two ranks are 33 and 32: in threes, since none may be alone, and as often on both."""

    class Rank(SingleRank):
        world_size = 2

        def __init__(self, rank):
            self.rank = rank

    sizes = []
    for rank in (0, 1):
        options = {"global_size": samples, "seed": 0, "device": torch.device("cpu")}
        batches = TrainBatches(Digits("train"), ranks=Rank(rank), **options)
        micros = list(batches.micro_batches(Progress(), [2], fewest=[2]))
        assert all(len(micro.data["inputs"]) == micro.samples >= 2 for micro in micros)
        assert sum(micro.samples for micro in micros if micro.real) == samples // 2 + (samples % 2 and rank == 0)
        sizes.append(len(micros))
    assert sizes[0] == sizes[1]
    micro = next(batches.micro_batches(Progress(), [8], fewest=[2]))
    dummy = list(split_micro_batch(micro, [range(8), range(0)], fewest=2))[1]
    assert (dummy.real, dummy.samples, len(dummy.data["inputs"])) == (False, 2, 2)
