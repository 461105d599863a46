"""Compares the gradients of a batch with those of its halves, whose losses add up.

A backward may mix samples where no forward does: an `autograd.Function` that normalises over the batch, an adjoint
solver whose tolerance is over it, a hook, also one on a parameter, which sees the gradient of a micro-batch. The losses
of a batch and its halves add up then, and their gradients do not. Those of the halves accumulate in `grad`, as in
training, since hooks after the accumulation see the sum so far.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainapp.draws.record import DrawRecord, TopicKind
from trainapp.errors import summary_of
from trainapp.torch_private import has_accumulation_hooks
from trainapp.trials.comparison import MAX_FP64_EPSILON
from trainapp.trials.modes import Mode
from trainapp.trials.obstacles import Obstacle, Reason
from trainapp.trials.operations import Observer
from trainapp.trials.parts import ModeCalls
from trainapp.units import listed

# By how much the gradients may differ, relative to their norms. More than for a loss: they may cancel out in it.
MAX_FP64_GRADIENT_ROUNDING = 1e-9
MAX_GRADIENT_ROUNDING = (
    1e-2  # where a part of the computation is not in fp64; also of a loss that adds up a little less exactly
)


@dataclass(frozen=True)
class GradientFinding:
    """Gradients that do not add up. `str` continues the words about the loss."""

    deviation: float  # relative

    def __str__(self) -> str:
        return f"its gradients do not add up (they differ by {self.deviation:.1e})"

    def message(self, mode: Mode, number: int) -> str:
        """Return the warning.

        Args:
            mode: the task, and how it was called.
            number: of samples.
        """
        equal = "embeddings" if mode.compares_embeddings else "losses"
        return (
            f"{mode.task.setting}: the gradients of {number} samples are not the sum of those of their halves, though "
            f"the {equal} are: they differ by {self.deviation:.1e} of their size. A backward uses the whole batch, "
            "such as that of a torch.autograd.Function or a hook that normalises over it, or an adaptive solver whose "
            "tolerance is over it; so the gradients depend on the micro-batch: compute them per sample, or declare "
            "`whole_batch = True` on the task: its batch is then never split. A hook on a parameter (register_hook, "
            "register_post_accumulate_grad_hook) that clips or scales runs once per micro-batch and rank: clip by "
            "train.grad_clip, or in the step of an optimizer of your own"
        )


class GradientBalance:
    """The gradients of a batch, and those of its parts, accumulated.

    Args:
        leaves: the tensors whose gradients are compared.
    """

    def __init__(self, leaves: list[Tensor]):
        self._leaves = leaves
        self._of_whole: list[Tensor | None] = []
        self._of_parts: list[Tensor | None] = [None] * len(leaves)
        self._norm_of_parts = 0.0

    def add_whole(self, loss: Tensor) -> None:
        """Note the gradients of the whole batch."""
        loss.backward()
        self._of_whole = self._dense_gradients()

    def add_part(self, loss: Tensor) -> None:
        """Add those of a part to those of the parts so far."""
        for leaf, gradient in zip(self._leaves, self._of_parts, strict=True):
            leaf.grad = None if gradient is None else gradient.clone()
        loss.backward()
        of_parts = self._dense_gradients()
        self._norm_of_parts += _norm_of_difference(of_parts, self._of_parts)
        self._of_parts = of_parts

    @property
    def deviation(self) -> float:
        """The norm of the difference, relative to the gradients of the parts; nan if any is not finite."""
        deviation = _norm_of_difference(self._of_whole, self._of_parts) / (self._norm_of_parts or 1.0)
        return deviation if math.isfinite(deviation) else math.nan

    def _dense_gradients(self) -> list[Tensor | None]:
        gradients: list[Tensor | None] = []
        for leaf in self._leaves:
            gradients.append(None if leaf.grad is None else leaf.grad.detach().to_dense())
        return gradients


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
        call(samples.first_half, backward=balance.add_part)
        call(samples.second_half, backward=balance.add_part)
    except Exception as error:  # the first step raises it again, if it is the task's
        return Obstacle(Reason.ERROR, summary_of(error))
    deviation = balance.deviation
    if not deviation > MAX_FP64_GRADIENT_ROUNDING:  # also if it is no number
        return None
    if deviation > MAX_GRADIENT_ROUNDING:
        return GradientFinding(deviation)
    observer = Observer()
    call(samples.whole, observer)
    may_be_rounding = observer.epsilon_of_loss > MAX_FP64_EPSILON
    return GradientFinding(deviation) if loss_is_exact and not may_be_rounding else None


def note_accumulation_hooks(model: nn.Module, draw_record: DrawRecord) -> None:
    """Record which parameters have hooks that run after each accumulation, where no comparison shows what they do."""
    names = [name for name, parameter in model.named_parameters() if has_accumulation_hooks(parameter)]
    if names:
        draw_record.note(
            TopicKind.GRADIENTS.topic("post-accumulate hooks"),
            f"hooks of register_post_accumulate_grad_hook on {listed(names)} run once per micro-batch and rank, on the "
            "sum so far, and gradients could not be compared: what changes them depends on the micro-batch; clip by "
            "train.grad_clip, or in the step of an optimizer of your own",
        )


def _norm_of_difference(minuends: list[Tensor | None], subtrahends: list[Tensor | None]) -> float:
    """Return the norm of the differences of gradients, of which a missing one is zero."""
    differences = []
    for minuend, subtrahend in zip(minuends, subtrahends, strict=True):
        if minuend is not None and subtrahend is not None:
            differences.append(minuend - subtrahend)
        elif minuend is not None:
            differences.append(minuend)
        elif subtrahend is not None:
            differences.append(subtrahend)
    return float(torch.nn.utils.get_total_norm(differences)) if differences else 0.0
