"""What the program asks of a model it does not know."""

from torch import nn

from trainapp.errors import UserError
from trainapp.torch_private import BatchNorm


def has_batchnorm(model: nn.Module) -> bool:
    """Whether the model normalises over the samples of a micro-batch."""
    return any(isinstance(module, BatchNorm) for module in model.modules())


def blocks_of(model: nn.Module, setting: str) -> list[nn.Module]:
    """The repeated blocks that a model names by its method `blocks()`. Raises UserError without it."""
    if not callable(getattr(model, "blocks", None)):
        raise UserError(
            f"{setting}: {type(model).__name__} does not say what its blocks are; give it a method "
            "`blocks(self) -> list[nn.Module]`"
        )
    return list(model.blocks())
