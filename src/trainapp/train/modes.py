"""Evaluation mode, and back to what was before."""

import contextlib
from collections.abc import Iterable, Iterator

from torch import nn


@contextlib.contextmanager
def evaluation_mode(roots: Iterable[nn.Module]) -> Iterator[None]:
    """Evaluation mode inside the block, for each module its own mode after it: a part of a model may be in evaluation
    mode for good.
    """
    modes = [(module, module.training) for root in roots for module in root.modules()]
    try:
        for module, _ in modes:
            module.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training
