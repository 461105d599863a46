"""Two of torch's functions without the Python around them, which a usual training step does not need; and what its
engine for backward keeps.

In a step of 1.6 ms on a CPU that Python takes 0.15 ms, nearly a tenth: 14 calls around each backward, and a record for
the profiler around the optimizer's step. Anything unusual takes the documented path.

Used on torch 2.11 and 2.13; `tests/test_torch_direct.py` compares both ways.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.autograd.graph import _engine_run_backward
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from trainapp.torch_private import outside_dispatch_modes

# The code object that every wrapped `step` shares. A `step` that is wrapped again or replaced has another.
_WRAPPER = Optimizer.profile_hook_step(lambda: None).__code__

with torch.inference_mode(False), torch.enable_grad():  # whatever is in force at the import
    _LEAF = torch.zeros((), device="cpu", requires_grad=True)
    _FIRST = _LEAF.clone()  # before all other nodes of a run: the engine takes it last


def backward(loss: Tensor, gradient: Tensor) -> None:
    """`loss.backward(gradient)` for scalars."""
    if type(loss) is Tensor and type(gradient) is Tensor and loss.dtype is gradient.dtype and not loss.ndim:
        _engine_run_backward((loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)
    else:
        loss.backward(gradient)


def release_failed_backward() -> None:
    """Free what a failed backward in this thread had saved.

    Its nodes stay in the thread's queue with all that they have saved, until the next backward finds them there (torch
    2.13, autograd/engine.cpp, `thread_main` and `local_ready_queue`): memory that a retried forward lacks.
    """
    with outside_dispatch_modes():
        torch.autograd.grad(_FIRST, _LEAF, retain_graph=True)


def step(optimizer: Optimizer) -> None:
    """`optimizer.step()`. Without a record for the profiler where none is active, and no hooks are registered."""
    method: Any = getattr(type(optimizer), "step", None)
    is_usual = getattr(method, "__code__", None) is _WRAPPER and "step" not in vars(optimizer)
    if is_usual and not _is_observed(optimizer):
        method.__wrapped__(optimizer)
    else:
        optimizer.step()


def _is_observed(optimizer: Optimizer) -> bool:
    return bool(
        profiler._is_profiler_enabled
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    )
