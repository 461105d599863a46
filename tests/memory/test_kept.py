"""What outlives a watched block counts in the next one, as long as it lives."""

import collections
import gc
import weakref

import pytest
import torch

from trainapp.config.schema import Memory
from trainapp.memory.categories import Category
from trainapp.memory.cpu import CpuMemory
from trainapp.memory.kept import KeptStorages, WeakStorages
from trainapp.memory.live_tensors import LiveTensors, MemoryLimitExceeded
from trainapp.torch_private import outside_dispatch_modes, storage_id

KIB = 1024


def kib(number=1):
    return torch.zeros(number * 256)


def memory(limit=None, owned=tuple, data=tuple):
    made = CpuMemory(torch.device("cpu"), Memory(limit=limit))
    made.kept = KeptStorages(owned, data)
    return made


def test_a_storage_that_is_freed_is_no_longer_in_the_set():
    tensor = kib()
    key, storages = storage_id(tensor.untyped_storage()), WeakStorages([tensor.untyped_storage()])
    assert key in storages
    del tensor
    assert key not in storages
    assert list(storages) == []
    others = [kib() for _ in range(100)]  # one of them may have its address
    assert not any(storage_id(other.untyped_storage()) in storages for other in others)


def test_a_list_that_grows_counts_as_a_whole_in_every_step():
    run, bank = memory(), []
    for step in range(1, 6):
        with run.watch({}):
            bank.append(kib())
        assert run.used() == step * KIB
        assert run.watched_peak == step * KIB
    bank.clear()
    with run.watch({}):
        pass
    assert run.used() == 0


def test_a_ring_counts_what_is_in_it():
    run, ring, peaks = memory(), collections.deque(maxlen=3), []
    for _ in range(6):
        with run.watch({}):
            ring.append(kib())
        peaks.append(run.watched_peak // KIB)
    assert peaks == [1, 2, 3, 4, 4, 4]  # the new one, before the oldest goes


def test_what_is_kept_until_the_next_forward_meets_the_next():
    run, last = memory(), None
    for step in range(3):
        with run.watch({}):
            last = kib()
            assert run.watched_peak == (KIB if step == 0 else 2 * KIB)
        assert run.used() == KIB
    del last


def test_the_limit_holds_for_what_is_kept():
    run, bank = memory(limit=3 * KIB), []
    for _ in range(3):
        with run.watch({}):
            bank.append(kib())
    with pytest.raises(MemoryLimitExceeded, match=r"1\.0 KiB with 3\.0 KiB of 3\.0 KiB in use"), run.watch({}):
        kib()
    with outside_dispatch_modes():
        bank.append(kib())
    run.kept = KeptStorages(lambda: bank)
    with pytest.raises(MemoryLimitExceeded, match=r"the kept tried to allocate 4\.0 KiB"), run.watch({}):
        pass


def test_it_has_a_kind_of_its_own_unless_it_has_another():
    run, weight = memory(), kib(2)
    with run.watch({Category.PARAMETERS: [weight]}):
        kept = kib()
    with run.watch({Category.PARAMETERS: [weight]}):
        pass
    events, kinds = run.events([])
    assert {kinds[number]: size for number, size in events} == {Category.PARAMETERS: 2 * KIB, Category.KEPT: KIB}
    del kept


def test_what_unwatched_work_has_left_in_attributes_is_looked_up():
    bank, elsewhere = [], []
    run = memory(owned=lambda: bank)
    with run.watch({}):
        bank.append(kib())
    bank.append(kib(2))  # not watched
    elsewhere.append(kib(4))
    with run.watch({}):
        pass
    assert run.used() == 3 * KIB


def test_two_names_and_a_view_of_one_storage_count_once():
    table = kib(2)
    run = memory(owned=lambda: [table, table[:5], table])
    for _ in range(2):
        with run.watch({}):
            pass
        assert run.used() == 2 * KIB


def test_nothing_is_kept_alive_by_counting():
    run = memory()
    with run.watch({}):
        tensor = kib()
        alive = weakref.ref(tensor.untyped_storage())
    assert alive() is not None
    del tensor
    assert alive() is None
    assert list(run.kept.carried) == []


def test_what_a_failed_attempt_leaves_counts_no_longer_than_it_lives():
    run, bank = memory(limit=4 * KIB), []

    def attempt():
        with run.watch({}):
            bank.append(kib())
            cycle = [kib(2)]
            cycle.append(cycle)
            kib(2)

    with pytest.raises(MemoryLimitExceeded):
        attempt()
    gc.collect()  # as a rollback does
    with run.watch({}):
        pass
    assert run.used() == KIB  # what the model did not take back is there
    bank.clear()
    with run.watch({}):
        pass
    assert run.used() == 0


def test_a_limit_that_fails_at_the_start_of_a_block_forgets_nothing():
    run, bank = memory(limit=4 * KIB), []
    with run.watch({}):
        bank.append(kib())
    with pytest.raises(MemoryLimitExceeded, match="the parameters"), run.watch({Category.PARAMETERS: [kib(5)]}):
        pass
    with run.watch({}):
        pass
    assert run.used() == KIB


@pytest.mark.parametrize(("numbers", "carried"), [(1, 0), (15, 0), (16, 64)])
def test_scalars_are_not_carried(numbers, carried):
    run = memory()
    with run.watch({}):
        kept = torch.zeros(numbers)
    assert run.used() == kept.nbytes
    with run.watch({}):
        pass
    assert run.used() == carried


def test_a_nested_block_counts_it_once():
    run, bank = memory(), []
    for _ in range(2):
        with run.watch({}):
            with run.watch({}):
                bank.append(kib())
            kib()
    assert run.used() == 2 * KIB
    assert run.watched_peak == 3 * KIB


@pytest.mark.parametrize(("data_is_known", "expected"), [(True, 1), (False, 9)])
def test_views_of_a_data_set_do_not_count_as_a_whole(data_is_known, expected):
    """The second case is what was counted before: the comparison can fail."""
    table = kib(8).view(8, 256)
    run = memory(data=(lambda: [table]) if data_is_known else tuple)
    with run.watch({}):
        batch = torch.stack([table[3]])
    assert run.used() == expected * KIB
    batch = table[2:4]
    with run.watch({Category.BATCH: [batch]}):
        assert run.counter.live == (0 if data_is_known else 8 * KIB)
        del batch


def test_a_buffer_that_shares_memory_with_the_data_counts():
    table = kib(8)
    run = memory(data=lambda: [table])
    with run.watch({Category.BUFFERS: [table]}):
        assert run.counter.live == 8 * KIB


def test_what_fsdp_has_gathered_is_not_carried():
    """It is emptied by a resize, which nothing shows."""
    import torch.distributed.fsdp  # registers the operation

    with LiveTensors() as counter:
        gathered = [torch.empty(600)]
        torch.ops.fsdp.split_with_sizes_copy(torch.ones(1, 600), [600], dim=1, out=[gathered[0].view(1, -1)])
        other = kib()
    assert [storage.nbytes() for storage in counter.surviving()] == [other.nbytes]
