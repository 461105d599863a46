"""Detects steps without a usable update: losses, gradients and counts that are inf or nan, and counts of 0."""

import math
from collections import Counter
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from trainapp.errors import NotFinite, TrainingStopped
from trainapp.torch_private import foreach_mul_, foreach_norm

Number = Tensor | float

_NAMES = ("count", "loss", "gradient norm")
MAX_SKIPPED = 100  # in a row: such a run makes no progress and will not recover


def gradient_norm(gradients: list[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """The 2-norm of all gradients together, a scalar tensor on their device. dtype: to add their squares in."""
    if not gradients:
        return torch.zeros(())
    return torch.linalg.vector_norm(torch.stack(norms_of(gradients, dtype)))


def norms_of(gradients: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """The 2-norm of each. dtype: real, to add the squares in, also those of complex gradients."""
    if dtype is not None:  # torch takes only a complex one for complex tensors
        gradients = [torch.view_as_real(g.resolve_conj()) if g.is_complex() else g for g in gradients]
    return list(foreach_norm(gradients, 2, dtype))


def scale_gradients(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by a scalar tensor on their device."""
    if factor.device.type == "cpu":
        foreach_mul_(gradients, factor)
        return
    # One launch per dtype. For a factor of another dtype, such as the fp64 of counts summed over ranks, and for lists
    # of several dtypes, CUDA launches a kernel per gradient, which rounds the factor to the gradient's dtype all the
    # same (ForeachBinaryOpScalarTensor.cu at pytorch's commit 0eb8214).
    for dtype in {gradient.dtype for gradient in gradients}:
        foreach_mul_([gradient for gradient in gradients if gradient.dtype == dtype], factor.to(dtype))


def _read(*values: Number) -> list[Number]:
    """The values, those on a device as numbers: read together, with one wait."""
    on_device = [value for value in values if isinstance(value, Tensor) and value.device.type != "cpu"]
    numbers = iter(torch.stack(on_device).cpu().tolist() if on_device else ())
    return [next(numbers) if any(value is other for other in on_device) else value for value in values]


class NonFiniteCheck:
    """Decides whether a step may update the parameters.

    policy: "stop" ends the run with an error that names the step and the metric; "skip" leaves the step out.
    scaled: whether a loss scaler is in use. last_checkpoint: names the last checkpoint, for the message.

    On the CPU, and for "skip", the values are read before every update; on a GPU that is one wait for the device per
    step. "stop" does without: there the first bad step is recorded on the device, and `check` reads it. It is called
    before anything is logged or saved, so no bad step reaches a checkpoint.
    """

    def __init__(self, policy: str, device: torch.device, scaled: bool, last_checkpoint: Callable[[], str | None]):
        self.policy, self.scaled, self.last_checkpoint = policy, scaled, last_checkpoint
        self._reads_every_step = device.type == "cpu" or policy == "skip"
        self._reads_device = device.type != "cpu" and policy == "skip"
        # step of the first bad count, loss, gradient
        self._first_bad = torch.full((len(_NAMES),), -1, dtype=torch.int64, device=device)
        self._good = torch.ones((), dtype=torch.bool, device=device)
        self._skipped: Counter[str] = Counter()  # steps in a row, by update

    def allows_update(self, step: int, loss: Number, norm: Number, count: Number, update: str = "") -> bool:
        """Whether the step may be applied. A scaled gradient may overflow: the loss scaler skips that step itself.

        step: steps applied before this one. count: what loss and gradients are divided by; a step with count 0 is
        skipped under either policy. update: its name, where a step has several. Raises TrainingStopped for "stop", for
        a negative count, or after too many skipped steps.
        """
        if self._reads_device:
            count, loss, norm = _read(count, loss, norm)
        if self._reads_every_step or not isinstance(count, Tensor):
            count = float(count)
            if count == 0:
                why = "because the loss's count was 0; it is what the task returns next to the loss"
                self.count(False, step, why, update)
                return False
            if count < 0:
                self._stop_for_count(step, f"negative ({count:g})", update)
        if self._reads_every_step:
            for name, value in zip(_NAMES, (count, loss, norm), strict=True):
                if not math.isfinite(value) and not (self.scaled and name == "gradient norm"):
                    if self.policy == "stop":
                        self._stop(step, name, float(value), update)
                    self.count(False, step, update=update)
                    return False
            return True
        self._record(step, loss, norm, count)
        return True

    def _record(self, step: int, loss: Number, norm: Number, count: Number) -> None:
        """Record a bad step on the device. A count that is a number is judged here: a tensor made of it would be copied
        from the host, which waits for the device. A loss or norm that is a number is finite. Raises TrainingStopped for
        a count that is a number and not finite.
        """
        if not isinstance(count, Tensor) and not math.isfinite(count):
            self._stop(step, "count", count)
        good = [
            torch.isfinite(count) & (count > 0) if isinstance(count, Tensor) else self._good,
            torch.isfinite(loss) if isinstance(loss, Tensor) else self._good,
            torch.isfinite(norm) if isinstance(norm, Tensor) and not self.scaled else self._good,
        ]
        # FSDP's cpu_offload keeps gradients, and so their norm, on the host.
        is_good = torch.stack([flag.to(self._good.device, non_blocking=True) for flag in good])
        self._first_bad = torch.where(is_good | (self._first_bad >= 0), self._first_bad, step)

    def count(self, applied: bool, step: int, reason: str | None = None, update: str = "") -> None:
        """Count steps that were not applied, and for what `reason` if not for their gradients. Raises TrainingStopped
        after more than MAX_SKIPPED in a row.
        """
        self._skipped[update] = 0 if applied else self._skipped[update] + 1
        if self._skipped[update] > MAX_SKIPPED:
            advice = "use precision=bf16" if self.scaled else "debug=nonfinite finds where they come from"
            reason = reason or f"for gradients that are not finite; {advice}"
            raise TrainingStopped(
                f"step {step + 1}{_of(update)}: {MAX_SKIPPED} steps in a row were skipped {reason}; {self._saved()}"
            )

    def check(self) -> None:
        """Raises TrainingStopped when a step since the last call was not finite. Waits for the device on a GPU."""
        if self._reads_every_step:
            return
        for name, step in zip(_NAMES, self._first_bad.tolist(), strict=True):
            if step >= 0 and name == "count":
                self._stop_for_count(step, "0, negative or not finite (train.nonfinite=skip leaves out those with 0)")
            elif step >= 0:
                self._stop(step, name, math.nan)

    def _stop(self, step: int, name: str, value: float, update: str = "") -> NoReturn:
        raise NotFinite(
            f"step {step + 1}{_of(update)}: the {name} is not finite ({value}); {self._saved()}. A lower optimizer.lr, "
            "a longer schedule.warmup or train.grad_clip may help; train.nonfinite=skip leaves such steps out; "
            "debug=nonfinite finds where it comes from"
        )

    def _stop_for_count(self, step: int, problem: str, update: str = "") -> NoReturn:
        raise TrainingStopped(
            f"step {step + 1}{_of(update)}: the count that the loss is divided by is {problem}; {self._saved()}. The "
            "task must return the number of samples or tokens, or the sum of their weights"
        )

    def _saved(self) -> str:
        return f"the last good checkpoint is {self.last_checkpoint() or 'none'}"


def _of(update: str) -> str:
    return f" ({update})" if update else ""
