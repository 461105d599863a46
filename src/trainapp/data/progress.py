"""How far a run is."""

from dataclasses import dataclass


@dataclass
class Progress:
    """How far the run is. `consumed` counts samples trained in this epoch; with the seed it is the sampler's state."""

    step: int = 0  # applied optimizer steps
    epoch: int = 0
    consumed: int = 0
    samples: int = 0  # trained in all epochs
    skipped: int = 0  # steps given up for a non-finite gradient
    evaluated_at: int = 0  # the step of the last evaluation, so that a restart does not repeat it
    objective: float | None = None  # of the last evaluation
    best: float | None = None
    best_step: int | None = None
