"""Errors for blocks that cannot be recomputed. mode: the setting's value."""

import re
from typing import Any

import torch
from torch import nn

from trainapp.errors import TrainingStopped, UserError
from trainapp.techniques.contents import DEPTH, MOST_VALUES, Path

# The searches and restarts after an error know memory and devices by their words.
_OF_DEVICES = re.compile(r"memory|alloc|mmap|driver|CUDA|cuDNN|cuBLAS|CUSOLVER|CUFFT|HIP|MIOPEN|[NR]CCL|XPU|MPS", re.I)
ARGUMENT = -1  # in a path, for an argument of the block, in the place of a dictionary's number
_MOST_STEPS = 10  # of a path in a message


def changed(mode: str, block: nn.Module, path: Path, value: Any) -> TrainingStopped:
    """For a value that the forward has changed, and that cannot be put back."""
    return TrainingStopped(
        f"activation_checkpointing={mode}: {_text_of(path)} of a {type(block).__name__}, a {type(value).__module__}."
        f"{type(value).__qualname__}, is changed by its forward, and what it held before is lost, so that the block "
        "cannot be recomputed; keep it in a buffer, a number, a list or a dictionary of the block (a tensor that it is "
        "called with: write to a copy), or use activation_checkpointing=none"
    )


def written_elsewhere(mode: str, block: nn.Module, name: str) -> TrainingStopped:
    """For a tensor that has been written since the forward, and that no copy was made of."""
    return TrainingStopped(
        f"activation_checkpointing={mode}: `{name}` in a {type(block).__name__} is written in some forwards only, or "
        "by another module, and what it held before is lost, so that the block cannot be recomputed; register it as a "
        "buffer of the block, or use activation_checkpointing=none"
    )


def too_many(mode: str, block: nn.Module, path: Path) -> TrainingStopped:
    """For a value that is not looked into."""
    return TrainingStopped(
        f"activation_checkpointing={mode}: a {type(block).__name__} holds, or is called with, more than "
        f"{MOST_VALUES:,} lists, objects and the like, or more than {DEPTH} within each other, and {_text_of(path)} is "
        "beyond that: what its forward changes there would not be put back for a recomputation; keep them in an array "
        "or a tensor, or use activation_checkpointing=none"
    )


def failed(mode: str, block: nn.Module, error: Exception) -> RuntimeError:
    """For an error that only the recomputation has raised."""
    return RuntimeError(
        f"activation_checkpointing={mode}: the recomputation of a {type(block).__name__} failed with the error above, "
        f"where its forward had not ({type(error).__name__}: {error}); {_advice(error)}"
    )


def is_of_the_block(error: Exception) -> bool:
    """Whether the block's own code has failed, and not memory or a device, nor is it how torch ends a recomputation."""
    if isinstance(error, (UserError, torch.OutOfMemoryError, torch.AcceleratorError, MemoryError, OSError)):
        return False
    return not _is_of_torch(error) and not _OF_DEVICES.search(str(error))


def _advice(error: Exception) -> str:
    """What is the likely reason, and what to do."""
    if "early_stop is set" in str(error) or _is_of_torch(error.__context__):
        return (
            "the block catches the exception with which torch ends a recomputation, as `except Exception:` does: let "
            "it catch only the errors that it expects, or use activation_checkpointing=none"
        )
    if "has been mutated" in str(error):
        return (
            "the block writes in place to a result that is kept, as ReLU(inplace=True) after a linear layer does: use "
            "activation_checkpointing=full or activation_checkpointing=budget"
        )
    return (
        "the block depends on something that has changed since, or on being run only once: use "
        "activation_checkpointing=none"
    )


def _is_of_torch(error: BaseException | None) -> bool:
    return type(error).__module__ == "torch.utils.checkpoint"


def _text_of(path: Path) -> str:
    (place, name), *steps = path
    if len(steps) > _MOST_STEPS:
        steps[_MOST_STEPS:] = ["..."]
    return f"argument {name}{''.join(steps)}" if place == ARGUMENT else f"`{name}{''.join(steps)}`"
