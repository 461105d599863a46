"""Modes for a trial call: evaluation mode, and nothing compiled."""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
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


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Compiled functions run as they are inside the block: the shapes of a few samples must not shape their code."""
    if "torch._dynamo" not in sys.modules:  # importing it takes a second
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")
