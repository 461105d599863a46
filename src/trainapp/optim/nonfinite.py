"""Detects steps without a usable update: losses, gradients and counts that are inf or nan, and counts of 0."""

import math
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from trainapp.errors import TrainingStopped
from trainapp.torch_private import foreach_norm

_NAMES = ("count", "loss", "gradient norm")
MAX_SKIPPED = 100  # in a row: such a run makes no progress and will not recover


def gradient_norm(gradients: list[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """The 2-norm of all gradients together, a scalar tensor on their device. dtype: to add their squares in."""
    if not gradients:
        return torch.zeros(())
    return torch.linalg.vector_norm(torch.stack(foreach_norm(gradients, 2, dtype)))


class NonFiniteCheck:
    """Decides whether a step may update the parameters.

    policy: "stop" ends the run with an error that names the step and the metric; "skip" leaves the step out.
    scaled: whether a loss scaler is in use. last_checkpoint: names the last checkpoint, for the message.

    On the CPU, and for "skip", the values are read before every update. On a GPU, "stop" would have to wait for the
    device in every step: there the first bad step is recorded on the device, and `check` reads it. It is called before
    anything is logged or saved, so no bad step reaches a checkpoint.
    """

    def __init__(self, policy: str, device: torch.device, scaled: bool, last_checkpoint: Callable[[], str | None]):
        self.policy, self.scaled, self.last_checkpoint = policy, scaled, last_checkpoint
        self._reads_every_step = device.type == "cpu" or policy == "skip"
        # step of the first bad count, loss, gradient
        self._first_bad = torch.full((len(_NAMES),), -1, dtype=torch.int64, device=device)
        self._skipped = 0  # steps in a row

    def allows_update(self, step: int, loss: Tensor | float, norm: Tensor, count: Tensor | float) -> bool:
        """Whether the step may be applied. A scaled gradient may overflow: the loss scaler skips that step itself.

        step: steps applied before this one. count: what loss and gradients are divided by; a step with count 0 is
        skipped under either policy. Raises TrainingStopped for "stop", for a negative count, or after too many skipped
        steps.
        """
        if self._reads_every_step or not isinstance(count, Tensor):
            count = float(count)
            if count == 0:
                self.count(False, step, "because the loss's count was 0; it is what the task returns beside the loss")
                return False
            if count < 0:
                self._stop_for_count(step, f"negative ({count:g})")
        if self._reads_every_step:
            for name, value in zip(_NAMES, (count, loss, norm), strict=True):
                if not math.isfinite(value) and not (self.scaled and name == "gradient norm"):
                    if self.policy == "stop":
                        self._stop(step, name, float(value))
                    self.count(False, step)
                    return False
            return True
        norm = norm.new_zeros(()) if self.scaled else norm
        count, loss = (torch.as_tensor(value, device=norm.device) for value in (count, loss))
        finite = torch.stack([torch.isfinite(count) & (count > 0), torch.isfinite(loss), torch.isfinite(norm)])
        self._first_bad = torch.where(finite | (self._first_bad >= 0), self._first_bad, step)
        return True

    def count(self, applied: bool, step: int, reason: str | None = None) -> None:
        """Count steps that were not applied, and for what `reason` if not for their gradients. Raises TrainingStopped
        after more than MAX_SKIPPED in a row.
        """
        self._skipped = 0 if applied else self._skipped + 1
        if self._skipped > MAX_SKIPPED:
            advice = "use precision=bf16" if self.scaled else "debug=nonfinite finds where they come from"
            reason = reason or f"for gradients that are not finite; {advice}"
            raise TrainingStopped(
                f"step {step + 1}: {MAX_SKIPPED} steps in a row were skipped {reason}; {self._saved()}"
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

    def _stop(self, step: int, name: str, value: float) -> NoReturn:
        raise TrainingStopped(
            f"step {step + 1}: the {name} is not finite ({value}); {self._saved()}. A lower optimizer.lr, a longer "
            "schedule.warmup or train.grad_clip may help; train.nonfinite=skip leaves such steps out; debug=nonfinite "
            "finds where it comes from"
        )

    def _stop_for_count(self, step: int, problem: str) -> NoReturn:
        raise TrainingStopped(
            f"step {step + 1}: the count that the loss is divided by is {problem}; {self._saved()}. The task must "
            "return the number of samples or tokens, or the sum of their weights"
        )

    def _saved(self) -> str:
        return f"the last good checkpoint is {self.last_checkpoint() or 'none'}"
