"""The counter of live tensors, the limit that it enforces, and what outlives a watched block."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from trainapp.config.schema import Memory
from trainapp.memory.cpu import CpuMemory
from trainapp.memory.live_tensors import Category, LiveTensors, MemoryLimitExceeded
from trainapp.memory.picture import stacked

KIB = 1024


def kib(number=1):
    return torch.zeros(number * 256)


# Counting


def test_live_tensors_count_to_the_byte():
    there = torch.ones(250)
    with LiveTensors() as counter:
        a = torch.ones(1000)
        b = a * 2
        view = b[:10]
        del b
        assert counter.live == 8000  # the view keeps its storage alive
        del view
        assert counter.live == 4000
        there.view(10, 25).t()[0]  # of what existed before, and is not counted
        assert counter.live == 4000
        c = torch.tensor([1.0, 2.0])
        assert counter.live == 4008
        for _ in range(5):
            c = torch.empty(500, dtype=torch.float64)
        assert counter.live == 8000
        del c
        a.add_(1)  # in place: nothing new
        assert counter.live == 4000
    assert counter.peak == 12000  # the second empty is allocated before the first is freed
    assert sum(size for _, size in counter.events) == 4000


def test_what_may_be_a_view_counts_where_it_is_a_copy():
    """In inference mode a dispatch mode sees `reshape` and `contiguous` themselves."""
    there = torch.ones(100, 10)
    with torch.inference_mode(), LiveTensors() as counter:
        same = there.reshape(1000)
        assert counter.live == 0
        copies = [there.t().reshape(1000), there.t().contiguous(), there.to(torch.float64)]
        assert counter.live == 4000 + 4000 + 8000
    del same, copies


def test_a_limit_is_exact():
    counter = LiveTensors(limit=4000)
    with counter:
        a = torch.empty(500)
        b = a.view(5, 100)
        c = torch.empty(500)
        assert (counter.live, counter.peak) == (4000, 4000)
        with pytest.raises(MemoryLimitExceeded, match=r"4 B with 3\.9 KiB of 3\.9 KiB in use") as caught:
            torch.empty(1)
        assert (caught.value.requested, caught.value.used, caught.value.limit) == (4, 4000, 4000)
        del c, caught
        assert (counter.live, counter.peak) == (2000, 4000)
        del a
        assert counter.live == 2000
        del b
        assert counter.live == 0


def test_the_limit_leaves_autograd_cleanly_and_is_repeatable():
    """With one byte less the same work fails, every time; afterwards it is the same as before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    inputs = torch.randn(32, 64)

    def step(limit):
        model.zero_grad()
        counter = LiveTensors(limit)
        counter.register({Category.PARAMETERS: model.parameters(), Category.BATCH: [inputs, inputs[:5]]})
        with counter:
            model(inputs).sum().backward()
        return counter.peak

    peak = step(None)
    expected = [p.grad.clone() for p in model.parameters()]
    for limit in (peak - 1, int(0.95 * peak), int(0.9 * peak)) * 5:
        with pytest.raises(MemoryLimitExceeded):
            step(limit)
    assert step(peak) == peak
    assert all(torch.equal(p.grad, wanted) for p, wanted in zip(model.parameters(), expected, strict=True))


def test_a_sparse_tensor_counts_as_its_parts():
    with LiveTensors() as counter:
        indices, values = torch.tensor([[0, 1], [1, 0]]), torch.ones(2)
        before = counter.live
        sparse = torch.sparse_coo_tensor(indices, values, (2, 2))
        counter.label(Category.BUFFERS, sparse)
        assert before <= counter.live <= before + 2 * 2 * 8 + 2 * 4  # of which it may make copies
        assert torch.sparse.mm(sparse, torch.ones(2, 2)).sum() == 4


def gather(tensors):
    """As FSDP2 does, which frees and refills the same storages by resizing them: that is no operation."""
    import torch.distributed.fsdp  # registers the operation

    sizes = [tensor.numel() for tensor in tensors]
    for tensor, size in zip(tensors, sizes, strict=True):
        tensor.untyped_storage().resize_(4 * size)
    outputs = [tensor.view(1, -1) for tensor in tensors]
    torch.ops.fsdp.split_with_sizes_copy(torch.ones(1, sum(sizes)), sizes, dim=1, out=outputs)


def test_what_fsdp_gathers_is_counted_while_it_is_there():
    with LiveTensors() as counter:
        gathered = [torch.empty(600), torch.empty(400)]
        for _ in range(3):
            gather(gathered)
            assert counter.live == 4000
            for tensor in gathered:
                tensor.untyped_storage().resize_(0)
            torch.ones(1)
            assert counter.live == 0
        gather(gathered)
        for tensor in gathered:
            tensor.untyped_storage().resize_(0)
    assert counter.live == 0  # noticed at the end, too
    assert counter.peak == 8000
    assert sum(size for _, size in counter.events) == 0


def test_the_picture_stacks_what_was_counted():
    counter = LiveTensors()
    weights = torch.zeros(100, requires_grad=True)
    counter.register({Category.PARAMETERS: [weights]})
    with counter:
        (weights * torch.zeros(100)).sum().backward()
        counter.label(Category.GRADIENTS, weights.grad)
    series = stacked(counter.events, counter.categories)
    total = sum(series.values())
    assert (int(total.max()), int(total[-1])) == (counter.peak, counter.live)
    assert set(np.unique(series[Category.PARAMETERS])) == {400}
    assert series[Category.GRADIENTS][-1] == 400
    assert all((values >= 0).all() for values in series.values())


# What outlives a watched block counts in the next one, as long as it lives


@pytest.fixture
def run():
    return CpuMemory(torch.device("cpu"), Memory())


def test_it_has_a_category_of_its_own_unless_it_has_another(run):
    weight = kib(2)
    with run.watch({Category.PARAMETERS: [weight]}):
        kept = kib()
    with run.watch({Category.PARAMETERS: [weight]}):
        pass
    events, kinds = run.events([])
    assert {kinds[number]: size for number, size in events} == {Category.PARAMETERS: 2 * KIB, Category.KEPT: KIB}
    del kept


def test_nothing_is_kept_alive_by_counting(run):
    with run.watch({}):
        tensor = kib()
        alive = weakref.ref(tensor.untyped_storage())
    assert alive() is not None
    del tensor
    assert alive() is None
    with run.watch({}):
        pass
    assert run.used() == 0


def test_the_limit_holds_for_what_a_failed_attempt_has_left_as_long_as_it_lives(run):
    run.limit, bank = 4 * KIB, []

    def attempt():
        with run.watch({}):
            bank.append(kib())
            cycle = [kib(2)]
            cycle.append(cycle)
            kib(2)

    with pytest.raises(MemoryLimitExceeded):
        attempt()
    gc.collect()  # as a rollback does
    with pytest.raises(MemoryLimitExceeded, match="the parameters"), run.watch({Category.PARAMETERS: [kib(5)]}):
        pass
    with run.watch({}):
        pass
    assert run.used() == KIB  # what the model did not take back is there
    with pytest.raises(MemoryLimitExceeded, match=r"4\.0 KiB with 1\.0 KiB of 4\.0 KiB in use"), run.watch({}):
        kib(4)
    bank.clear()
    with run.watch({}):
        pass
    assert run.used() == 0


@pytest.mark.parametrize(("numbers", "kept"), [(1, 0), (15, 0), (16, 64)])
def test_scalars_are_not_kept(run, numbers, kept):
    with run.watch({}):
        scalar = torch.zeros(numbers)
    assert run.used() == scalar.nbytes
    with run.watch({}):
        pass
    assert run.used() == kept


def test_a_nested_block_counts_it_once(run):
    bank = []
    for _ in range(2):
        with run.watch({}):
            with run.watch({}):
                bank.append(kib())
            kib()
    assert (run.used(), run.counter.peak) == (2 * KIB, 3 * KIB)


def test_a_sample_that_is_a_view_of_a_data_set_does_not_count_as_a_whole(run):
    table = kib(8).view(8, 256)
    with run.watch({}):
        batch = torch.stack([table[3]])
    assert run.used() == KIB
    for kind, expected in ((Category.BATCH, 0), (Category.BUFFERS, 8 * KIB)):
        with run.watch({kind: [table[2:4]]}):
            assert run.counter.live == expected + KIB
    del batch


def test_what_fsdp_has_gathered_is_not_kept(run):
    """It is emptied by a resize, which nothing shows."""
    with run.watch({}):
        gathered = [torch.empty(600)]
        gather(gathered)
        other = kib()
    with run.watch({}):
        assert run.counter.live == other.nbytes
