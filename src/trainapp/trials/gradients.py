"""Compares the gradients of a batch with those of its halves, whose losses add up.

A backward may mix samples where no forward does: an `autograd.Function` that normalises over the batch, an adjoint
solver whose tolerance is over it, a hook. The losses of a batch and its halves add up then, and their gradients do not.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainapp.errors import summary_of
from trainapp.trials.comparison import MAX_FP64_EPSILON
from trainapp.trials.obstacles import Obstacle, Reason
from trainapp.trials.operations import Observer
from trainapp.trials.parts import ModeCalls

# By how much the gradients may differ, relative to their norms. More than for a loss: they may cancel out in it.
MAX_FP64_ROUNDING = 1e-9
MAX_ROUNDING = 1e-2  # where a part of the computation is not in fp64; also of a loss that adds up a little less exactly


@dataclass(frozen=True)
class GradientFinding:
    """Gradients that do not add up. `str` continues the words about the loss."""

    deviation: float  # relative

    def __str__(self) -> str:
        return f"its gradients do not add up (they differ by {self.deviation:.1e})"

    def message(self, setting: str, number: int) -> str:
        """Return the warning.

        Args:
            setting: which names the task.
            number: of samples.
        """
        return (
            f"{setting}: the gradients of {number} samples are not the sum of those of their halves, though the losses "
            f"are: they differ by {self.deviation:.1e} of their size. A backward uses the whole batch, such as that of "
            "a torch.autograd.Function or a hook that normalises over it, or an adaptive solver whose tolerance is "
            "over it; so the gradients depend on the micro-batch: compute them per sample, or declare "
            "`whole_batch = True` on the task: its batch is then never split"
        )


class GradientBalance:
    """The gradients of a batch, less those of its parts.

    Args:
        leaves: the tensors whose gradients are compared.
    """

    def __init__(self, leaves: list[Tensor]):
        self._leaves = leaves
        self._remainders: list[Tensor | None] = [None] * len(leaves)
        self._norm_of_parts = 0.0

    def add_whole(self, loss: Tensor) -> None:
        """Add the gradients of the whole batch."""
        self._add(loss, sign=1)

    def subtract_part(self, loss: Tensor) -> None:
        """Subtract those of a part."""
        self._norm_of_parts += self._add(loss, sign=-1)

    @property
    def deviation(self) -> float:
        """What is left, relative to the gradients of the parts; nan if any is not finite."""
        remainders = [remainder for remainder in self._remainders if remainder is not None]
        return _norm(remainders) / (self._norm_of_parts or 1.0)

    def _add(self, loss: Tensor, sign: int) -> float:
        """Add the gradients of a loss with this sign. Return their norm."""
        loss.backward()
        gradients = []
        for index, leaf in enumerate(self._leaves):
            if leaf.grad is None:
                continue
            gradient = leaf.grad.detach().to_dense()
            gradients.append(gradient)
            remainder = self._remainders[index]
            signed_gradient = sign * gradient
            self._remainders[index] = signed_gradient if remainder is None else remainder.add_(signed_gradient)
        return _norm(gradients)


def compare_gradients(call: ModeCalls, loss_is_exact: bool) -> GradientFinding | Obstacle | None:
    """Compare the gradients of a batch with those of its halves, in fp64. Return None if they add up.

    Args:
        call: calls the task.
        loss_is_exact: whether the loss adds up to fp64's rounding. If not, this has been said, and gradients follow it.
    """
    samples = call.probe.samples
    if not samples.is_joined or call.probe.dtype is not torch.float64:
        return None
    balance = GradientBalance(call.probe.trained_leaves)
    try:
        call(samples.whole, backward=balance.add_whole)
        call(samples.first_half, backward=balance.subtract_part)
        call(samples.second_half, backward=balance.subtract_part)
    except Exception as error:  # the first step raises it again, if it is the task's
        return Obstacle(Reason.ERROR, summary_of(error))
    deviation = balance.deviation
    if not deviation > MAX_FP64_ROUNDING:  # also if it is no number
        return None
    if deviation > MAX_ROUNDING:
        return GradientFinding(deviation)
    observer = Observer()
    call(samples.whole, observer)
    may_be_rounding = observer.epsilon_of_loss > MAX_FP64_EPSILON
    return GradientFinding(deviation) if loss_is_exact and not may_be_rounding else None


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm(tensors)) if tensors else 0.0
