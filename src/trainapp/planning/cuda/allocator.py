"""A model of CUDA's caching allocator: which segments it asks the driver for, given allocations and frees.

The rules are those of c10/cuda/CUDACachingAllocator.cpp at pytorch's commit 001074d, older than torch 2.13; the
constants are in 2.13's c10/core/AllocatorConfig.h, too. With default settings the model gives the segments of public
records of real GPUs, one by one (test_allocator). `expandable_segments:True` follows the same source, but
no record has confirmed it yet. Left out: `max_split_size_mb`, `roundup_power2_divisions`,
`garbage_collection_threshold` and graph pools.
"""

import bisect
from collections.abc import Callable, Iterable, Mapping

from trainapp.planning.cuda.blocks import MIB, Block, Pool

BLOCK = 512  # bytes; every size is rounded up to a multiple of it
SMALL = MIB  # the largest request of the pool for small ones
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB  # for requests below OWN_SEGMENT
OWN_SEGMENT = 10 * MIB  # from here on, a segment of the request's size in whole multiples of 2 MiB
_ADDRESSES = 2**50  # of an expandable segment: 9/8 of the device's memory in torch, which it never exhausts


def rounded(size: int) -> int:
    """What a request of `size` > 0 bytes takes from its block."""
    return -(-size // BLOCK) * BLOCK


def segment_size(size: int) -> int:
    """What a rounded request asks the driver for, where no cached block serves it."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < OWN_SEGMENT else -(-size // SMALL_SEGMENT) * SMALL_SEGMENT


class OutOfMemory(Exception):
    """The limit refuses a segment, even after unused ones were returned."""


class CachingAllocator:
    """Replays allocations and frees.

    limit: the bytes that may be reserved; None for no limit. expandable: see the module. new_address: where the driver
    puts a segment of so many bytes; by default each above the one before.
    Attributes: `allocated` and `reserved`, bytes now, and their peaks; `segments`, the sizes asked of the driver, in
    order; `retries`, how often the cache was returned to make room.
    """

    def __init__(
        self, limit: int | None = None, expandable: bool = False, new_address: Callable[[int], int] | None = None
    ):
        self.limit, self.expandable = limit, expandable
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = self.retries = 0
        self.segments: list[int] = []
        self._new_address = new_address or self._above
        self._top = 0
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._used: dict[int, tuple[Block, Pool]] = {}

    def allocate(self, number: int, size: int, stream: int = 0) -> None:
        """Allocate `size` bytes under a number of the caller's. Does nothing for 0 bytes. Raises OutOfMemory."""
        if size <= 0:
            return
        size = rounded(size)
        pool = self._pool(size, stream)
        block = pool.best_fit(size) or (self._extend if self.expandable else self._new_segment)(pool, size)
        rest = block.size - size
        if rest >= BLOCK if pool.is_small or self.expandable else rest > SMALL:
            tail = Block(block.address + size, rest)
            tail.insert_after(block)
            block.size = size
            pool.add(tail)
        block.is_free = False
        self._used[number] = (block, pool)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, number: int) -> None:
        """Return an allocation to the cache. Ignores numbers that hold none, as those of 0 bytes."""
        block, pool = self._used.pop(number, (None, None))
        if block is None or pool is None:
            return
        self.allocated -= block.size
        pool.merge(block)
        pool.add(block)

    def address_of(self, number: int) -> int:
        """Where an allocation is."""
        return self._used[number][0].address

    def empty_cache(self) -> None:
        """Return to the driver what nothing uses: whole segments, or whole pages of expandable ones."""
        for pool in sorted(self._pools.values(), key=lambda pool: pool.is_small):
            for _, _, block in list(pool.cached):
                if self.expandable:
                    self._unmap(pool, block)
                elif block.previous is None and block.next is None:
                    pool.remove(block)
                    self.reserved -= block.size

    def adopt(self, segments: Iterable[tuple[int, int]], used: Iterable[tuple[int, int, int]]) -> None:
        """Begin with segments, as (address, size), and with allocations in them, as (number, address, size)."""
        blocks = sorted((address, size, number) for number, address, size in used)
        for start, length in sorted(segments):
            pool = self._pool(SMALL if length == SMALL_SEGMENT else LARGE_SEGMENT, 0)
            end, last = start, None
            first = bisect.bisect_left(blocks, (start,))
            inside = blocks[first : bisect.bisect_left(blocks, (start + length,))]
            for address, size, number in [*inside, (start + length, 0, None)]:
                if address > end:
                    last = _appended(Block(end, address - end), last)
                    pool.add(last)
                if number is not None:
                    last = _appended(Block(address, size), last)
                    self._used[number] = (last, pool)
                    self.allocated += size
                end = address + size
            self.reserved += length
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def _pool(self, size: int, stream: int) -> Pool:
        key = (stream, size <= SMALL)
        if key not in self._pools:
            self._pools[key] = Pool(page=SMALL_SEGMENT if key[1] else LARGE_SEGMENT, is_small=key[1])
        return self._pools[key]

    def _above(self, size: int) -> int:
        start = self._top
        self._top += size + SMALL_SEGMENT  # a gap: segments do not touch
        return start

    def _require_room(self, size: int) -> None:
        if self.limit is not None and self.reserved + size > self.limit:
            self.retries += 1
            self.empty_cache()
            if self.reserved + size > self.limit:
                raise OutOfMemory(f"{size} bytes with {self.reserved} of {self.limit} reserved")

    def _reserve(self, size: int) -> None:
        self.segments.append(size)
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _new_segment(self, pool: Pool, size: int) -> Block:
        length = segment_size(size)
        self._require_room(length)
        self._reserve(length)
        return Block(self._new_address(length), length)

    def _extend(self, pool: Pool, size: int) -> Block:
        """Map pages at the lowest place with enough addresses, after the free block before it, if there is one."""
        self._require_room(segment_size(size))
        for _, unmapped in pool.unmapped:
            before = unmapped.previous
            block = before if before is not None and before.is_free else unmapped
            if _free_addresses(block, size) >= size:
                break
        else:
            block = Block(self._new_address(_ADDRESSES), _ADDRESSES, is_mapped=False)
            pool.add(block)
        if not block.is_mapped:
            block = self._map(pool, block, min(block.size, size))
        while block.size < size:
            assert block.next is not None, "checked by _free_addresses"
            block = self._map(pool, block.next, min(size - block.size, block.next.size))
        pool.remove(block)
        return block

    def _map(self, pool: Pool, block: Block, size: int) -> Block:
        """Put memory behind the first pages of an unmapped block. The cached block that they are then part of."""
        length = min(-(-size // pool.page) * pool.page, block.size)
        pool.remove(block)
        if length < block.size:
            rest = Block(block.address + length, block.size - length, is_mapped=False)
            rest.insert_after(block)
            pool.add(rest)
            block.size = length
        block.is_mapped = True
        pool.merge(block)
        pool.add(block)
        self._reserve(length)
        return block

    def _unmap(self, pool: Pool, block: Block) -> None:
        """Take the memory from the whole pages in a cached block."""
        start = -(-block.address // pool.page) * pool.page
        end = (block.address + block.size) // pool.page * pool.page
        if end <= start:
            return
        pool.remove(block)
        tail = block.address + block.size - end
        middle = Block(start, end - start, is_mapped=False)
        if start > block.address:
            block.size = start - block.address
            middle.insert_after(block)
            pool.add(block)
        else:
            middle.previous, middle.next = block.previous, block.next
            if middle.previous is not None:
                middle.previous.next = middle
            if middle.next is not None:
                middle.next.previous = middle
        if tail:
            rest = Block(end, tail)
            rest.insert_after(middle)
            pool.add(rest)
        pool.merge(middle)
        pool.add(middle)
        self.reserved -= end - start


def _appended(block: Block, last: Block | None) -> Block:
    if last is not None:
        block.insert_after(last)
    return block


def _free_addresses(block: Block | None, enough: int) -> int:
    """The bytes of this block and the free ones after it, mapped or not, up to `enough`."""
    size = 0
    while size < enough and block is not None and block.is_free:
        size += block.size
        block = block.next
    return size


def replay(
    events: Iterable[tuple[int, int]], allocator: CachingAllocator, streams: Mapping[int, int] | None = None
) -> CachingAllocator:
    """Allocations as (number, bytes) and frees as (number, -bytes), in order. Raises OutOfMemory.

    streams: by number, of the allocations that are not on the default one.
    """
    streams = streams or {}
    for number, size in events:
        if size > 0:
            allocator.allocate(number, size, streams.get(number, 0))
        else:
            allocator.free(number)
    return allocator
