"""What each call of a block keeps, such that all calls together stay within a budget and recompute the least.

Every call has several options: recompute everything, keep the results that are dearest to recompute per byte (the
more, the more bytes), or save what backward needs and recompute nothing. This is a knapsack of which each call takes
one item. Steps along the convex hull of each call's options, steepest first, come within one step of the optimum
(Sinha and Zoltners 1979, "The multiple-choice knapsack problem"); what is left then goes to single calls.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from trainapp.techniques.block_trace import BlockCall, OperatorCall
from trainapp.techniques.costs import SELECTION


class Option(NamedTuple):
    """What a call keeps. size: bytes between forward and backward; cost: of what is recomputed.

    kept: sizes by operation; None: everything that backward needs is saved, and nothing recomputed.
    """

    size: int
    cost: float
    kept: dict[OperatorCall, int] | None


def options_of(call: BlockCall) -> list[Option]:
    """All options of a call, by rising size, each cheaper than those before it."""
    every = [Option(call.inputs, call.cost, {}), Option(call.saved, 0.0, None)]
    selecting = (call.operations + call.repeated) * SELECTION
    size, cost, kept = call.inputs, call.cost + selecting, dict[OperatorCall, int]()
    by_density = sorted(call.keepable.items(), key=lambda item: (-item[1][1] / item[1][0], item[1][0]))
    for operation, (own, saved) in by_density:
        size, cost, kept = size + own, cost - saved, kept | {operation: own}
        every.append(Option(size, cost, kept))
    every.sort(key=lambda option: (option.size, option.cost))
    best: list[Option] = []
    for option in every:
        if not best or option.cost < best[-1].cost:
            best.append(option)
    return best


def least(calls: Sequence[BlockCall]) -> int:
    """The fewest bytes that the calls can keep."""
    return sum(options_of(call)[0].size for call in calls)


def choose(calls: Sequence[BlockCall], budget: int) -> list[Option]:
    """An option per call, whose sizes sum up to at most `budget`, or to `least(calls)` where that is more.

    Of equal steps, those of later calls come first: backward frees what they keep before it recomputes earlier ones.
    """
    options = [options_of(call) for call in calls]
    hulls = [_hull(own) for own in options]
    chosen = [own[0] for own in options]
    used = sum(option.size for option in chosen)
    steps: list[tuple[float, int, int]] = []  # the cost per byte, negative; the call, negative; the place in its hull

    def offer(index: int, place: int) -> None:
        if place < len(hulls[index]):
            a, b = hulls[index][place - 1 : place + 1]
            heapq.heappush(steps, ((b.cost - a.cost) / (b.size - a.size), -index, place))

    for index in range(len(calls)):
        offer(index, 1)
    while steps:
        _, negative, place = heapq.heappop(steps)
        index = -negative
        more = hulls[index][place].size - chosen[index].size
        if used + more <= budget:
            chosen[index], used = hulls[index][place], used + more
            offer(index, place + 1)
    for index in reversed(range(len(calls))):
        fitting = [own for own in options[index] if used - chosen[index].size + own.size <= budget]
        if fitting and fitting[-1].cost < chosen[index].cost:
            chosen[index], used = fitting[-1], used - chosen[index].size + fitting[-1].size
    return chosen


def _hull(options: list[Option]) -> list[Option]:
    """The lower convex hull of costs over sizes."""
    hull: list[Option] = []
    for option in options:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _slope(a: Option, b: Option) -> float:
    return (b.cost - a.cost) / (b.size - a.size)
