"""Turns a precision mode into autocast, a loss scaler and dtypes.

| mode      | weights  | matrix products            | loss scale |
|-----------|----------|----------------------------|------------|
| fp32      | fp32     | fp32                       | none       |
| tf32      | fp32     | TF32 on NVIDIA, else fp32  | none       |
| bf16      | fp32     | bfloat16 (autocast)        | none       |
| bf16_pure | bfloat16 | bfloat16 (autocast)        | none       |
| fp16      | fp32     | float16 (autocast)         | dynamic    |
| int8      | fp32     | as bf16; in blocks: int8   | none       |
| fp8       | fp32     | as bf16; in blocks: fp8    | none       |

Autocast stays on in bf16_pure for what a model or a loss mixes: fp32 inputs, buffers and losses.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.config import schema
from trainapp.errors import UserError
from trainapp.optim import quantized_products
from trainapp.torch_private import forget_unscaling, found_inf, step_optimizer

_AUTOCAST = {
    "bf16": torch.bfloat16,
    "bf16_pure": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.bfloat16,
    "fp8": torch.bfloat16,
}


@dataclass
class Precision:
    """`autocast` wraps forward and loss; `scaler` is disabled (every method passes through) unless the mode is fp16."""

    mode: str
    compute_dtype: torch.dtype
    autocast: contextlib.AbstractContextManager[Any]
    scaler: torch.amp.GradScaler

    @property
    def is_pure(self) -> bool:
        """Whether parameters, and with them gradients, are in `compute_dtype`, too."""
        return self.mode == "bf16_pure"

    @property
    def norm_dtype(self) -> torch.dtype | None:
        """In which the squares of gradients are added up; None: their own."""
        return torch.float32 if self.is_pure else None

    def cast_parameters(self, model: nn.Module) -> None:
        """Give the parameters their dtype, in place; tied ones stay tied. Buffers keep theirs."""
        if self.is_pure:
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(self.compute_dtype)

    def with_own_scaler(self, device: torch.device) -> "Precision":
        """The same with a loss scale of its own, at its initial value: for another optimizer."""
        if not self.scaler.is_enabled():
            return self
        scale, interval = self.scaler.get_scale(), self.scaler.get_growth_interval()
        scaler = torch.amp.GradScaler(device.type, init_scale=scale, growth_interval=interval)
        return dataclasses.replace(self, scaler=scaler)

    def unscale(self, optimizer: torch.optim.Optimizer, all_reduce_found_inf: Callable[[list[Tensor]], None]) -> None:
        """Divide the gradients by the loss scale. The reduction makes an overflow on one rank an overflow on all."""
        if self.scaler.is_enabled():
            self.scaler.unscale_(optimizer)
            all_reduce_found_inf(found_inf(self.scaler, optimizer))

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step the optimizer and adjust the loss scale. False when the gradients overflowed: then there is no step.
        Call `unscale` before.

        Waits for the device once, in fp16 only: the next step depends on whether this one counts. `scaler.step` reads
        the same flag where the optimizer is not fused, and comparing the scale before and after would wait twice.
        """
        if not self.scaler.is_enabled():
            step_optimizer(optimizer)
            return True
        # Compared on the device, so that a trace, which reads False everywhere, takes the step.
        overflowed = any((flag > 0).item() for flag in found_inf(self.scaler, optimizer))
        if not overflowed:
            step_optimizer(optimizer)
        self.scaler.update()
        return not overflowed

    def reset_scaler(self) -> None:
        """Abandon a step after unscaling and before stepping. The loss scale is unchanged."""
        if self.scaler.is_enabled():
            forget_unscaling(self.scaler)


class _AutocastOnCpu(torch.autocast):
    """Without the fast path of nn.TransformerEncoder, which torch itself leaves out under autocast on CUDA only.

    It is one operation that calls others inside. Under a dispatch mode, such as the counter of live tensors, autocast
    does not reach those: an evaluation whose memory is counted would have another result.
    """

    def __enter__(self) -> Any:
        self._had_fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        torch.backends.mha.set_fastpath_enabled(self._had_fast_path)
        return super().__exit__(*error)


def build(settings: schema.Precision, device: torch.device) -> Precision:
    """Also sets torch's global switches for TF32. Raises UserError where the device cannot compute in this mode."""
    torch.set_float32_matmul_precision("high" if settings.mode == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = settings.mode == "tf32"
    dtype = _AUTOCAST.get(settings.mode)
    autocast = _AutocastOnCpu if device.type == "cpu" else torch.autocast
    if dtype is not None:
        _probe(settings.mode, dtype, device)
    if settings.mode in ("int8", "fp8"):
        quantized_products.require_kernels(settings.mode, device)
    return Precision(
        mode=settings.mode,
        compute_dtype=dtype or torch.float32,
        autocast=autocast(device.type, dtype=dtype) if dtype else contextlib.nullcontext(),
        scaler=torch.amp.GradScaler(
            device.type,
            enabled=settings.mode == "fp16",
            init_scale=settings.initial_scale,
            growth_interval=settings.growth_interval,
        ),
    )


def _probe(mode: str, dtype: torch.dtype, device: torch.device) -> None:
    """Run a forward and a backward of convolution and matmul: no table says what a device supports."""
    images = torch.ones(1, 1, 4, 4, device=device, requires_grad=True)
    kernel = torch.ones(1, 1, 3, 3, device=device, requires_grad=True)
    try:
        with torch.autocast(device.type, dtype=dtype):
            result = torch.nn.functional.conv2d(images, kernel).flatten(1) @ kernel.new_ones(4, 4)
        result.sum().backward()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        # cuDNN's NOT_SUPPORTED may also mean that a workspace does not fit, but not with 16 pixels.
        cause = None if "NOT_SUPPORTED" in reason else error
        raise UserError(
            f"precision={mode}: this device ({device}) cannot compute in {dtype}: {reason}; use precision=fp32"
        ) from cause
    if result.dtype != dtype:
        raise UserError(f"precision={mode}: this device ({device}) has no {dtype} autocast; use precision=fp32")
