"""What the program reads from a model of any class."""

from torch import nn

from trainapp.errors import UserError
from trainapp.torch_private import BatchNorm


def has_batchnorm(model: nn.Module) -> bool:
    """Whether the model normalises over the samples of a micro-batch."""
    return any(isinstance(module, BatchNorm) for module in model.modules())


def blocks_of(model: nn.Module, setting: str) -> list[nn.Module]:
    """The repeated blocks that a model's `blocks()` returns. Raises UserError for a model without that method."""
    if not callable(getattr(model, "blocks", None)):
        raise UserError(
            f"{setting}: {type(model).__name__} does not say what its blocks are; give it a method "
            "`blocks(self) -> list[nn.Module]`"
        )
    return list(model.blocks())
