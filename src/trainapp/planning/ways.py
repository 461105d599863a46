"""The ways that a run may go, of which one trace takes one: no trace knows what values will say."""

from dataclasses import dataclass

from trainapp.planning.assumed_shapes import Share
from trainapp.planning.traced_part import Which


@dataclass(frozen=True)
class Way:
    """One of them.

    otherwise: reads of values are answered the other way, see `MadeUpValues`. which: where batches differ in shape, the
    one that all micro-batches have. share: how much is selected where shapes depend on values.
    """

    otherwise: bool = False
    which: Which = "longest"
    share: Share = Share.MOST


FIRST = Way()


def other_ways(reads: bool, shapes: bool) -> list[Way]:
    """Beside the first: reads answered otherwise, other elements selected, or both."""
    others = [Way(share=Share.FEWEST), Way(share=Share.LAST)] if shapes else []
    if reads:
        others += [Way(otherwise=True), *([Way(otherwise=True, share=Share.FEWEST)] if shapes else [])]
    return others
