"""Which micro-batch sizes apply from which attempt on: those that a schedule asks for, and those that ran."""

from collections import Counter
from dataclasses import dataclass, field

ScheduledSizes = int | dict[int, int]  # one size for all shapes, or a size per bucket


@dataclass
class SizeSchedule:
    """The sizes of an update by attempt; a skipped step is also an attempt. What ran is recorded, so that it can be
    given as a schedule, which replays the run.
    """

    coming: dict[int, ScheduledSizes] = field(default_factory=dict)  # `batch.micro_schedule`, as far as not applied
    # By bucket, the sizes of the last step's micro-batches, equal on all ranks.
    in_force: dict[int, int] = field(default_factory=dict)
    recorded: dict[int, dict[int, int]] = field(default_factory=dict)  # `in_force` by attempt, where it changed

    def take_due(self, batch_number: int) -> ScheduledSizes | None:
        """Take all entries up to this attempt, as an update may not be in the step of the entry. Return the newest."""
        due = sorted(entry for entry in self.coming if entry <= batch_number)
        entries = [self.coming.pop(entry) for entry in due]
        if not entries:
            return None
        return entries[-1]

    def record(self, batch_number: int) -> bool:
        """Record the sizes of a finished attempt, once the ranks have exchanged them. Return whether they changed."""
        last_recorded = next(reversed(self.recorded.values()), None)
        if last_recorded == self.in_force:
            return False
        self.recorded[batch_number] = self.in_force
        return True

    def replay(self) -> dict[int, ScheduledSizes]:
        """Return the shortest schedule that replays what ran: one number if all shapes have the same size, and only
        changes.
        """
        schedule: dict[int, ScheduledSizes] = {}
        last: ScheduledSizes | None = None
        for batch_number, by_bucket in sorted(self.recorded.items()):
            # One number if all shapes have the same size.
            distinct_sizes = set(by_bucket.values())
            sizes: ScheduledSizes = dict(sorted(by_bucket.items()))
            if len(distinct_sizes) == 1:
                sizes = distinct_sizes.pop()

            if sizes != last:
                schedule[batch_number] = sizes
                last = sizes
        return schedule

    def usual_size(self, attempts: int, default: int) -> int:
        """Return the size of most steps; of a step with several shapes, the largest of its sizes.

        Args:
            attempts: all steps of the run, also skipped ones.
            default: the size if no step had this update.
        """
        if not self.recorded:
            return default

        # Sizes were recorded where they changed: each holds until the next record.
        steps_by_size: Counter[int] = Counter()
        starts = sorted(self.recorded)
        ends = [*starts[1:], attempts + 1]
        for start, end in zip(starts, ends, strict=True):
            size = max(self.recorded[start].values(), default=default)
            steps_by_size[size] += end - start
        ((usual_size, _),) = steps_by_size.most_common(1)
        return usual_size
