"""Why an attempt failed with its micro-batch size, and the size that a shape of data gets instead."""

from collections import defaultdict
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from trainapp.sizes.search import FailedAllocation, SizeSearch


class ErrorKind(Enum):
    """An error that another micro-batch size, or another technique, may avoid."""

    OUT_OF_MEMORY = "memory ran out"
    TOO_FEW_SAMPLES = "the model cannot run so few samples"
    SIZE_REJECTED = "the model fails with a size that is larger than the validated one"
    TOO_LARGE_FOR_KERNEL = "a kernel cannot index so many elements, or start so many blocks"
    TECHNIQUE_REFUSED = "the model cannot be trained with a technique that was turned on"
    NO_ENGINE = "cuDNN has no deterministic algorithm for a convolution"


class AttemptFailure(NamedTuple):
    """Why a rank left the current attempt."""

    kind: ErrorKind = ErrorKind.OUT_OF_MEMORY
    samples: int = 0  # of the micro-batch that failed
    allocation: FailedAllocation | None = None  # if memory ran out and the allocation is known


OUT_OF_MEMORY = AttemptFailure()


class SizeChange(NamedTuple):
    """The answer to a failed attempt, in samples."""

    old: int  # the largest micro-batch of the attempt; the size by which data was fetched, if nothing ran
    new: int  # the size to run next
    fewest_samples: int = 0  # of every micro-batch from now on, if the attempt failed for too few; otherwise 0


def change_size(search: SizeSearch, failures: Sequence[AttemptFailure], largest: int) -> SizeChange | None:
    """Choose the next size of a shape with which an attempt has failed.

    Args:
        search: of the shape.
        failures: of the ranks whose micro-batch had this shape; none if memory ran out elsewhere.
        largest: samples of the largest micro-batch of this shape that ran on any rank; `search.size` if none did.

    Returns:
        The change, or None if no other size can help.
    """
    failures_by_kind = defaultdict[ErrorKind, list[AttemptFailure]](list)
    for failure in failures or [OUT_OF_MEMORY]:
        failures_by_kind[failure.kind].append(failure)

    # The model's own errors: too few samples ask for a larger size, a rejected one for the validated size.
    fewest_samples = 0
    if failures_by_kind[ErrorKind.TOO_FEW_SAMPLES]:
        unsupported = max(failure.samples for failure in failures_by_kind[ErrorKind.TOO_FEW_SAMPLES])
        search.require_more_than(unsupported)
        fewest_samples = search.smallest
    elif failures_by_kind[ErrorKind.SIZE_REJECTED]:
        search.reject_size()

    # Memory ran out on some rank, or a kernel was asked for too much: a smaller size than the largest that ran.
    too_large = [*failures_by_kind[ErrorKind.OUT_OF_MEMORY], *failures_by_kind[ErrorKind.TOO_LARGE_FOR_KERNEL]]
    if too_large:
        can_fit = search.record_failure(largest, too_large[0].allocation)
        if not can_fit:
            return None
    return SizeChange(largest, search.size, fewest_samples)
