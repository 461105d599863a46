"""The blocks of CUDA's caching allocator, and the pools of those that nothing uses: see `allocator`."""

import bisect

MIB = 2**20


class Block:
    """A piece of a segment, in use or cached. `previous` and `next` are its neighbours in the segment.

    is_mapped: False for the part of an expandable segment that has no memory behind it.
    """

    __slots__ = ("address", "is_free", "is_mapped", "next", "previous", "size")

    def __init__(self, address: int, size: int, is_free: bool = False, is_mapped: bool = True):
        self.address, self.size, self.is_free, self.is_mapped = address, size, is_free, is_mapped
        self.previous: Block | None = None
        self.next: Block | None = None

    def insert_after(self, left: "Block") -> None:
        """Become the neighbour of `left`."""
        self.previous, self.next = left, left.next
        if left.next is not None:
            left.next.previous = self
        left.next = self


class Pool:
    """The cached blocks of one stream, of small or of large requests: by size, then by address.

    page: the bytes by which an expandable segment grows.
    """

    def __init__(self, page: int, is_small: bool):
        self.page, self.is_small = page, is_small
        self.cached: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []  # by address

    def add(self, block: Block) -> None:
        """Cache a block, or note an unmapped one."""
        block.is_free = True
        if block.is_mapped:
            bisect.insort(self.cached, (block.size, block.address, block))
        else:
            bisect.insort(self.unmapped, (block.address, block))

    def remove(self, block: Block) -> None:
        """The inverse of `add`."""
        if block.is_mapped:
            del self.cached[bisect.bisect_left(self.cached, (block.size, block.address))]
        else:
            del self.unmapped[bisect.bisect_left(self.unmapped, (block.address,))]

    def merge(self, block: Block) -> None:
        """Join a block with its neighbours, as far as they are free and of its kind."""
        for other in (block.previous, block.next):
            if other is None or not other.is_free or other.is_mapped != block.is_mapped:
                continue
            self.remove(other)
            if other is block.previous:
                block.address, block.previous = other.address, other.previous
                if block.previous is not None:
                    block.previous.next = block
            else:
                block.next = other.next
                if block.next is not None:
                    block.next.previous = block
            block.size += other.size

    def best_fit(self, size: int) -> Block | None:
        """The smallest cached block of at least `size`, the first one of these; it is taken out. None if there is none.

        A block that an expandable segment can extend counts with all it can become.
        """
        at = bisect.bisect_left(self.cached, (size,))
        if at == len(self.cached):
            return None
        while at + 1 < len(self.cached) and _extended(self.cached[at + 1][2]) < _extended(self.cached[at][2]):
            at += 1
        return self.cached.pop(at)[2]


def _extended(block: Block) -> int:
    return block.size + (block.next.size if block.next is not None and not block.next.is_mapped else 0)
