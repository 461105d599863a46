"""A small step, traced and then run for real: whether the trace of a model that others wrote can be trusted.

A model may notice that its tensors have no data and go another way, as Transformers' masks do; and a fake kernel may be
wrong where no test has looked. Neither shows in the trace itself. Both show in a step of two samples.
"""

import contextlib
import dataclasses
import logging
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from trainapp.assembly.components import Components, load_components
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.memory.host_guard import available_bytes
from trainapp.memory.live_tensors import MemoryLimitExceeded
from trainapp.planning import process
from trainapp.planning.bounds import reason_of, ways_beside
from trainapp.planning.real_steps import MEMORY_SHARE, small
from trainapp.planning.recorder import Peak
from trainapp.planning.traced_run import Trace, trace
from trainapp.units import bytes_text

SIZE = 2  # samples
MOST_BYTES = 2**28  # that the step may need, according to its trace
MOST_WORK = 5 * 10**10  # floating-point operations of its forward and backward: some seconds
PATIENCE = 60.0  # seconds for a process of its own
_KEPT = (
    "no real step was compared with the trace: the model finds what it has kept from the trace outside of its "
    "attributes, as in a cache of its module"
)
_LOOKS_FOR_FAKES = re.compile(rb"fake_?tensor", re.IGNORECASE)
log = logging.getLogger(__name__)


class StepFailed(Exception):
    """The small step fails when it is run for real. The message is the reason."""


class Compared(NamedTuple):
    """reason: how the real step contradicts the trace, "" if it does not. real: its bytes, 0 for too many. meets_trace:
    the model has found tensors that the trace had left, as in a cache of its module.
    """

    reason: str
    real: int
    meets_trace: bool


class Peaks(NamedTuple):
    """Of a step and an evaluation."""

    training: Peak | None
    evaluation: Peak | None

    @property
    def total(self) -> int:
        """Bytes of the higher one."""
        return max(peak.total for peak in (*self, Peak()) if peak is not None)


def difference(config: Config, components: Components, size: int) -> Compared | None:
    """How a step of `size` samples and an evaluation differ from their trace; None where they cannot be run or would
    take too long.

    Raises StepFailed for an error of the real step: fake kernels take dtypes for which there is no real one. Gradients
    are not clipped in it: whether they are depends on their values.
    """
    small_one = _Small.of(config, components, size)
    if small_one is None:
        return None
    # A process of its own would be no better: there the model would compute again what it has kept from the trace.
    expected, real = small_one.traced, small_one.real(may_be_elsewhere=False)
    if real is None:
        return Compared(f"a step of {size} samples needs more than twice what its trace says", 0, False)
    reason = _largest_difference(size, [(expected.training, real.training), (expected.evaluation, real.evaluation)])
    return Compared(reason, real.total, False)


def beyond_ways(config: Config, components: Components, size: int) -> Compared | None:
    """How a step of `size` samples and an evaluation need more than each of the ways in which reads of values are
    answered; None as for `difference`. A number that is read, such as a length, has more ways than two.

    Raises StepFailed.
    """
    small_one = _Small.of(config, components, size)
    if small_one is None:
        return None
    high, real = small_one.highest(), small_one.real()
    if real is not None and real.total <= high:
        return Compared("", real.total, small_one.meets_trace)
    needed = "more than twice that" if real is None else bytes_text(real.total)
    reason = (
        f"what the model computes depends on numbers that it reads: a step of {size} samples needs {needed}, and what "
        f"can be traced of it {bytes_text(high)}"
    )
    return Compared(reason, 0 if real is None else real.total, small_one.meets_trace)


def real_peaks(config: Config, size: int, most: int, components: Components | None = None) -> Peaks | None:
    """Of a step of `size` samples and an evaluation, run for real; None where they need more than `most` bytes."""
    try:
        done = trace(config, components or load_components(config), size, size, real_bytes=most)
    except MemoryLimitExceeded:
        return None
    return Peaks(done.training, done.evaluation)


@dataclass
class _Small:
    """A step of few samples and an evaluation. most: bytes that they may need for real. meets_trace: see `Compared`."""

    config: Config
    components: Components
    size: int
    traced: Trace
    most: int
    meets_trace: bool = False

    @classmethod
    def of(cls, config: Config, components: Components, size: int) -> "_Small | None":
        """Without clipping; None where it would not be small, or where nothing could be compared."""
        if config.precision.mode == "fp16":  # the loss scale may skip a real step, but never a traced one
            return None
        changed = small(config, size)
        changed = dataclasses.replace(changed, train=dataclasses.replace(changed.train, grad_clip=None))
        most = min(MOST_BYTES, int(MEMORY_SHARE * available_bytes()) // 2)
        try:
            traced = trace(changed, components, size, size, count_work=True)
        except Exception:  # the plan itself could be traced: whatever this is, it is no reason to withhold it
            log.debug("no small step could be traced", exc_info=True)
            return None
        is_small = traced.peak.total <= most and _arithmetic(traced) <= MOST_WORK
        return cls(changed, components, size, traced, 2 * most) if is_small else None

    def real(self, may_be_elsewhere: bool = True) -> Peaks | None:
        """Run for real; None where that needs more than `most`. Where the model meets tensors of the trace, in a
        process of its own. Raises StepFailed.
        """
        try:
            return real_peaks(self.config, self.size, self.most, self.components)
        except Exception as error:
            log.debug("no small step could be run", exc_info=True)
            if not _meets_trace(error):
                raise StepFailed(self._failure(reason_of(error))) from error
            if not may_be_elsewhere:
                raise StepFailed(_KEPT) from error
        self.meets_trace = True
        function = f"{__name__}.{real_peaks.__name__}"
        try:
            peaks: Peaks | None = process.answer_of(function, self.config, self.size, self.most, patience=PATIENCE)
        except (process.NoAnswer, UserError) as error:
            raise StepFailed(self._failure(str(error))) from error
        return peaks

    def _failure(self, reason: str) -> str:
        return f"a step of {self.size} samples, run for real, fails: {reason}"

    def highest(self) -> int:
        """Bytes of the way that needs the most."""
        totals = [self.traced.peak.total]
        for way in ways_beside([self.traced], None, is_low_asked=False):
            with contextlib.suppress(Exception):  # a plan notes it
                totals.append(trace(self.config, self.components, self.size, self.size, way).peak.total)
        return max(totals)


def _meets_trace(error: Exception) -> bool:
    """Whether it is about tensors without data, which only a trace can have left."""
    return type(error).__module__.startswith("torch._subclasses") or "FakeTensor" in str(error)


def look_for_fakes(packages: Collection[str]) -> list[str]:
    """Those of the packages whose loaded modules mention tensors without data in their source."""
    return sorted({package for package, path in _sources(packages) if _LOOKS_FOR_FAKES.search(_content(path))})


def _largest_difference(size: int, pairs: Iterable[tuple[Peak | None, Peak | None]]) -> str:
    """The phase that is furthest off, in words; "" if all phases are equal."""
    found = [
        (abs(real.phases.get(phase, 0) - expected), phase, expected, real.phases.get(phase, 0))
        for traced, real in pairs
        if traced is not None and real is not None
        for phase, expected in traced.phases.items()
    ]
    off, phase, expected, measured = max(found, key=lambda one: one[0])
    if not off:
        return ""
    return (
        f"the model does something else on tensors without data: in {phase.replace('_', ' ')}, a step of {size} "
        f"samples needs {measured} bytes for real, {expected} traced"
    )


def _arithmetic(traced: Trace) -> int:
    assert traced.work is not None, "traced without counting its operations"
    return sum(operation.work * count for operation, count in traced.work.per_micro_batch.items())


def _sources(packages: Collection[str]) -> Iterator[tuple[str, Path]]:
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__dict__", {}).get("__file__")
        if name.partition(".")[0] in packages and isinstance(path, str) and path.endswith(".py"):
            yield name.partition(".")[0], Path(path)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # as in a zip archive
        return b""
