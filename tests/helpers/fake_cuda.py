"""Training steps on fake CUDA tensors, on a machine without a GPU: shapes and devices are real, memory and kernels are
not. It shows what the step asks of the device, above all where it would wait for it.

Run as a program, it reads `{name: {"overrides": [...], ...}}` from stdin and prints what `measure` returns for each. A
process of its own: `give_autograd_a_device` replaces parts of torch for good.
"""

import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import runs
import torch

from trainapp.assembly import build
from trainapp.assembly.resources import open_resources
from trainapp.losses.losses import CheckedTask
from trainapp.optim.precision import NonFiniteCheck, Precision
from trainapp.parallel.ranks import SingleRank
from trainapp.planning.pretend import give_autograd_a_device
from trainapp.planning.recorder import Recorder
from trainapp.planning.work import without_values
from trainapp.run.first_sizes import initial_sizes
from trainapp.signals import StopRequest
from trainapp.torch_private import READ_OPERATORS, DispatchMode, fake_tensor_mode
from trainapp.training import loop
from trainapp.training.limits import Interval

CUDA = torch.device("cuda", 0)
SAMPLES = 8  # in each of two micro-batches
STEPS = 6  # a size is validated after three
_aten = torch.ops.aten
# Besides reads of single values: operations whose result has a size that only the device knows, and comparisons.
_WAITING = {
    *READ_OPERATORS,
    _aten.nonzero.default,
    _aten.equal.default,
    _aten.masked_select.default,
    _aten.is_nonzero.default,
    _aten.bincount.default,
    _aten._unique2.default,
    _aten.repeat_interleave.Tensor,
}


class Requests(DispatchMode):
    """What operations on CUDA tensors ask of the device, and stands in for its answers: False, 1 and 1.0.

    waits: the operations that would wait for it, with the place in this program.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._waits(func, args, kwargs):
            self.waits.append(f"{func} in {_place()}")
        if func in READ_OPERATORS and getattr(args[0], "constant", None) is None:
            return False if args[0].dtype == torch.bool else 1.0 if args[0].dtype.is_floating_point else 1
        return func(*args, **kwargs)

    def _waits(self, func: Any, args: Any, kwargs: Any) -> bool:
        if func in _WAITING:
            return args[0].device.type == "cuda"
        if func is _aten._to_copy.default:
            target, source = torch.device(kwargs.get("device") or args[0].device), args[0].device
        elif func is _aten.copy_.default:
            target, source = args[0].device, args[1].device
        else:
            return False
        # To the host, a copy that does not wait would be read before it is there.
        return target.type != source.type and not (kwargs.get("non_blocking") and target.type == "cuda")


def _place() -> str:
    """Where in this program the operation was called."""
    frames = [f for f in traceback.extract_stack() if f"{os.sep}src{os.sep}trainapp{os.sep}" in f.filename]
    inner = [f for f in frames if Path(f.filename).name != "live_tensors.py"]  # a dispatch mode: on top of every stack
    return f"{Path(inner[-1].filename).name}: {inner[-1].line}" if inner else "the autograd engine"


class TwoRanks(SingleRank):
    """Seen from one of two ranks with equal data."""

    world_size, device = 2, CUDA

    def all_reduce_sum(self, value: torch.Tensor) -> torch.Tensor:
        return value * 2


def measure(overrides: list[str], scaled: bool = False, ranks: int = 1, task: str = "") -> dict[str, Any]:
    """`{"waits", "skipped"}` of the last step: its size is validated, and it is not logged.

    scaled: with a loss scaler, as fp16 has. task: the name of a function in this file to wrap the task.
    """
    with twin(overrides, CUDA, scaled, ranks, task) as (run, requests):
        for _ in range(STEPS):
            requests.waits.clear()
            loop.train_step(run)
            loop.update_weight_average(run)
        assert not run.sizes.train.is_unvalidated
        return {"waits": requests.waits, "skipped": run.state.progress.skipped}


def waiting(task: Any) -> Any:
    """A task that reads its loss."""

    def reads(model: Any, batch: Any) -> Any:
        loss, *rest = task(model, batch)
        float(loss.detach())
        return (loss, *rest)

    return CheckedTask(reads, "task=waiting")


@contextlib.contextmanager
def twin(overrides: list[str], device: torch.device, scaled: bool = False, ranks: int = 1, task: str = ""):
    """A run of the configuration on fake tensors of the device, and what it asks of it."""
    sizes = (f"batch.global_size={2 * SAMPLES}", f"batch.micro_size={SAMPLES}")
    config = runs.configure(Path(tempfile.mkdtemp()), *overrides, *sizes, "checkpointing=off")
    resources = open_resources(config, SingleRank())
    resources.initial_device = str(device)
    if task:
        resources.targets = dataclasses.replace(resources.targets, task=globals()[task](resources.targets.task))
    resources.device, resources.memory = device, Recorder(device)
    if device.type == "cuda" and config.optimizer.target.rpartition(".")[2] not in ("Adam", "AdamW"):
        # Of torch 2.13's fused optimizers, only these have a kernel for fake tensors.
        config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, fused=False))
    with pretended_device(), fake_tensor_mode() as mode, Requests() as requests:

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return mode.from_tensor(tensor).to(device, non_blocking=True)  # as the loader does, from pinned memory

        scaler = torch.amp.GradScaler(device.type, enabled=scaled)
        resources.numerics = Precision("fp32", torch.float32, contextlib.nullcontext(), scaler)
        fetched = resources.batches.micro_batches
        resources.batches.micro_batches = lambda *of: without_values(fetched(*of), moved, None)
        run = build.session_of(config, resources, StopRequest(), SingleRank())
        run.sizes = initial_sizes(run)
        run.limits = dataclasses.replace(run.limits, log=0, evaluate=Interval(), save=Interval())
        if ranks > 1:
            run.ranks = run.strategy.ranks = TwoRanks()
        yield run, requests


@contextlib.contextmanager
def pretended_device():
    """The two things that are asked of CUDA itself rather than of a tensor on it."""
    state = torch.zeros(16, dtype=torch.uint8)  # of the generator, which lives on the host
    with (
        mock.patch.object(torch.cuda, "get_rng_state", return_value=state),
        mock.patch.object(torch.cuda, "set_rng_state"),
        mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", return_value=False),
    ):
        yield


def offloaded(policy: str) -> dict[str, Any]:
    """The check of a step whose gradients are on the host, as FSDP's `cpu_offload` keeps them."""
    with fake_tensor_mode(), Requests() as requests:
        check = NonFiniteCheck(policy, CUDA, False, lambda: None)
        loss, count = torch.full((), 2.0, device=CUDA), torch.full((), 2.0, dtype=torch.float64, device=CUDA)
        norm = torch.full((), 2.0)
        applied = check.allows_update(0, loss, norm, count)
        return {"waits": requests.waits, "applied": applied}


if __name__ == "__main__":
    give_autograd_a_device()
    functions = {"measure": measure, "offloaded": offloaded}
    found = {}
    for label, arguments in json.load(sys.stdin).items():
        function = functions[arguments.pop("function", "measure")]
        found[label] = function(**arguments)
    print(json.dumps(found), flush=True)
    os._exit(0)  # the engine's threads still point to what this module has made
