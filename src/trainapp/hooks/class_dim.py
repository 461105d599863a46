"""Which dimension of an output holds the logits of classes: the last, or the second, where torch's losses have it."""

from torch import Tensor


class ClassDim:
    """Found by the shapes of outputs and integer targets [B, ...]: logits are [B, ..., classes] or [B, classes, ...].

    dim: 1 or -1 where it is known; it decides where shapes do not, as with [B, T, T]. remedy: the end of the message
    where nothing does.
    """

    def __init__(self, dim: int | None = None, remedy: str = "give the metric class_dim=1 or class_dim=-1"):
        self.dim, self._remedy = dim, remedy

    def of(self, output: Tensor, targets: Tensor) -> int | None:
        """1 or -1; None where the output has no logits of classes, which one value per sample is not either.

        Raises ValueError for shapes that may be read both ways, if no earlier ones have told.
        """
        if targets.is_floating_point() or output.ndim != targets.ndim + 1 or output.ndim < 2:
            return None
        first, *rest = targets.shape
        layouts = {-1: [first, *rest, output.shape[-1]], 1: [first, output.shape[1], *rest]}
        fitting = [dim for dim, shape in layouts.items() if list(output.shape) == shape and output.shape[dim] > 1]
        if not fitting:
            return None
        if len(fitting) == 1:
            self.dim = fitting[0]
        elif output.ndim > 2 and self.dim is None:
            raise ValueError(
                f"of an output {list(output.shape)} for targets {list(targets.shape)}, the classes may be dimension 1 "
                f"or the last; {self._remedy}"
            )
        return fitting[0] if len(fitting) == 1 or output.ndim == 2 else self.dim
