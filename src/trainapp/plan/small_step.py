"""A small step, traced and then run for real: whether the trace of a model that others wrote can be trusted.

A model may notice that its tensors have no data and go another way, as Transformers' masks do; and a fake kernel may be
wrong where no test has looked. Neither shows in the trace itself. Both show in a step of two samples.
"""

import dataclasses
import logging
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from trainapp.config.schema import Config
from trainapp.memory.host_guard import available_bytes
from trainapp.memory.live_tensors import MemoryLimitExceeded
from trainapp.plan.bounds import reason_of
from trainapp.plan.real_steps import MEMORY_SHARE, small
from trainapp.plan.recorder import Peak
from trainapp.plan.traced_run import Trace, trace
from trainapp.train.components import Components

SIZE = 2  # samples
MOST_BYTES = 2**28  # that the step may need, according to its trace
MOST_WORK = 5 * 10**10  # floating-point operations of its forward and backward: some seconds
_LOOKS_FOR_FAKES = re.compile(rb"fake_?tensor", re.IGNORECASE)
log = logging.getLogger(__name__)


class StepFailed(Exception):
    """The small step fails when it is run for real. The message is the reason."""


def difference(config: Config, components: Components, size: int) -> str | None:
    """How a step of `size` samples and an evaluation differ from their trace: "" if not at all, None where they cannot
    be run or would take too long.

    Raises StepFailed for an error of the real step: fake kernels take dtypes for which there is no real one. Gradients
    are not clipped in it: whether they are depends on their values.
    """
    if config.precision.mode == "fp16":  # the loss scale may skip a real step, but never a traced one
        return None
    changed = small(config, size)
    changed = dataclasses.replace(changed, train=dataclasses.replace(changed.train, grad_clip=None))
    most = min(MOST_BYTES, int(MEMORY_SHARE * available_bytes()) // 2)
    try:
        expected = trace(changed, components, size, size, count_work=True)
        if expected.peak.total > most or _arithmetic(expected) > MOST_WORK:
            return None
    except Exception:  # the plan itself could be traced: whatever this is, it is no reason to withhold it
        log.debug("no small step could be traced", exc_info=True)
        return None
    try:
        real = trace(changed, components, size, size, real_bytes=2 * most)
    except MemoryLimitExceeded:
        return f"a step of {size} samples needs more than twice what its trace says"
    except Exception as error:
        log.debug("no small step could be run", exc_info=True)
        raise StepFailed(f"a step of {size} samples, run for real, fails: {reason_of(error)}") from error
    return _largest_difference(size, [(expected.training, real.training), (expected.evaluation, real.evaluation)])


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
        f"the model does not do the same without data: in {phase.replace('_', ' ')}, a step of {size} samples needs "
        f"{measured} bytes for real, {expected} traced"
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
