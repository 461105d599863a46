"""Whether a run's steps need what its plan has promised: a plan traces the first steps only."""

from trainapp.data.forecast import Deviation
from trainapp.data.micro_batch_sizes import MicroBatchSizes
from trainapp.data.size_agreement import largest_of
from trainapp.parallel.ranks import Ranks


def deviation(sizes: MicroBatchSizes, ranks: Ranks, measured: int | None, is_typical: bool) -> Deviation | None:
    """How a clean step contradicts the plan that its sizes follow; None if it does not. The same on all ranks.

    measured: this rank's peak in bytes, None where it is not known: the highest counts. is_typical: whether the step
    does all that a planned one does; others may need less. Call before `succeeded`. Collective where `sizes.forecast`
    is set.
    """
    if sizes.forecast is None:
        return None
    bucket, forecast = sizes.forecast
    by_rank = ranks.all_gather_object((measured or 0, sizes.attempt_samples))
    peak, ran = max(of_rank for of_rank, _ in by_rank), largest_of([samples for _, samples in by_rank])
    if not ran:
        return None
    if bucket is None:
        bucket = min(ran)
        sizes.forecast = bucket, forecast
    if not peak or max(ran) != bucket:  # longer samples than the plan's may well need more
        return None
    found = forecast.deviation(sizes.search(bucket).size, ran[bucket], peak, is_typical)
    if found is not None:
        forecast.note(ran[bucket], peak)
    return found
