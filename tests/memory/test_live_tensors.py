"""The counter of live tensors and the limit that it enforces."""

import pytest
import torch
from torch import nn

from trainapp.memory.categories import Category
from trainapp.memory.live_tensors import LiveTensors, MemoryLimitExceeded


def test_live_tensors_count_to_the_byte():
    with LiveTensors() as counter:
        a = torch.ones(1000)
        b = a * 2
        view = b[:10]
        del b
        assert counter.live == 8000  # the view keeps its storage alive
        del view
        assert counter.live == 4000
        for _ in range(5):
            c = torch.empty(500, dtype=torch.float64)
        assert counter.live == 8000
        del c
        a.add_(1)  # in place: nothing new
        assert counter.live == 4000
    assert counter.peak == 12000  # the second empty is allocated before the first is freed
    assert sum(size for _, size in counter.events) == 4000


def test_live_tensors_count_what_was_there():
    there = torch.ones(256)
    counter = LiveTensors(limit=3000)
    counter.register({Category.PARAMETERS: [there, there[:5]]})  # one storage
    assert counter.live == 1024
    with counter:
        kept = there + 1
        with pytest.raises(MemoryLimitExceeded, match=r"1.0 KiB with 2.0 KiB of 2.9 KiB in use"):
            there + 2
        assert counter.live == 2048  # the failed tensor is freed with its error
    assert counter.peak == 2048
    del kept


def test_a_limit_is_exact():
    """With one byte less the same work fails, every time."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    data = torch.ones(16, 8)

    def work(limit):
        model.zero_grad(set_to_none=True)
        counter = LiveTensors(limit)
        counter.register({Category.PARAMETERS: model.parameters(), Category.BATCH: [data]})
        with counter:
            model(data).square().sum().backward()
        return counter.peak

    peak = work(None)
    for _ in range(20):
        assert work(peak) == peak
        with pytest.raises(torch.OutOfMemoryError):
            work(peak - 1)


def test_the_counter_is_exact():
    counter = LiveTensors(limit=4 * 1000)
    with counter:
        a = torch.empty(500)
        b = a.view(5, 100)  # no new storage
        assert counter.live == 2000
        c = torch.empty(500)
        assert (counter.live, counter.peak) == (4000, 4000)
        with pytest.raises(MemoryLimitExceeded) as caught:
            torch.empty(1)
        assert (caught.value.requested, caught.value.used, caught.value.limit) == (4, 4000, 4000)
        del c, caught
        assert (counter.live, counter.peak) == (2000, 4000)
        del a
        assert counter.live == 2000
        del b
        assert counter.live == 0


def test_the_counter_leaves_autograd_cleanly():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    inputs = torch.randn(32, 64)

    def step(limit):
        counter = LiveTensors(limit)
        counter.register({Category.PARAMETERS: model.parameters(), Category.BATCH: [inputs]})
        with counter:
            model(inputs).sum().backward()
        return counter.peak

    peak = step(None)
    expected = [p.grad.clone() for p in model.parameters()]
    for limit in (peak - 1, int(0.95 * peak), int(0.9 * peak)):
        model.zero_grad()
        with pytest.raises(MemoryLimitExceeded):
            step(limit)
    model.zero_grad()
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


def test_what_fsdp_gathers_is_counted_while_it_is_there():
    """FSDP2 frees and refills the same storages by resizing them, which is no operation."""
    import torch.distributed.fsdp  # registers the operation

    def gather(sizes=(600, 400)):
        source = torch.ones(1, sum(sizes))
        for tensor, size in zip(gathered, sizes, strict=True):
            tensor.untyped_storage().resize_(4 * size)
        torch.ops.fsdp.split_with_sizes_copy(source, list(sizes), dim=1, out=[t.view(1, -1) for t in gathered])

    with LiveTensors() as counter:
        gathered = [torch.empty(600), torch.empty(400)]
        for _ in range(3):
            gather()
            assert counter.live == 4000
            for tensor in gathered:
                tensor.untyped_storage().resize_(0)
            torch.ones(1)
            assert counter.live == 0
        gather()
        for tensor in gathered:
            tensor.untyped_storage().resize_(0)
    assert counter.live == 0  # noticed at the end, too
    assert counter.peak == 8000
    assert sum(size for _, size in counter.events) == 0
