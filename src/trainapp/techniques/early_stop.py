"""Whether torch may end a block's recomputation as soon as the last tensor for backward is saved."""

import functools
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_RRELU = {"rrelu", "rrelu_", "rrelu_with_noise", "rrelu_with_noise_"}
_CALLABLES = (types.BuiltinFunctionType, types.FunctionType, functools.partial)
_FUNCTIONS = (nn.functional.rrelu, nn.functional.rrelu_, torch.rrelu, torch.rrelu_)


def may_stop_early(modules: Iterable[nn.Module]) -> bool:
    """Not with RReLU: its noise is saved before it is drawn (torch 2.13), so that backward would read what was in the
    memory before. Stopping early spares other blocks the recomputation of their last product.

    Sees `nn.RReLU`, forwards of classes that name the function, and modules that hold it as an attribute.
    """
    return not any(_calls_rrelu(module) for module in modules)


def _calls_rrelu(module: nn.Module) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    held = (getattr(value, "func", value) for value in vars(module).values() if isinstance(value, _CALLABLES))
    return (code is not None and _names_rrelu(code)) or any(
        value is function for value in held for function in _FUNCTIONS
    )


def _names_rrelu(code: Any) -> bool:
    """Functions that are defined in this one included."""
    inner = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return not _RRELU.isdisjoint(code.co_names) or any(map(_names_rrelu, inner))
