"""The allocator's model against records of real GPUs (see data/README.md), and against its source, by hand."""

import hashlib
import itertools
import json
import lzma
import random
from pathlib import Path

import pytest

from trainapp.planning.cuda import allocator
from trainapp.planning.cuda.allocator import CachingAllocator, OutOfMemory, replay
from trainapp.planning.cuda.blocks import MIB

DATA = Path(__file__).parent / "data"
RECORDS = json.loads(lzma.decompress((DATA / "allocator_records.json.xz").read_bytes()))
ASKING = [name for name, record in RECORDS.items() if len(record["new_segments"]) > 1]
# The records of these two begin with cached blocks whose neighbours' true sizes are not known.
UNSURE = ("medium_512_training_memory_snapshot", "medium_1024_training_memory_snapshot")


def replayed(record):
    """The model after a record's events; the addresses that it chose; the sizes that it asked for, in order."""
    places = iter(record["new_segments"])

    def where(size):
        address, recorded = next(places)
        assert size == recorded
        return 512 * address

    model = CachingAllocator(new_address=where)
    blocks = record["initial_blocks"]
    used = [(number - len(blocks), 512 * address, size) for number, (address, size) in enumerate(blocks)]
    model.adopt([(512 * address, size) for address, size in record["initial_segments"]], used)
    order, addresses = list(range(-len(blocks), 0)), []
    for event in record["events"]:
        if event > 0:
            order.append(len(order))
            model.allocate(order[-1], event)
            addresses.append(model.address_of(order[-1]) // 512)
        elif event < 0:
            model.free(order[event])
        else:
            model.empty_cache()
    return model, addresses


def digest(addresses):
    return hashlib.sha256(json.dumps(addresses).encode()).hexdigest()


def test_the_records_ask_for_segments():
    assert len(RECORDS) == 19
    assert len(ASKING) == 11
    assert sum(len(RECORDS[name]["new_segments"]) for name in ASKING) == 6008


@pytest.mark.parametrize("name", RECORDS)
def test_the_model_asks_for_the_segments_of_a_real_gpu(name):
    record = RECORDS[name]
    model, addresses = replayed(record)
    assert model.segments == [size for _, size in record["new_segments"]]
    assert model.peak_reserved == record["peak_reserved"]
    assert model.reserved == record["final_reserved"]
    if not name.endswith(UNSURE):
        assert digest(addresses) == record["addresses"]


@pytest.mark.parametrize(("rule", "value"), [("SMALL", 4 * MIB), ("OWN_SEGMENT", 8 * MIB), ("BLOCK", 2**16)])
def test_another_rule_gives_other_segments(monkeypatch, rule, value):
    """The comparison above can fail."""
    monkeypatch.setattr(allocator, rule, value)
    record = RECORDS["kkaitlyn111/memory_files/memory_ctx128_fullstep"]
    try:
        _, addresses = replayed(record)
    except (AssertionError, StopIteration):  # another size than the record's, or one more
        return
    assert digest(addresses) != record["addresses"]


@pytest.mark.parametrize(
    ("size", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 1, 10 * MIB, 10 * MIB),  # rounded first
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (11 * MIB, 11 * MIB, 12 * MIB),
    ],
)
def test_sizes(size, block, segment):
    model = replay([(1, size)], CachingAllocator())
    # What is left of a large segment is a block of its own if it has more than 1 MiB.
    assert model.allocated == (segment if block > MIB and segment - block <= MIB else block)
    assert model.segments == [segment]


def test_nothing_is_allocated_for_nothing():
    model = replay([(1, 0), (1, 0)], CachingAllocator())
    assert (model.allocated, model.segments) == (0, [])


def test_a_block_is_reused_split_and_merged():
    model = CachingAllocator()
    for number in range(4):
        model.allocate(number, 5 * MIB)  # fill a segment of 20 MiB
    model.allocate(4, 5 * MIB)
    assert model.segments == [20 * MIB, 20 * MIB]
    for number in (0, 1):
        model.free(number)
    model.allocate(5, 10 * MIB)  # fits only if the two were merged
    assert model.address_of(5) == 0
    assert model.segments == [20 * MIB, 20 * MIB]


def test_the_smallest_block_that_fits_is_taken_and_of_these_the_first():
    model = CachingAllocator()
    for number, size in enumerate((30, 12, 12, 24)):
        model.allocate(number, size * MIB)
    places = [model.address_of(number) for number in range(4)]
    for number in range(4):
        model.free(number)
    model.allocate(4, 12 * MIB)
    model.allocate(5, 12 * MIB)
    model.allocate(6, 12 * MIB)
    assert [model.address_of(number) for number in (4, 5, 6)] == [places[1], places[2], places[3]]


def test_small_and_large_requests_and_streams_share_nothing():
    model = CachingAllocator()
    model.allocate(1, 512)
    model.allocate(2, 2 * MIB)
    model.allocate(3, 512, stream=1)
    assert model.segments == [2 * MIB, 20 * MIB, 2 * MIB]


def test_what_is_whole_returns_to_the_driver_and_what_is_split_stays():
    model = CachingAllocator()
    model.allocate(1, 40 * MIB)
    model.allocate(2, 3 * MIB)
    model.allocate(3, 3 * MIB)
    model.free(1)
    model.free(2)
    model.empty_cache()
    assert (model.allocated, model.reserved, model.peak_reserved) == (3 * MIB, 20 * MIB, 60 * MIB)


@pytest.mark.parametrize("expandable", [False, True])
def test_a_limit_empties_the_cache_before_it_refuses(expandable):
    model = CachingAllocator(limit=60 * MIB, expandable=expandable)
    model.allocate(1, 40 * MIB)
    model.free(1)
    model.allocate(2, 50 * MIB)
    assert model.retries == 1
    with pytest.raises(OutOfMemory):
        model.allocate(3, 20 * MIB)
    assert model.allocated == 50 * MIB


def test_expandable_segments_grow_in_pages_and_leave_no_gaps():
    model = CachingAllocator(expandable=True)
    model.allocate(1, 12 * MIB)
    model.allocate(2, 12 * MIB)  # 8 MiB of the first page, and one page more
    model.allocate(3, 512)
    assert model.segments == [20 * MIB, 20 * MIB, 2 * MIB]
    assert model.address_of(2) == model.address_of(1) + 12 * MIB
    model.free(1)
    model.free(2)
    model.allocate(4, 40 * MIB)  # without them, a segment of its own
    assert model.reserved == 42 * MIB


def test_expandable_segments_return_whole_pages_and_map_them_again():
    model = CachingAllocator(expandable=True)
    for number in range(3):
        model.allocate(number, 20 * MIB)
    model.free(0)
    model.free(1)
    model.empty_cache()
    assert model.reserved == 20 * MIB
    model.allocate(3, 30 * MIB)  # at the lowest place, where 40 MiB of addresses are free
    assert model.address_of(3) == model.address_of(2) - 40 * MIB
    assert model.reserved == 60 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_no_two_allocations_overlap_and_nothing_is_lost(expandable):
    draw, model, live = random.Random(0), CachingAllocator(expandable=expandable), {}
    for number in range(4000):
        if live and draw.random() < 0.5:
            gone = draw.choice(list(live))
            del live[gone]
            model.free(gone)
        else:
            size = int(2 ** draw.uniform(4, 26))
            model.allocate(number, size)
            live[number] = allocator.rounded(size)
        if number % 500 == 499:
            model.empty_cache()
    spans = sorted((model.address_of(number), size) for number, size in live.items())
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
    assert sum(live.values()) <= model.allocated <= model.reserved <= model.peak_reserved
    for number in live:
        model.free(number)
    model.empty_cache()
    assert (model.allocated, model.reserved) == (0, 0)
