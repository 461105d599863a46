"""The largest micro-batch that fits, from as few traces as possible."""

from collections.abc import Callable

from trainapp.errors import UserError
from trainapp.memory.live_tensors import MemoryLimitExceeded

MOST_TRACES = 6
HALVED, NEAR = 10, 0.95  # traces in all where the size that fits is still less than this part of one that does not


def largest_that_fits(
    peak_of: Callable[[int], int], limit: int, top: int, smallest: int = 1, known: dict[int, int] | None = None
) -> int:
    """The largest size from `smallest` to `top` whose peak is at most `limit`; 0 if not even `smallest` fits, or 2
    where `peak_of` raises for a single sample.

    peak_of: bytes by size, costly to call; less the sizes in `known`, which is filled. The peak is piecewise affine in
    the size, in few pieces, so that secants find the bound within MOST_TRACES calls. Where it is rough and they do not,
    halving in turn comes near it, up to HALVED calls in all. Where these do not suffice, the largest size that is known
    to fit.
    """
    known = {} if known is None else known
    points: list[tuple[int, int]] = sorted(known.items())

    def fits(size: int) -> bool:
        if size not in known:
            known[size] = peak_of(size)
            points.append((size, known[size]))
        return known[size] <= limit

    if fits(top):
        return top
    if smallest >= top:
        return 0
    try:
        fits(smallest)
    except (UserError, MemoryError, MemoryLimitExceeded):
        raise
    except Exception:
        if smallest > 1 or top < 3:
            raise
        smallest = 2  # some models take no single sample
    if not fits(smallest):
        return 0
    # Sizes that are known already, such as one that the configuration names, narrow the bounds for nothing.
    low = max(size for size, peak in known.items() if peak <= limit and size < top)
    high = min(size for size, peak in known.items() if peak > limit and size > low)
    while high - low > 1 and (len(known) < MOST_TRACES or (low < NEAR * high and len(known) < HALVED)):
        guess = (low + high) // 2
        if len(known) <= MOST_TRACES or len(known) % 2 == 0:
            guess = min(max(_secant(points, limit, (low, known[low]), (high, known[high])), low + 1), high - 1)
        if fits(guess):
            low = guess
        else:
            high = guess
    return low


def _secant(points: list[tuple[int, int]], limit: int, low: tuple[int, int], high: tuple[int, int]) -> int:
    """Where the line through the last two points reaches the limit; through the bounds if that is not between them.

    The line through the bounds alone closes in from one side where the slope changes between them.
    """
    for (a, at_a), (b, at_b) in (points[-2:], (low, high)):
        if (at_b - at_a) * (b - a) > 0:
            guess = a + (limit - at_a) * (b - a) // (at_b - at_a)
            if low[0] <= guess <= high[0]:
                return guess
    return (low[0] + high[0]) // 2
