"""Model-FLOPs utilisation (MFU): the share of the device's arithmetic that the model itself asks for.

As in PaLM (Chowdhery et al. 2022, appendix B), what is recomputed in the backward does not count. The FLOPs of a sample
are counted once for each update of a step, in a real micro-batch, by the formulas of torch's FlopCounterMode. That
class itself is not used: its hooks in all modules keep graphs alive, which would change the memory of the step that it
counts in.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from trainapp.techniques.costs import flops_of
from trainapp.torch_private import DispatchMode

# FLOP/s of dense products in bf16 or fp16 with sums in fp32, by words of the name that torch reports; the makers' data
# sheets. First match counts.
PEAKS = (
    ("B200", 2250e12),
    ("H200", 989.4e12),
    ("GH200", 989.4e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989.4e12),
    ("H800", 989.4e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A6000", 154.8e12),
    ("A40", 149.7e12),
    ("A30", 165e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
    ("V100", 125e12),
    ("T4", 65e12),
    ("MI300X", 1307e12),
    ("MI250X", 191.5e12),  # torch sees each of its two dies as a device
)
# Relative to those; fp32 has no tensor cores, and its rate is no fixed share.
WITHOUT_TF32 = ("V100", "T4", "MI250X")
OF_MODE = {"bf16": 1.0, "bf16_pure": 1.0, "fp16": 1.0, "tf32": 0.5, "int8": 2.0, "fp8": 2.0}


def peak_of(device: torch.device, mode: str, given: float | None) -> float | None:
    """FLOP/s of one device at best: `given`, else from the table; None where neither says.

    mode: as `precision.mode`.
    """
    if given is not None or device.type != "cuda" or mode not in OF_MODE:
        return given
    name = torch.cuda.get_device_name(device)
    half = half_peak_of(name)
    if half is None or (mode == "tf32" and any(part in name for part in WITHOUT_TF32)):
        return None
    return half * OF_MODE[mode]


def half_peak_of(name: str) -> float | None:
    """That of the table for the name of a device; None for others."""
    return next((peak for part, peak in PEAKS if re.search(rf"\b{part}\b", name)), None)


class NoUtilisation:
    """Stands for a Utilisation where the device's peak is not known."""

    def counting(self, update: str, samples: int, real: bool) -> contextlib.AbstractContextManager[Any]:
        """Counts nothing."""
        return _NOTHING

    def scalars(self, samples_per_second: float, world: int) -> dict[str, float]:
        """None."""
        return {}


class Utilisation(NoUtilisation):
    """peak: FLOP/s of one device. in_backward: asked while operations run, whether they belong to a backward.

    recomputes: whether backwards repeat forwards, so that theirs is taken for twice the forward's.
    """

    def __init__(self, peak: float, in_backward: Callable[[], bool], recomputes: bool):
        self.peak, self._in_backward, self._recomputes = peak, in_backward, recomputes
        self.flops_per_sample: dict[str, float] = {}  # by update

    def counting(self, update: str, samples: int, real: bool) -> contextlib.AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch: counts in the update's first that comes to its end."""
        return self._count(update, samples) if real and update not in self.flops_per_sample else _NOTHING

    @contextlib.contextmanager
    def _count(self, update: str, samples: int) -> Iterator[None]:
        counter = _Counter(self._in_backward)
        with counter:
            yield
        backward = 2 * counter.forward if self._recomputes else counter.backward
        self.flops_per_sample[update] = (counter.forward + backward) / samples

    def scalars(self, samples_per_second: float, world: int) -> dict[str, float]:
        """`mfu`, from 0 to 1: where torch.compile hides the operations, none."""
        flops = sum(self.flops_per_sample.values())
        return {"mfu": flops * samples_per_second / (world * self.peak)} if flops else {}


_NOTHING = contextlib.nullcontext()


class _Counter(DispatchMode):
    def __init__(self, in_backward: Callable[[], bool]):
        super().__init__()
        self._in_backward = in_backward
        self.forward = self.backward = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        flops = flops_of(func, args, kwargs or {}, result)
        if flops and self._in_backward():
            self.backward += flops
        else:
            self.forward += flops
        return result
