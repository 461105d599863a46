"""What is wrong where the recomputation of a block fails, and its forward had not."""

import re

import torch

from trainapp.errors import UserError

# The searches and restarts after an error know memory and devices by their words.
_OF_DEVICES = re.compile(r"memory|alloc|mmap|driver|CUDA|cuDNN|cuBLAS|CUSOLVER|CUFFT|HIP|MIOPEN|[NR]CCL|XPU|MPS", re.I)


def is_of_the_block(error: Exception) -> bool:
    """Whether the block's own code has failed, and not memory or a device, nor is it how torch ends a recomputation."""
    if isinstance(error, (UserError, torch.OutOfMemoryError, torch.AcceleratorError, MemoryError, OSError)):
        return False
    return not _is_of_torch(error) and not _OF_DEVICES.search(str(error))


def advice(error: Exception) -> str:
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
