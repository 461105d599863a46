"""A plan from a few steps that are run for real, for configurations that cannot be traced.

The peak of each phase is piecewise affine in the micro-batch, in few pieces: the line through the two sizes beside it,
or the two largest, gives that of any other. Later pieces are the steeper ones, so that between two sizes this is an
upper bound, and beyond the largest a lower one. Therefore one size is as near to what is asked for as time allows.
"""

import dataclasses
import functools
import time
from typing import Any

from trainapp.assembly.components import Components
from trainapp.config.schema import Config, Memory
from trainapp.errors import UserError
from trainapp.memory.host_guard import available_bytes, guarded
from trainapp.memory.host_memory import total_bytes
from trainapp.planning.recorder import Peak
from trainapp.planning.traced_run import Trace, trace

SIZES = (2, 4, 8)  # two give a line, the next one tells how far it can be trusted
MEMORY_SHARE = 0.25  # of the memory that is available: more is never used
MARGIN = 0.05  # of the limit, which sizes that are only estimated leave
PATIENCE = 20.0  # seconds after which no larger size is tried
LONGEST = 5.0  # seconds that the step with the last size may take


class RealSteps:
    """Measures steps and evaluations of small micro-batches, and continues their peaks to others.

    Raises what the model raises; MemoryLimitExceeded where not even two sizes fit into MEMORY_SHARE.
    """

    def __init__(self, config: Config, components: Components):
        self._config, self._components = config, components
        self.bytes = int(MEMORY_SHARE * available_bytes())
        self.deviation = 0.0  # largest relative difference between a size and the line through the two below
        self.measured: set[int] = set()
        self._lines = functools.cache(self._measure)

    def trace(self, size: int, eval_size: int, share: int) -> Trace:
        """As `traced_run.trace`, for `size` of the `share` samples of a step. size, eval_size: 0 leaves it out."""
        training = self._lines(True, 0 < size < share, share) if size else None
        evaluation = self._lines(False, False, share) if eval_size else None
        some = training or evaluation
        assert some, "neither training nor evaluation"
        first = next(iter(some.values()))
        return dataclasses.replace(
            first,
            training=None if training is None else _at(size, {s: t.training for s, t in training.items()}),
            evaluation=None if evaluation is None else _at(eval_size, {s: t.evaluation for s, t in evaluation.items()}),
        )

    def basis(self) -> dict[str, Any]:
        """What an estimate rests on, for plan.json."""
        return {
            "micro_sizes": sorted(self.measured),
            "deviation": round(self.deviation, 4),
            "memory_share": MEMORY_SHARE,
        }

    def note(self) -> str:
        """The same for people."""
        *others, last = sorted(self.measured) or [0]
        text = f"an estimate from steps run for real with micro-batches of {', '.join(map(str, others))} and {last}"
        if len(others) < 2:
            return text
        return f"{text}; the furthest is {100 * self.deviation:.1f}% off the line through the two below it"

    def _measure(self, trains: bool, accumulates: bool, share: int) -> dict[int, Trace]:
        """By size. accumulates: in a step of two micro-batches, the second of which finds gradients in memory."""
        found: dict[int, Trace] = {}
        started = begun = time.monotonic()
        sizes = list(SIZES)
        for size in sizes:
            if len(found) > 1 and time.monotonic() - started > PATIENCE:
                break
            begun = time.monotonic()
            try:
                found[size] = self._run(size, trains, accumulates)
            except UserError:
                raise
            except Exception:
                if len(found) < 2:
                    raise
                break  # two sizes suffice
            if size == SIZES[-1]:
                bearable = int(size * LONGEST / (time.monotonic() - begun))
                furthest = min(share // (1 + accumulates), bearable)
                sizes += [furthest] if furthest > size else []
        self.measured |= set(found)
        self._note_deviation({s: t.training or t.evaluation for s, t in found.items()})
        return found

    def _run(self, size: int, trains: bool, accumulates: bool) -> Trace:
        changed = small(self._config, size, 1 + accumulates)
        left = Memory(guard=True, guard_reserve=max(0, available_bytes() - self.bytes))
        with guarded(left, total_bytes()):
            sizes = (size, 0) if trains else (0, size)
            return trace(changed, self._components, *sizes, real_bytes=self.bytes)

    def _note_deviation(self, peaks: dict[int, Peak | None]) -> None:
        points = list(peaks.items())
        for number in range(2, len(points)):
            last, measured = points[number]
            expected = _at(last, dict(points[:number]))
            if measured is not None and expected is not None:
                self.deviation = max(self.deviation, abs(expected.total - measured.total) / measured.total)


def small(config: Config, size: int, micro_batches: int = 1) -> Config:
    """The configuration with so many samples per micro-batch, and so many micro-batches per step."""
    batch = dataclasses.replace(config.batch, global_size=micro_batches * size, micro_size=size, micro_schedule=None)
    parts = dataclasses.replace(config.accumulation, steps="auto")
    return dataclasses.replace(config, batch=batch, accumulation=parts)


def _at(size: int, peaks: dict[int, Peak | None]) -> Peak | None:
    """The peak at `size`, phase by phase: as measured, or on the line through the two sizes beside it or next to it."""
    points = [(known, peak) for known, peak in peaks.items() if peak is not None]
    if not points:
        return None
    if peaks.get(size) is not None:
        return peaks[size]
    if len(points) == 1:
        return points[0][1]
    above = next((number for number, (known, _) in enumerate(points) if known > size), len(points) - 1)
    (a, low), (b, high) = points[max(1, above) - 1], points[max(1, above)]

    def line(from_a: int, from_b: int) -> int:
        return max(0, from_b + round((size - b) * (from_b - from_a) / (b - a)))

    phases = {name: line(low.phases.get(name, value), value) for name, value in high.phases.items()}
    phase = max(phases, key=lambda name: phases[name])
    kinds: dict[str, int] = {}
    if low.phase == high.phase == phase:
        names = dict.fromkeys([*high.kinds, *low.kinds])
        kinds = {name: line(low.kinds.get(name, 0), high.kinds.get(name, 0)) for name in names}
    return Peak(phases[phase], phase, high.module if phase == high.phase else "", phases, kinds)
