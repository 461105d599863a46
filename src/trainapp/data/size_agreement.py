"""What the ranks exchange about their micro-batches, so that every rank makes the same decision about sizes.

Collective: call each function on every rank. Free for a single rank.
"""

from trainapp.data.size_search import FailedAllocation
from trainapp.parallel.ranks import Ranks


def number_of_pieces(ranks: Ranks, pieces: int, unproven: bool) -> int:
    """The largest piece count of any rank. Enables votes if any rank's size is unproven and may run out of memory."""
    most, any_unproven = ranks.all_reduce_max(pieces, int(unproven))
    if any_unproven:
        ranks.enable_votes(True)
    return most


def largest_micro_batches(ranks: Ranks, largest: dict[int, int]) -> dict[int, int]:
    """`{bucket: samples}`, the largest over ranks, by ascending bucket."""
    return largest_of(ranks.all_gather_object(largest))


def failed_buckets(
    ranks: Ranks, largest: dict[int, int], bucket: int | None, failure: FailedAllocation | None
) -> tuple[dict[int, int], dict[int, FailedAllocation | None]]:
    """The largest micro-batches of the attempt over ranks, and the first rank's failure of each bucket that failed.

    bucket: the bucket that ran out of memory on this rank, or None.
    """
    by_rank = ranks.all_gather_object((largest, bucket, failure))
    failures: dict[int, FailedAllocation | None] = {}
    for _, failed_bucket, why in by_rank:
        if failed_bucket is not None and failures.get(failed_bucket) is None:
            failures[failed_bucket] = why
    return largest_of([samples for samples, _, _ in by_rank]), dict(sorted(failures.items()))


def largest_of(by_rank: list[dict[int, int]]) -> dict[int, int]:
    """The largest of each bucket over ranks, by ascending bucket."""
    buckets = sorted(set().union(*by_rank))
    return {bucket: max(samples.get(bucket, 0) for samples in by_rank) for bucket in buckets}
