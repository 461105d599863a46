"""Traces a step of a configuration: built as for training, but run on tensors without data."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainapp.assembly.engine import assemble
from trainapp.assembly.model import materialise
from trainapp.assembly.resolved_targets import ResolvedTargets
from trainapp.assembly.resources import Resources, open_resources
from trainapp.config.schema import Config
from trainapp.memory.host import total_bytes
from trainapp.models.inspect import is_of_transformers
from trainapp.optim import precision
from trainapp.planning.absent_gpu import AbsentGpu, EngineOnCuda
from trainapp.planning.recorder import Breakdown, Recorder
from trainapp.planning.simulated_ranks import simulated
from trainapp.planning.values import MadeUpValues, NeedsValues, document_borders
from trainapp.planning.work import Work, longest, planned_config, without_values
from trainapp.torch_private import convertible_fakes, fake_tensor_mode, outside_dispatch_modes, registries_of
from trainapp.units import parse_memory_size

_VARIES = "the batches differ in shape: the plan is for the longest of the first; a longer one needs more"
_MADE_UP = "the model reads values, which were made up: with real ones it may need more"


class TracedEstimator:
    """The estimator that steps on fake tensors. Exact on the CPU, where the kernels' sizes are known.

    gpu: an absent GPU; None for the CPU. Traces set torch's global switches and seed the generators: use it in a
    separate process. Raises the model's errors on tensors without data; NeedsValues if it reads values.
    """

    method = "traced"

    def __init__(self, targets: ResolvedTargets, world_size: int, gpu: AbsentGpu | None = None, refuses: bool = True):
        self.targets, self.world_size, self.gpu, self.refuses = targets, world_size, gpu, refuses
        self._is_of_transformers = False

    @property
    def margin(self) -> float:
        """The relative error of a peak."""
        if not self.refuses:
            return 0.3
        if self.gpu is not None:
            return self.gpu.margin
        # Transformers builds other masks for fake tensors: peaks of a small Llama were up to 6.3% too high.
        return 0.07 if self._is_of_transformers else 0.01

    @property
    def spare(self) -> float:
        """The fraction of a peak that must stay free for it to fit."""
        return 0.0 if self.gpu is None and self.refuses else self.margin

    def limit(self, config: Config) -> int:
        """The bytes that a run may use."""
        if self.gpu is not None:
            return self.gpu.limit(config)
        total = total_bytes()
        return total if config.memory.limit is None else parse_memory_size(config.memory.limit, total)

    def peak(self, config: Config, size: int) -> Breakdown:
        """The peak with micro-batches of this size on the first rank, which has the most samples and largest shards."""
        if config.train.compile or config.precision.mode in ("int8", "fp8"):
            raise NeedsValues("no trace knows what compiled steps and 8-bit matmuls allocate")
        with simulated(0, self.world_size, torch.device("cpu")) as ranks, contextlib.ExitStack() as stack:
            targets, gpu, samples = self.targets, self.gpu, config.batch.global_size
            # A step of many micro-batches peaks in its second one and again in all later ones, so two are planned (of
            # fewer than three, the second need not be full); all of them where each leaves memory for the next.
            if not targets.has_embeddings and -(-samples // ranks.world_size) >= 3 * size:
                samples = 2 * size * ranks.world_size
            planned = planned_config(config, size, samples)
            longest_batch = longest(open_resources(planned, ranks, targets).batches, size)
            resources = open_resources(planned, ranks, targets)
            host = resources.device
            if gpu is not None:
                resources.device = gpu.device
                stack.enter_context(gpu.pretended())
            resources.memory = recorder = Recorder(resources.device)
            resources.initial_device = str(resources.device)
            fake = functools.partial(_fake, stack.enter_context(fake_tensor_mode()).from_tensor, resources.device)
            values = MadeUpValues(lambda: recorder.phase() if recorder.watching else None, self.refuses)
            stack.enter_context(values)
            if gpu is not None:
                stack.enter_context(contextlib.nullcontext() if gpu.on_cpu else EngineOnCuda())
                resources.numerics = precision.build(
                    planned.precision, resources.device
                )  # the device's autocast and scaler
            if ranks.world_size > 1:
                ranks.device = resources.device
            resources.targets = dataclasses.replace(targets, model=_model_without_data(resources, fake, host))
            engine = assemble(planned, resources, ranks)
            stack.enter_context(document_borders(bool(targets.spec.get("packed"))))
            engine.is_first = False  # the first step's additional checks read values
            self._is_of_transformers = any(map(is_of_transformers, engine.state.model.modules()))
            work = Work(planned, engine, resources, size, lambda fetched: without_values(fetched, fake, longest_batch))
            if gpu is not None:
                gpu.prepare(engine)
            found = work.peak(recorder)
            notes = [*([_VARIES] if longest_batch else []), *([_MADE_UP] if values.reads else [])]
            found = dataclasses.replace(found, notes=(*found.notes, *notes))
            return found if gpu is None else gpu.completed(found, engine, config)


def _fake(from_tensor: Callable[[Tensor], Tensor], device: torch.device, tensor: Tensor) -> Tensor:
    """A fake tensor on the device. On the CPU, a view of a data set's table is faked as a view: not counted."""
    can_view = device.type == "cpu" and tensor.layout is torch.strided
    is_view = can_view and tensor.untyped_storage().nbytes() != tensor.nbytes
    with outside_dispatch_modes() if is_view else contextlib.nullcontext():  # creating it would be counted
        return from_tensor(tensor).to(device)


# --- models without data


def _model_without_data(
    resources: Resources, fake: Callable[[Tensor], Tensor], device: torch.device
) -> Callable[..., nn.Module]:
    """The model's class, called by `assemble` under a fake mode. Builds it without data if possible; otherwise for
    real, for lazy modules and models that read values, and then drops the data.
    """
    targets = resources.targets

    @functools.wraps(targets.model, updated=())
    def made(*args: Any, **kwargs: Any) -> nn.Module:
        try:
            with convertible_fakes():
                return cast(nn.Module, targets.model(*args, **kwargs))
        except Exception as error:
            first = error
        try:
            with outside_dispatch_modes(), torch.device(device):
                model: nn.Module = targets.model(*args, **kwargs)
                materialise(model, resources, device)
        except Exception as error:
            raise error from first
        _drop_data(model, fake)
        return model

    return made


def _drop_data(model: nn.Module, fake: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer by one without data. Shared memory stays shared."""
    replaced: dict[int, Any] = {}
    for module in model.modules():
        parameters, buffers, _ = registries_of(module)
        for name, tensor in [*parameters.items(), *buffers.items()]:
            if tensor is None:
                continue
            if id(tensor) not in replaced:
                new = fake(tensor.detach())
                if isinstance(tensor, nn.Parameter):
                    new = nn.Parameter(new, tensor.requires_grad)
                    if type(tensor) is nn.Parameter:
                        vars(new).update(vars(tensor))  # attributes set by the model
                replaced[id(tensor)] = new
            setattr(module, name, replaced[id(tensor)])  # an RNN also keeps its weights in a list
