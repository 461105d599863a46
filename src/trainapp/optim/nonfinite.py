"""Watches for losses and gradients that are inf or nan."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from trainapp.errors import TrainingStopped

MAX_SKIPPED = 100  # in a row: such a run makes no progress, and nothing that is tried will change it


def gradient_norm(gradients: list[Tensor]) -> Tensor:
    """The 2-norm of all gradients together, a scalar tensor on their device."""
    # torch.nn.utils.get_total_norm does the same and sorts the gradients by device and dtype first: 20 microseconds.
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))) if gradients else torch.zeros(())


class NonFiniteCheck:
    """Decides whether a step may be committed.

    policy: "stop" ends the run with the step and the metric named; "skip" leaves the step out.
    last_checkpoint: called for the message. On the CPU, and to skip, every step is looked at before its commit. On a
    GPU "stop" would have to wait for the device in every step: there it only records the first bad step on the
    device, and `check`, called before anything is logged or saved, reads it. No bad step can reach a checkpoint.
    """

    def __init__(self, policy: str, device: torch.device, scaled: bool, last_checkpoint: Callable[[], str | None]):
        self.policy, self.scaled, self.last_checkpoint = policy, scaled, last_checkpoint
        self._reads = device.type == "cpu" or policy == "skip"
        self._bad = torch.full((2,), -1, dtype=torch.int64, device=device)  # first bad step of loss, of gradient
        self._skipped = 0  # steps in a row

    def admits(self, step: int, loss: Tensor, norm: Tensor) -> bool:
        """Whether the step may be committed. A scaled gradient that overflows is the loss scaler's business."""
        if self._reads:
            for name, value in (("loss", loss), ("gradient norm", norm)):
                if not math.isfinite(value) and not (self.scaled and name == "gradient norm"):
                    if self.policy == "skip":
                        return self.applied(False, step)
                    self._stop(step, name, float(value))
            return True
        norm = norm.new_zeros(()) if self.scaled else norm
        finite = torch.stack([torch.isfinite(loss), torch.isfinite(norm)])
        self._bad = torch.where(finite | (self._bad >= 0), self._bad, step)
        return True

    def applied(self, was: bool, step: int) -> bool:
        """Told whether a step was applied; returns it. Raises TrainingStopped after too many that were not."""
        self._skipped = 0 if was else self._skipped + 1
        if self._skipped > MAX_SKIPPED:
            advice = "use precision=bf16" if self.scaled else "debug=nonfinite finds where they come from"
            raise TrainingStopped(
                f"step {step + 1}: {MAX_SKIPPED} steps in a row were skipped for gradients that are not finite; "
                f"{advice}; {self._saved()}"
            )
        return was

    def check(self) -> None:
        """Raises TrainingStopped when a step since the last call was not finite. Waits for the device on a GPU."""
        if self._reads:
            return
        for name, step in zip(("loss", "gradient norm"), self._bad.tolist(), strict=True):
            if step >= 0:
                self._stop(step, name, math.nan)

    def _stop(self, step: int, name: str, value: float) -> None:
        raise TrainingStopped(
            f"step {step + 1}: the {name} is not finite ({value}); {self._saved()}. A lower optimizer.lr, a longer "
            "schedule.warmup or train.grad_clip may help; train.nonfinite=skip leaves such steps out; debug=nonfinite "
            "finds where it comes from"
        )

    def _saved(self) -> str:
        return f"the last good checkpoint is {self.last_checkpoint() or 'none'}"
