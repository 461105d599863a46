"""Model-FLOPs utilisation (MFU): the fraction of the device's peak FLOP/s used by the model itself.

As in PaLM (Chowdhery et al. 2022, appendix B), recomputation in the backward does not count. The FLOPs per sample are
counted once per update, in the first logged step, by the formulas of torch's FlopCounterMode.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import flop_counter

from trainapp.torch_private import DispatchMode

# FLOP/s of dense bf16 or fp16 matmuls with fp32 accumulation, by words of the device name that torch reports, from the
# manufacturers' data sheets. The first match counts.
PEAKS = (
    ("B200", 2250e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100|H200|GH200|H800", 989.4e12),
    ("A100|A800", 312e12),
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
WITHOUT_TF32 = ("V100", "T4", "MI250X")
# Relative to bf16, by `precision.mode`; fp32 does not use tensor cores, and its ratio is not fixed.
RELATIVE_TO_BF16 = {"bf16": 1.0, "bf16_pure": 1.0, "fp16": 1.0, "tf32": 0.5, "int8": 2.0, "fp8": 2.0}


def peak_flops(device: torch.device, mode: str, setting: float | None) -> float | None:
    """Return the peak FLOP/s of one device; None if unknown.

    Args:
        device: the device.
        mode: as `precision.mode`.
        setting: `train.peak_flops`, which is returned if it is set; otherwise the table decides.
    """
    if setting is not None:
        return setting
    if device.type != "cuda" or mode not in RELATIVE_TO_BF16:
        return None
    name = torch.cuda.get_device_name(device)
    if mode == "tf32" and any(part in name for part in WITHOUT_TF32):
        return None
    for pattern, peak in PEAKS:
        if re.search(rf"\b({pattern})\b", name):
            return peak * RELATIVE_TO_BF16[mode]
    return None


class Utilisation(DispatchMode):
    """A counter of the model's FLOPs per sample, whose fraction of the devices' peak is the utilisation.

    Used in place of FlopCounterMode, whose hooks in all modules keep graphs alive and would change the memory of the
    counted step.

    Args:
        peak: FLOP/s of all ranks' devices together.
        in_backward: returns whether the running operation belongs to a backward.
        recomputes: whether backwards repeat forwards; their FLOPs are then taken as twice the forward's.

    Attributes:
        flops_per_sample: by update.
    """

    def __init__(self, peak: float, in_backward: Callable[[], bool], recomputes: bool):
        super().__init__()
        self.peak = peak
        self._in_backward = in_backward
        self._recomputes = recomputes
        self.flops_per_sample: dict[str, float] = {}

    @contextlib.contextmanager
    def counting(self, update: str, samples: int) -> Iterator[None]:
        """Count the block, forward and backward of a micro-batch, unless an earlier one of the update has completed."""
        if update in self.flops_per_sample:
            yield
            return
        self._forward_flops = 0
        self._backward_flops = 0
        with self:
            yield

        # Recomputation is no work of the model, but was counted with the backward.
        backward_flops = self._backward_flops
        if self._recomputes:
            backward_flops = 2 * self._forward_flops
        self.flops_per_sample[update] = (self._forward_flops + backward_flops) / samples

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # Matmuls, convolutions and attention have a formula; in torch 2.13 the CPU's attention has none.
        formula = flop_counter.flop_registry.get(func.overloadpacket)
        if formula:
            with contextlib.suppress(Exception):  # formulas make assertions that must not fail a run
                flops = int(formula(*args, **kwargs, out_val=result))
                if self._in_backward():
                    self._backward_flops += flops
                else:
                    self._forward_flops += flops
        return result
