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
from trainapp.planning.absent_gpu import AbsentGpu
from trainapp.planning.cuda_kernels import EngineOnCuda
from trainapp.planning.recorder import Breakdown, Recorder
from trainapp.planning.simulated_ranks import simulated
from trainapp.planning.values import MadeUpValues, NeedsValues, document_borders
from trainapp.planning.work import Fake, Work, largest_share, longest, planned_config, without_values
from trainapp.torch_private import convertible_fakes, fake_tensor_mode, outside_dispatch_modes, registries_of
from trainapp.units import parse_memory_size

_VARIES = "the batches differ in shape: the plan is for the longest of the first; a longer one needs more"
_MADE_UP = "the model reads values, which were made up: with real ones it may need more"


class TracedEstimator:
    """The estimator that steps on fake tensors. Exact on the CPU, where the kernels' sizes are known.

    Traces set torch's global switches and seed the generators: use it in a separate process. Raises the model's errors
    on tensors without data; NeedsValues if it reads values.

    Args:
        targets: the classes and data sets of the configuration.
        world_size: number of ranks to plan for.
        gpu: an absent GPU; None for the CPU.
        refuses: whether a model that reads values is refused; otherwise it gets made-up ones.
    """

    method = "traced"

    def __init__(self, targets: ResolvedTargets, world_size: int, gpu: AbsentGpu | None = None, refuses: bool = True):
        self.targets = targets
        self.world_size = world_size
        self.gpu = gpu
        self.refuses = refuses
        self._is_of_transformers = False  # the last model that was traced

    @property
    def margin(self) -> float:
        """The relative error of a peak."""
        if not self.refuses:
            return 0.3
        if self.gpu is not None:
            return self.gpu.margin
        if self._is_of_transformers:  # which builds other masks for fake tensors: a small Llama's peaks were 6.3% high
            return 0.07
        return 0.01

    @property
    def spare(self) -> float:
        """The fraction of a peak that must stay free for it to fit."""
        is_exact = self.gpu is None and self.refuses
        return 0.0 if is_exact else self.margin

    def limit(self, config: Config) -> int:
        """Return the bytes that a run may use."""
        if self.gpu is not None:
            return self.gpu.limit(config)
        total = total_bytes()
        if config.memory.limit is None:
            return total
        return parse_memory_size(config.memory.limit, total)

    def peak(self, config: Config, size: int) -> Breakdown:
        """Return the peak with micro-batches of this size on the first rank, which has the most samples and largest
        shards.
        """
        if config.train.compile or config.precision.mode in ("int8", "fp8"):
            raise NeedsValues("no trace knows what compiled steps and 8-bit matmuls allocate")
        gpu = self.gpu
        with simulated(0, self.world_size, torch.device("cpu")) as ranks, contextlib.ExitStack() as modes:
            # Real data, opened twice: the first time only to compare the batches' shapes.
            planned = planned_config(config, size, self._planned_samples(config, size))
            longest_batch = longest(open_resources(planned, ranks, self.targets).batches, size)
            resources = open_resources(planned, ranks, self.targets)
            host = resources.device

            # The device that the step sees, and its memory.
            if gpu is not None:
                resources.device = gpu.device
                modes.enter_context(gpu.pretended())
            if ranks.world_size > 1:
                ranks.device = resources.device
            recorder = Recorder(resources.device)
            resources.memory = recorder
            resources.initial_device = str(resources.device)

            # From here on tensors have no data, and reads of their values get made-up answers.
            fake_mode = modes.enter_context(fake_tensor_mode())
            fake = functools.partial(_fake, fake_mode.from_tensor, resources.device)
            values = MadeUpValues(lambda: recorder.phase() if recorder.watching else None, self.refuses)
            modes.enter_context(values)
            if gpu is not None:
                if not gpu.on_cpu:
                    modes.enter_context(EngineOnCuda())
                resources.numerics = precision.build(planned.precision, resources.device)  # its autocast and scaler

            # The engine, as for training.
            model_class = _model_without_data(resources, fake, host)
            resources.targets = dataclasses.replace(self.targets, model=model_class)
            engine = assemble(planned, resources, ranks).engine
            modes.enter_context(document_borders(bool(self.targets.spec.get("packed"))))
            engine.is_first = False  # the first step's additional checks read values
            self._is_of_transformers = any(map(is_of_transformers, engine.state.model.modules()))
            if gpu is not None:
                gpu.prepare(engine)

            fetched = functools.partial(without_values, fake=fake, longest_batch=longest_batch)
            breakdown = Work(planned, engine, resources, size, fetched).peak(recorder)
            if longest_batch is not None:
                breakdown = dataclasses.replace(breakdown, notes=(*breakdown.notes, _VARIES))
            if values.reads:
                breakdown = dataclasses.replace(breakdown, notes=(*breakdown.notes, _MADE_UP))
            return breakdown if gpu is None else gpu.with_untraced_memory(breakdown, engine, config)

    def _planned_samples(self, config: Config, size: int) -> int:
        """Return the samples of the planned step, over all ranks.

        A step of many micro-batches peaks in its second one and again in all later ones, so two are planned (of fewer
        than three, the second need not be full); all of them where each leaves memory for the next.
        """
        has_three_full = largest_share(config, self.targets, self.world_size) >= 3 * size
        if has_three_full and not self.targets.has_embeddings:
            return 2 * size * self.world_size
        return config.batch.global_size


def _fake(from_tensor: Callable[[Tensor], Tensor], device: torch.device, tensor: Tensor) -> Tensor:
    """Return a fake tensor on the device. On the CPU, a view of a data set's table is faked as a view: not counted."""
    can_view = device.type == "cpu" and tensor.layout is torch.strided
    is_view = can_view and tensor.untyped_storage().nbytes() != tensor.nbytes
    context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if is_view:  # creating it would be counted
        context = outside_dispatch_modes()
    with context:
        return from_tensor(tensor).to(device)


# --- models without data


def _model_without_data(resources: Resources, fake: Fake, device: torch.device) -> Callable[..., nn.Module]:
    """Return the model's class, for `assemble` to call under a fake mode. Builds the model without data if possible;
    otherwise for real, for lazy modules and models that read values, and then drops the data.

    Args:
        resources: with the targets and data of the run.
        fake: removes the data of a tensor.
        device: on which a real model is built.
    """
    model_class = resources.targets.model

    @functools.wraps(model_class, updated=())
    def build_without_data(*args: Any, **kwargs: Any) -> nn.Module:
        # Without data.
        try:
            with convertible_fakes():
                return cast(nn.Module, model_class(*args, **kwargs))
        except Exception as error:
            first_error = error

        # For real, outside of the fake mode.
        try:
            with outside_dispatch_modes(), torch.device(device):
                model: nn.Module = model_class(*args, **kwargs)
                materialise(model, resources, device)
        except Exception as error:
            raise error from first_error

        _drop_data(model, fake)
        return model

    return build_without_data


def _drop_data(model: nn.Module, fake: Fake) -> None:
    """Replace every parameter and buffer by one without data. Shared memory stays shared."""
    fakes: dict[int, Tensor] = {}  # by id of the real tensor
    for module in model.modules():
        parameters, buffers, _ = registries_of(module)
        for name, tensor in [*parameters.items(), *buffers.items()]:
            if tensor is None:
                continue
            if id(tensor) not in fakes:
                fakes[id(tensor)] = _without_data(tensor, fake)
            # By assignment rather than in the registry: an RNN also keeps its weights in a list.
            setattr(module, name, fakes[id(tensor)])


def _without_data(tensor: Tensor, fake: Fake) -> Tensor:
    """Return a fake of a parameter or buffer."""
    without_data = fake(tensor.detach())
    if not isinstance(tensor, nn.Parameter):
        return without_data
    parameter = nn.Parameter(without_data, tensor.requires_grad)
    if type(tensor) is nn.Parameter:
        vars(parameter).update(vars(tensor))  # attributes set by the model
    return parameter
