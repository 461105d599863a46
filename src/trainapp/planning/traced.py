"""Traces a step of a configuration: built as for training, but run on tensors without data."""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainapp.assembly.engine import assemble
from trainapp.assembly.model import materialise
from trainapp.assembly.resolved_targets import ResolvedTargets
from trainapp.assembly.resources import Resources, open_resources
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.memory.host import total_bytes
from trainapp.models.inspect import blocks_of, is_of_transformers
from trainapp.optim import precision
from trainapp.planning.absent_gpu import AbsentGpu
from trainapp.planning.cuda_kernels import EngineOnCuda
from trainapp.planning.recorder import Breakdown, Recorder, UnequalBlocks, extrapolated
from trainapp.planning.simulated_ranks import simulated
from trainapp.planning.values import MadeUpValues, NeedsValues, document_borders
from trainapp.planning.work import Fake, Work, largest_share, longest, planned_config, without_values
from trainapp.torch_private import convertible_fakes, fake_tensor_mode, outside_dispatch_modes, registries_of
from trainapp.units import parse_memory_size

FEW_BLOCKS = (2, 4)  # numbers of blocks of the two traces from which a model of more equal blocks is extrapolated
MOST_FULL_BLOCKS = 6  # a model of more equal blocks is extrapolated: the two traces together have as many
MOST_DEVIATION = 0.01  # of extrapolated peaks from those of the first full traces; with more, all traces are full
_VARIES = "the batches differ in shape: the plan is for the longest of the first; a longer one needs more"
_MADE_UP = "the model reads values, which were made up: with real ones it may need more"
log = logging.getLogger(__name__)


class TracedEstimator:
    """The estimator that steps on fake tensors. Exact on the CPU, where the kernels' sizes are known.

    A trace costs time per block. Of a model of many equal blocks, the first trace has all of them, and later ones a few
    if the first peak can be extrapolated from these.

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
        self._blocks = 0  # number of the model's blocks, known after the first trace
        self._leaves_out_blocks: bool | None = None  # None before the first trace
        self._extrapolated: dict[tuple[str, int], Breakdown] = {}  # by configuration and size; they hold no events

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
        shards; extrapolated from a few blocks where that is known to agree with a trace of all.
        """
        if self._leaves_out_blocks is None:
            breakdown = self.full_peak(config, size)
            self._blocks = breakdown.blocks
            self._leaves_out_blocks = self._can_be_extrapolated(config, size, breakdown)
            return breakdown

        if self._leaves_out_blocks and _has_equal_settings(config):
            try:
                return self._extrapolated_peak(config, size)
            except (UserError, UnequalBlocks) as error:  # the full trace tells whether it is of the configuration
                log.debug("not extrapolated: %s", error)
        return self.full_peak(config, size)

    def _can_be_extrapolated(self, config: Config, size: int, full: Breakdown) -> bool:
        """Return whether the peak of the model with all blocks is known from a few of them: at this size and at the
        largest, at which activations count the most.

        Args:
            config: the configuration.
            size: of a micro-batch.
            full: its peak with all blocks.
        """
        # With several ranks, what is gathered ahead and when depends on the number of blocks.
        if self.world_size > 1 or self._blocks <= MOST_FULL_BLOCKS or not _has_equal_settings(config):
            return False
        largest = largest_share(config, self.targets, self.world_size)
        try:
            if not _agree(self._extrapolated_peak(config, size), full):
                return False
            if size == largest:
                return True
            return _agree(self._extrapolated_peak(config, largest), self.full_peak(config, largest))
        except Exception as error:  # the model's own: its forward may need all blocks
            log.debug("blocks cannot be left out: %s", error)
            return False

    def _extrapolated_peak(self, config: Config, size: int) -> Breakdown:
        """Return the peak on the lines through the traces with FEW_BLOCKS. Raises UnequalBlocks."""
        key = (repr(config), size)
        if key in self._extrapolated:
            return self._extrapolated[key]

        settings = config.activation_checkpointing
        traces: dict[int, Breakdown] = {}
        for count in FEW_BLOCKS:
            modes = None if settings.modes is None else settings.modes[:count]
            with_modes = dataclasses.replace(settings, modes=modes)
            changed = dataclasses.replace(config, activation_checkpointing=with_modes)
            traces[count] = self.full_peak(changed, size, count)
        self._extrapolated[key] = extrapolated(traces, self._blocks)
        return self._extrapolated[key]

    def full_peak(self, config: Config, size: int, blocks: int | None = None) -> Breakdown:
        """Return the peak of a trace: see `peak`. Raises UnequalBlocks.

        Args:
            config: the configuration.
            size: of a micro-batch.
            blocks: number of the model's blocks that the trace has, the first ones; None: all.
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
            model_class = _model_without_data(resources, fake, host, blocks)
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
            if gpu is not None:
                breakdown = gpu.with_untraced_memory(breakdown, engine, config)
            if blocks is None:  # nothing is extrapolated from it
                breakdown = dataclasses.replace(breakdown, spans=())
            return breakdown

    def _planned_samples(self, config: Config, size: int) -> int:
        """Return the samples of the planned step, over all ranks.

        A step of many micro-batches peaks in its second one and again in all later ones, so two are planned (of fewer
        than three, the second need not be full); all of them where each leaves memory for the next.
        """
        has_three_full = largest_share(config, self.targets, self.world_size) >= 3 * size
        if has_three_full and not self.targets.has_embeddings:
            return 2 * size * self.world_size
        return config.batch.global_size


def _agree(from_few_blocks: Breakdown, full: Breakdown) -> bool:
    return abs(from_few_blocks.total - full.total) <= MOST_DEVIATION * full.total


def _has_equal_settings(config: Config) -> bool:
    """Return whether the configuration treats all blocks alike."""
    settings = config.activation_checkpointing
    if settings.modes is not None:
        return len(set(settings.modes)) == 1
    return settings.mode == "none" or settings.every == 1


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


def _model_without_data(
    resources: Resources, fake: Fake, device: torch.device, blocks: int | None
) -> Callable[..., nn.Module]:
    """Return the model's class, for `assemble` to call under a fake mode. Builds the model without data if possible;
    otherwise for real, for lazy modules and models that read values, and then drops the data.

    Args:
        resources: with the targets and data of the run.
        fake: removes the data of a tensor.
        device: on which a real model is built.
        blocks: number of blocks to keep; None keeps all.
    """
    model_class = resources.targets.model

    @functools.wraps(model_class, updated=())
    def build_without_data(*args: Any, **kwargs: Any) -> nn.Module:
        # Without data.
        try:
            with convertible_fakes():
                model = cast(nn.Module, model_class(*args, **kwargs))
        except Exception as error:
            first_error = error
        else:
            _keep_blocks(model, blocks)
            return model

        # For real, outside of the fake mode.
        try:
            with outside_dispatch_modes(), torch.device(device):
                model = model_class(*args, **kwargs)
                materialise(model, resources, device)
        except Exception as error:
            raise error from first_error

        _drop_data(model, fake)
        _keep_blocks(model, blocks)
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


# --- models with a few of their blocks


def _keep_blocks(model: nn.Module, count: int | None) -> None:
    """Remove all blocks but the first from the model's list of them; None removes none. Raises UnequalBlocks."""
    if count is None:
        return
    blocks = blocks_of(model, "blocks()")
    if not _are_equal(blocks):
        raise UnequalBlocks("the blocks differ")
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and list(module) == blocks:
            del module[count:]
            return
    raise UnequalBlocks("no nn.ModuleList consists of the blocks")


def _are_equal(blocks: Sequence[nn.Module]) -> bool:
    """Return whether blocks have the same modules, tensors and settings, except for their own indices."""
    if len({_structure(block) for block in blocks}) > 1:
        return False
    settings = [_settings(block) for block in blocks]
    for name, first in settings[0].items():
        values = [of_block.get(name) for of_block in settings]
        is_same = all(value == first for value in values)
        is_index = type(first) is int and values == list(range(first, first + len(blocks)))
        if not (is_same or is_index):
            return False
    return True


def _structure(block: nn.Module) -> tuple[Any, ...]:
    """Return the classes of the block's modules, and the shapes, dtypes and kinds of its tensors, by their names."""
    parts: list[Any] = []
    for name, module in block.named_modules():
        parts.append((name, type(module)))
    for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
        parts.append((name, tensor.shape, tensor.dtype, tensor.requires_grad))
    return tuple(parts)


def _settings(block: nn.Module) -> dict[str, Any]:
    """Return the plain values that are attributes of the block's modules, by their full names."""
    settings = {}
    for path, module in block.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, (bool, int, float, str, tuple, type(None))):
                settings[f"{path}.{name}"] = value
    return settings
