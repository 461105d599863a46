"""Micro-batches, and how samples are cut into them."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple


class MicroBatch(NamedTuple):
    """A batch of `samples` samples.

    last: the last of its step. real: False for a dummy that keeps this rank in step with the others.
    piece: `piece(start, end)` is the batch of its samples [start, end) alone, on the device.
    """

    data: Any
    last: bool
    real: bool
    samples: int
    piece: Callable[[int, int], Any]


def cut(indices: Sequence[int], size: int) -> list[Sequence[int]]:
    """Micro-batches of `size` samples; see `ranges`."""
    return [indices[start:end] for start, end in ranges(0, len(indices), size)]


def ranges(start: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """[start, end) in ranges of `size`, of which the last holds the remainder. Computed one at a time.

    A remainder of one sample takes a second one from its neighbour: BatchNorm cannot normalise a single value.
    """
    while start < end:
        stop = min(end, start + size)
        if end - stop == 1 and size > 2:
            stop -= 1
        yield start, stop
        start = stop


def cut_evenly(indices: Sequence[int], parts: int) -> list[Sequence[int]]:
    """Up to `parts` micro-batches, whose sizes differ by at most one: 10 in 3 gives 4, 3, 3."""
    short, longer = divmod(len(indices), parts)
    ends = [short * part + min(part, longer) for part in range(parts + 1)]
    return [indices[a:b] for a, b in itertools.pairwise(ends) if a < b]


def pieces_of(micro: MicroBatch, ranges: Sequence[Sequence[int]]) -> Iterator[MicroBatch]:
    """The micro-batches that hold these ranges of a larger one's samples.

    An empty range gives a dummy sample (`real=False`) for a forward and backward that other ranks wait for.
    """
    for number, piece in enumerate(ranges, start=1):
        start, end = (piece[0], piece[-1] + 1) if piece else (0, 1)
        is_last, is_real = micro.last and number == len(ranges), micro.real and len(piece) > 0
        yield MicroBatch(micro.piece(start, end), is_last, is_real, end - start, _shifted(micro.piece, start))


def _shifted(piece: Callable[[int, int], Any], by: int) -> Callable[[int, int], Any]:
    return lambda start, end: piece(by + start, by + end)
