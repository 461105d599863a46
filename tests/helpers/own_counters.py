"""A counter that other modules count with, as `own_counters.CALLS += 1`."""

CALLS = 0
