"""How a fetched micro-batch is split to the size that fits, and what ranks exchange for it.

In a file of its own because most steps need none of it: what was fetched fits at once.
"""

from collections.abc import Sequence
from typing import NamedTuple

from trainapp.data.batch import split_indices
from trainapp.parallel.ranks import Ranks


class Splitter(NamedTuple):
    """The split of a fetched micro-batch: its samples, by number, of each smaller one."""

    samples: int
    size: int  # the largest number of samples of a smaller one
    fewest: int  # the smallest number, see `SizeSearch.smallest`

    def parts(self) -> list[Sequence[int]]:
        """Return the samples of each micro-batch."""
        if self.samples <= self.size:
            return [range(self.samples)]
        return split_indices(range(self.samples), self.size)

    def parts_on_all_ranks(self, ranks: Ranks, is_validated: bool) -> list[Sequence[int]]:
        """Return the samples of each micro-batch, split so that every rank has as many as the rank with the most.
        Collective.

        Args:
            ranks: those that run the same micro-batches together.
            is_validated: whether this rank's size is; if it is not on any rank, memory may run out.
        """
        parts = self.parts()
        most_parts, any_unvalidated = ranks.all_reduce_max(len(parts), int(not is_validated))
        if any_unvalidated:
            ranks.enable_votes(True)
        if most_parts == len(parts):
            return parts
        return split_indices(range(self.samples), self.size, most_parts, self.fewest)
