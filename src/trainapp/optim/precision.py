"""Precision modes, gradient norms, and non-finite checks.

| mode      | weights  | matmuls                    | loss scale |
|-----------|----------|----------------------------|------------|
| fp32      | fp32     | fp32                       | none       |
| tf32      | fp32     | TF32 on NVIDIA, else fp32  | none       |
| bf16      | fp32     | bfloat16 (autocast)        | none       |
| bf16_pure | bfloat16 | bfloat16 (autocast)        | none       |
| fp16      | fp32     | float16 (autocast)         | dynamic    |
| int8      | fp32     | as bf16; in blocks: int8   | none       |
| fp8       | fp32     | as bf16; in blocks: fp8    | none       |

Autocast stays on in bf16_pure for models and losses that mix in fp32 inputs, buffers or losses.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from trainapp.config import schema
from trainapp.errors import NotFinite, TrainingStopped, UserError
from trainapp.optim import emulated_kernels, matmuls
from trainapp.torch_private import foreach_mul_, foreach_norm, forget_unscaling, found_inf, step_optimizer

Number = Tensor | float
MAX_SKIPPED = 100  # steps in a row; beyond this a run makes no progress and will not recover

_AUTOCAST_DTYPES = {"fp32": None, "tf32": None, "fp16": torch.float16}  # by mode; bf16 in all others


def at_least_fp32(tensor: Tensor) -> Tensor:
    """Return the tensor in fp32, in which losses are added up; a model in fp64 has its loss in fp64."""
    if tensor.dtype is torch.float64:
        return tensor
    return tensor.float()


@dataclass
class Precision:
    """A precision mode, with what forward and step need for it.

    Attributes:
        mode: one of the table above.
        compute_dtype: of matmuls.
        autocast: a context manager for forward and loss.
        scaler: the loss scale. It is disabled (every method passes through) unless the mode is fp16.
        is_emulated: whether the device computes in `compute_dtype` only by way of fp32, see `emulated_kernels`.
    """

    mode: str
    compute_dtype: torch.dtype
    autocast: contextlib.AbstractContextManager[Any]
    scaler: torch.amp.GradScaler
    is_emulated: bool = False

    def cast_parameters(self, model: nn.Module) -> None:
        """Cast the parameters in place; tied ones stay tied. Buffers keep their dtype."""
        if self.mode == "bf16_pure":
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(self.compute_dtype)

    def unscale(self, optimizer: torch.optim.Optimizer, all_reduce_found_inf: Callable[[list[Tensor]], None]) -> None:
        """Divide the gradients by the loss scale. `all_reduce_found_inf` spreads an overflow on one rank to all."""
        if self.scaler.is_enabled():
            self.scaler.unscale_(optimizer)
            all_reduce_found_inf(found_inf(self.scaler, optimizer))

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step the optimizer and adjust the loss scale. Call `unscale` before.

        Returns False, without a step, if the gradients overflowed.

        Waits for the device once, in fp16 only: the next step depends on whether this one counts. `scaler.step` reads
        the same flag if the optimizer is not fused; comparing the scale before and after would wait twice.
        """
        if not self.scaler.is_enabled():
            step_optimizer(optimizer)
            return True
        # Compared on the device, so that a trace, which reads every bool as False, takes the step.
        overflowed = any((flag > 0).item() for flag in found_inf(self.scaler, optimizer))
        if not overflowed:
            step_optimizer(optimizer)
        self.scaler.update()
        return not overflowed

    def lower_first_scale(self, factor: float) -> None:
        """Divide the loss scale by a factor, rounded down to a power of two. Call after the first step has overflowed.

        A loss is a sum over a step's count, of which the backward divides by the samples alone: where a sample has many
        tokens, the first scale is that many times larger than for a mean. A scale that only halves would skip as many
        steps as the number has bits.
        """
        if not 1 < factor < math.inf:
            return
        halvings = math.floor(math.log2(factor)) - 1  # `step` has halved it once
        if halvings > 0:
            self.scaler.update(self.scaler.get_scale() / 2**halvings)

    def reset_scaler(self) -> None:
        """Abandon a step after unscaling and before stepping. The loss scale is unchanged."""
        if self.scaler.is_enabled():
            forget_unscaling(self.scaler)


def has_tf32(device: torch.device) -> bool:
    """Return whether the device can round operands of matmuls and convolutions to TF32: NVIDIA's, from Ampere on."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def build(settings: schema.Precision, device: torch.device) -> Precision:
    """Return the precision mode. Sets torch's TF32 and attention switches, and emulates 16-bit kernels that the device
    lacks. Raises UserError if 8-bit matmuls fail.
    """
    # In fp32 or TF32: matmuls and convolutions.
    uses_tf32 = settings.mode == "tf32"
    torch.set_float32_matmul_precision("high" if uses_tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = uses_tf32

    autocast_dtype = _AUTOCAST_DTYPES.get(settings.mode, torch.bfloat16)
    # On CUDA, torch itself disables nn.TransformerEncoder's fast path under autocast. The path is one operation that
    # calls others inside, which autocast does not reach under a dispatch mode: an evaluation whose memory is counted
    # would give another result.
    torch.backends.mha.set_fastpath_enabled(device.type != "cpu" or autocast_dtype is None)

    # Kernels that the device lacks: those for 16 bits are emulated, those for 8 bits refused.
    compute_dtype = autocast_dtype or torch.float32
    is_emulated = emulated_kernels.install_for(device, compute_dtype)
    if settings.mode in ("int8", "fp8"):
        matmuls.require_kernels(settings.mode, device)

    autocast: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if autocast_dtype is not None:
        autocast = torch.autocast(device.type, dtype=autocast_dtype)
    scaler = torch.amp.GradScaler(
        device.type,
        enabled=settings.mode == "fp16",
        init_scale=settings.initial_scale,
        growth_interval=settings.growth_interval,
    )
    return Precision(settings.mode, compute_dtype, autocast, scaler, is_emulated)


# --- gradients


def gradient_norm(gradients: list[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Return the 2-norm of all gradients together, a scalar tensor on their device. dtype: accumulation dtype."""
    if not gradients:
        return torch.zeros(())
    norms = torch.stack(norms_of(gradients, dtype))
    return torch.linalg.vector_norm(norms)


def norms_of(gradients: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return the 2-norm of each gradient. dtype: accumulation dtype."""
    real_gradients = [torch.view_as_real(g) if g.is_complex() else g for g in gradients]
    return list(foreach_norm(real_gradients, 2, dtype))


def scale_gradients(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by a scalar tensor on their device."""
    if factor.device.type == "cpu":
        foreach_mul_(gradients, factor)
        return
    # One launch per dtype. For a factor of another dtype (such as fp64 counts summed over ranks), and for lists of
    # several dtypes, CUDA launches a kernel per gradient, and also rounds the factor to the gradient's dtype
    # (ForeachBinaryOpScalarTensor.cu at pytorch's commit 0eb8214).
    for dtype in {gradient.dtype for gradient in gradients}:
        same_dtype = [gradient for gradient in gradients if gradient.dtype == dtype]
        foreach_mul_(same_dtype, factor.to(dtype))


# --- steps without a usable update


class NonFiniteCheck:
    """The check whether a step may update the parameters: of its count, loss and gradient norm.

    On the CPU, and for "skip", the values are read before every update; on a GPU that waits for the device in each
    step. On a GPU, "stop" records the first bad step on the device instead, and `check` reads it. It is called before
    anything is logged or saved, so no bad step reaches a checkpoint.

    Args:
        policy: one of POLICIES: "stop" ends the run with an error that names the step and the metric; "skip" skips the
            step.
        device: of the values.
        scaled: whether a loss scaler is in use, which itself skips a step whose scaled gradients overflow.
        last_checkpoint: names the last checkpoint, for the message.

    Raises UserError for a policy that has no action here, which would skip steps.
    """

    POLICIES = ("stop", "skip")

    def __init__(
        self, policy: str, device: torch.device, scaled: bool, last_checkpoint: Callable[[], str | None] = lambda: None
    ):
        if policy not in self.POLICIES:
            raise UserError(f"train.nonfinite={policy}: must be one of {', '.join(self.POLICIES)}")
        self.policy = policy
        self.scaled = scaled
        self.last_checkpoint = last_checkpoint
        self._reads_every_step = device.type == "cpu" or policy == "skip"
        self._first_bad_step = torch.full((), -1, dtype=torch.int64, device=device)  # -1: none
        self._skipped: Counter[str] = Counter()  # steps in a row, by update

    def allows_update(self, step: int, loss: Number, norm: Number, count: Number, update: str = "") -> bool:
        """Return whether the step may be applied. Raises TrainingStopped for "stop", or after too many skipped steps.

        Args:
            step: steps applied before this one.
            loss: the step's loss.
            norm: of its gradients.
            count: the divisor of loss and gradients; a step with count 0 is skipped under either policy.
            update: the update's name, if a step has several.
        """
        checked_norm = 0.0 if self.scaled else norm
        unread = {}
        for name, value in (("count", count), ("loss", loss), ("gradient norm", checked_norm)):
            if isinstance(value, Tensor) and not self._reads_every_step:
                unread[name] = value
                continue
            number = float(value)  # some values are plain numbers even on a GPU, readable without a wait

            # A count of 0 is nothing to divide by: the step is skipped.
            is_count = name == "count"
            if is_count and number == 0:
                reason = "because the loss's count, which the task returns with the loss, was 0"
                self.record_outcome(False, step, reason, update)
                return False

            # Values that are not finite are treated as the policy says, negative counts as errors.
            is_negative_count = is_count and number < 0
            if math.isfinite(number) and not is_negative_count:
                continue
            if self.policy == "stop" or is_negative_count:
                problem = "negative" if math.isfinite(number) else "not finite"
                is_infinite_loss = name == "loss" and number == math.inf
                self._stop(step, f"the {name} is {problem} ({number:g})", update, is_infinite_loss)
            self.record_outcome(False, step, update=update)
            return False
        if unread:
            self._check_on_device(step, unread)
        return True

    def _check_on_device(self, step: int, values: Mapping[str, Tensor]) -> None:
        """Record on the device whether the step is the first one with unusable values."""
        flags = []
        for name, value in values.items():
            is_usable = torch.isfinite(value)
            if name == "count":
                is_usable = is_usable & (value > 0)
            flags.append(is_usable)
        # FSDP's cpu_offload keeps gradients, and so their norm, on the host.
        flags_on_device = [flag.to(self._first_bad_step.device, non_blocking=True) for flag in flags]

        # An earlier bad step stays the first one.
        is_good = torch.stack(flags_on_device).all()
        had_bad_step = self._first_bad_step >= 0
        self._first_bad_step = torch.where(is_good | had_bad_step, self._first_bad_step, step)

    def record_outcome(self, applied: bool, step: int, reason: str | None = None, update: str = "") -> None:
        """Count the steps in a row that were not applied. Raises TrainingStopped beyond MAX_SKIPPED.

        Args:
            applied: whether this step was.
            step: steps applied before this one.
            reason: why it was not, if not for its gradients.
            update: the update's name, if a step has several.
        """
        if applied:
            self._skipped[update] = 0
        else:
            self._skipped[update] += 1
        if self._skipped[update] > MAX_SKIPPED:
            error_type = TrainingStopped
            if reason is None:
                error_type = NotFinite
                advice = "use precision=bf16" if self.scaled else "debug=nonfinite finds where they come from"
                reason = f"because gradients were not finite; {advice}"
            raise error_type(
                f"step {step + 1}{_suffix(update)}: {MAX_SKIPPED} steps in a row were skipped {reason}; {self._saved()}"
            )

    def check(self) -> None:
        """Raise TrainingStopped if a step since the last call was not finite. Waits for the device on a GPU."""
        if self._reads_every_step:
            return
        first_bad_step = int(self._first_bad_step)
        if first_bad_step >= 0:
            self._stop(first_bad_step, "loss or gradients are not finite, or the count is 0, negative or not finite")

    def _stop(self, step: int, problem: str, update: str = "", is_infinite_loss: bool = False) -> NoReturn:
        hint = ""
        if is_infinite_loss:
            hint = (
                " A loss of inf may be that of a single sample: a CTC loss has it where a target is longer than its "
                "input allows (check the lengths, or set its zero_infinity=True)."
            )
        raise NotFinite(
            f"step {step + 1}{_suffix(update)}: {problem}; {self._saved()}.{hint} A lower optimizer.lr, a longer "
            "schedule.warmup or train.grad_clip may help; train.nonfinite=skip skips such steps; debug=nonfinite finds "
            "where it comes from. A count is the number of samples or tokens, or the sum of their weights"
        )

    def _saved(self) -> str:
        return f"the last good checkpoint is {self.last_checkpoint() or 'none'}"


def _suffix(update: str) -> str:
    return f" ({update})" if update else ""
