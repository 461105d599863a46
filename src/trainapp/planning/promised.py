"""What a run may expect of its plan, in the words of its searches for sizes."""

from trainapp.data.batch import bucket_of
from trainapp.data.forecast import Forecast, Promise
from trainapp.planning.certainty import SLACK, SURE
from trainapp.planning.sizes import Facts


def forecast_of(facts: Facts, setting: str, bucket: int | None = None) -> tuple[int | None, Forecast]:
    """The forecast for batches of this shape, from what `Planner.search` says. Without a shape, for the plan's own,
    which comes with it; None where all are alike.

    setting: that asked the plan. For another shape than the plan's, the same number of elements fits, about, and
    nothing is promised.
    """
    elements: int = facts["elements"]  # per sample of the longest batch
    own = bucket_of(1, elements) if elements else bucket
    bucket = own if bucket is None else bucket
    is_own = own is None or bucket is None or own == bucket

    def as_many(size: int) -> int:
        return size if is_own or bucket is None else size * elements // bucket

    promise = Promise(
        setting=setting,
        certainty=facts["certainty"],
        most=facts["largest_peak_bytes"],
        slack=SLACK[facts["certainty"]],
        is_exact=facts["certainty"] in SURE,
    )
    is_longer = not is_own and own is not None and bucket is not None and bucket > own
    return bucket, Forecast(
        size=as_many(facts["largest_micro_size"]),
        peaks={max(1, as_many(size)): peak for size, peak in facts["peaks"].items()},
        # Of longer batches than any that the plan has seen, nothing is sure.
        least=facts["limit_bytes"] if is_longer else facts["least_bytes"],
        fixed=facts["static_bytes"],
        limit=facts["limit_bytes"],
        promise=promise if is_own else None,
    )
