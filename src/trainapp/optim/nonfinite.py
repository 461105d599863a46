"""Detects losses and gradients that are inf or nan."""

import math
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from trainapp.errors import TrainingStopped
from trainapp.torch_private import foreach_norm

MAX_SKIPPED = 100  # in a row: such a run makes no progress and will not recover


def gradient_norm(gradients: list[Tensor]) -> Tensor:
    """The 2-norm of all gradients together, a scalar tensor on their device."""
    return torch.linalg.vector_norm(torch.stack(foreach_norm(gradients))) if gradients else torch.zeros(())


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
        self._first_bad = torch.full((2,), -1, dtype=torch.int64, device=device)  # step of the first bad loss, gradient
        self._skipped = 0  # steps in a row

    def allows_update(self, step: int, loss: Tensor | float, norm: Tensor) -> bool:
        """Whether the step may be applied. A scaled gradient may overflow: the loss scaler skips that step itself.

        step: steps applied before this one. Raises TrainingStopped for "stop", or after too many skipped steps.
        """
        if self._reads_every_step:
            for name, value in (("loss", loss), ("gradient norm", norm)):
                if not math.isfinite(value) and not (self.scaled and name == "gradient norm"):
                    if self.policy == "stop":
                        self._stop(step, name, float(value))
                    self.count(False, step)
                    return False
            return True
        norm = norm.new_zeros(()) if self.scaled else norm
        finite = torch.stack([torch.isfinite(torch.as_tensor(loss, device=norm.device)), torch.isfinite(norm)])
        self._first_bad = torch.where(finite | (self._first_bad >= 0), self._first_bad, step)
        return True

    def count(self, applied: bool, step: int) -> None:
        """Count steps that were not applied. Raises TrainingStopped after more than MAX_SKIPPED in a row."""
        self._skipped = 0 if applied else self._skipped + 1
        if self._skipped > MAX_SKIPPED:
            advice = "use precision=bf16" if self.scaled else "debug=nonfinite finds where they come from"
            raise TrainingStopped(
                f"step {step + 1}: {MAX_SKIPPED} steps in a row were skipped for gradients that are not finite; "
                f"{advice}; {self._saved()}"
            )

    def check(self) -> None:
        """Raises TrainingStopped when a step since the last call was not finite. Waits for the device on a GPU."""
        if self._reads_every_step:
            return
        for name, step in zip(("loss", "gradient norm"), self._first_bad.tolist(), strict=True):
            if step >= 0:
                self._stop(step, name, math.nan)

    def _stop(self, step: int, name: str, value: float) -> NoReturn:
        raise TrainingStopped(
            f"step {step + 1}: the {name} is not finite ({value}); {self._saved()}. A lower optimizer.lr, a longer "
            "schedule.warmup or train.grad_clip may help; train.nonfinite=skip leaves such steps out; debug=nonfinite "
            "finds where it comes from"
        )

    def _saved(self) -> str:
        return f"the last good checkpoint is {self.last_checkpoint() or 'none'}"
