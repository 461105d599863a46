"""The run that a trace takes its steps with: built as for training, on tensors that have shapes but no data."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from trainapp.assembly import build
from trainapp.assembly.components import Components
from trainapp.config.schema import Config
from trainapp.data.batch import MicroBatch, elements_in, map_tensors
from trainapp.data.source import EvalBatches, TrainBatches
from trainapp.errors import UserError
from trainapp.optim.optimizers import build_optimizer
from trainapp.parallel.ranks import Ranks
from trainapp.parallel.strategy import is_shard, local
from trainapp.planning import models
from trainapp.planning.assumed_shapes import experts_alike
from trainapp.planning.place import Place
from trainapp.planning.ranks import EqualChunks, SimulatedRanks
from trainapp.planning.recorder import PhaseLog, TracedMemory
from trainapp.planning.traced_part import planned_config, representative, training_shapes
from trainapp.planning.values import MadeUpValues, NoOverflow
from trainapp.planning.ways import Way
from trainapp.signals import StopRequest
from trainapp.torch_private import fake_tensor_mode, is_fake, outside_dispatch_modes, storage_id
from trainapp.train.run import Run

UNTRAINED = 2  # samples of a micro-batch where no training is traced; most models can train on as few


@dataclass(frozen=True)
class Built:
    """A run to be traced. planned: its configuration, see `planned_config`.

    varies: whether micro-batches of the data differ in shape. elements: where those of training do, those of a sample
    in the one that stands for all; else 0. state_is_late: the optimizer has no state before its first step.
    """

    run: Run
    planned: Config
    memory: TracedMemory
    values: MadeUpValues
    varies: bool
    elements: int
    state_is_late: bool


@contextlib.contextmanager
def built(
    config: Config,
    components: Components,
    size: int,
    eval_size: int,
    way: Way,
    place: Place,
    ranks: Ranks,
    real_bytes: int | None,
) -> Iterator[Built]:
    """The run; the modes that it needs are in force inside the block. Arguments: see `traced_run.trace`."""
    planned = planned_config(config, size or UNTRAINED, eval_size or 1, ranks.world, components.has_embeddings)
    shape, eval_shapes = _shapes(planned, components, size, eval_size, way, ranks)
    parts = build.load_parts(planned, ranks, components)
    host, parts.device, parts.accelerator = parts.device, place.device or parts.device, place.accelerator
    if isinstance(ranks, SimulatedRanks):  # the data were opened on the host
        ranks = ranks.on(parts.device)
    parts.memory = memory = TracedMemory(parts.device, place.limit(config), real_bytes)
    values = MadeUpValues(
        way.otherwise, lambda: memory.phase if memory.watching else None, config.train.grad_clip, way.share
    )
    with contextlib.ExitStack() as stack:
        fake: Callable[[Tensor], Tensor] = _unchanged
        if real_bytes is None:
            fake = _without_data(parts, planned, host, place, values, stack)
            if place.device is None:
                fake = _of_data_as_before(fake, memory)
        parts.batches = cast(TrainBatches, place.batches(parts.batches, fake, shape, memory))
        for name, evaluated in parts.eval_sets.items():
            fakes = place.eval_batches(evaluated, fake, eval_shapes.get(name), components.has_embeddings)
            parts.eval_sets[name] = cast(EvalBatches, fakes)
        values.state_is_late = state_is_late = _creates_state_late(planned, host)
        with EqualChunks():
            run = build.run_of(planned, parts, StopRequest(), ranks, initial_device=str(parts.device))
        values.state_is_late = False
        values.shapes.alike = experts_alike(run.state.model)
        if real_bytes is None and place.device is None:
            memory.kept.stand_in = _remembered(fake)
        run.attempt = PhaseLog(memory)
        memory.resident = run.meter.resident
        if _has_padded_shards(run.state.model.parameters()):
            _settle_shards(run)
        elements = 0 if shape is None else -(-elements_in(shape.data) // shape.samples)
        varies = shape is not None or any(shape is not None for shape in eval_shapes.values())
        yield Built(run, planned, memory, values, varies, elements, state_is_late)


def _shapes(
    planned: Config, components: Components, size: int, eval_size: int, way: Way, ranks: Ranks
) -> tuple[MicroBatch | None, dict[str, MicroBatch | None]]:
    """The micro-batches of training and of each evaluation set that stand for all, see `representative`."""
    real = build.load_parts(planned, ranks, components)
    shape = training_shapes(real.batches, size, way.which) if size else None
    if not eval_size:
        return shape, {}
    return shape, {
        name: representative(evaluated.from_sample(0, eval_size, ranks), way.which)
        for name, evaluated in real.eval_sets.items()
    }


def _without_data(
    parts: build.Parts,
    planned: Config,
    host: torch.device,
    place: Place,
    values: MadeUpValues,
    stack: contextlib.ExitStack,
) -> Callable[[Tensor], Tensor]:
    """Enter the modes in which tensors have no data, and prepare model and numerics for them. Returns what makes such a
    tensor of one with data. host: the device that the data are on.
    """
    stack.enter_context(place.outside())
    fake = place.fake(stack.enter_context(fake_tensor_mode()).from_tensor)
    stack.enter_context(values)
    stack.enter_context(place.inside())
    model = models.built_somehow(parts.components, fake, parts.batches.example, host, parts.numerics, values)
    parts.components = dataclasses.replace(parts.components, model=model)
    parts.numerics = place.numerics(planned, parts)
    numerics = {field.name: getattr(parts.numerics, field.name) for field in dataclasses.fields(parts.numerics)}
    parts.numerics = NoOverflow(**numerics, values=values)
    return fake


def _has_padded_shards(parameters: Iterable[nn.Parameter]) -> bool:
    shards = [local(p) for p in parameters if is_shard(p)]
    return any(shard.untyped_storage().nbytes() > shard.nbytes for shard in shards)


def _settle_shards(run: Run) -> None:
    """In its first forward FSDP2 pads fake shards once more, where it recognises real ones as padded (torch 2.13,
    fsdp/_fully_shard/_fsdp_param.py, reset_sharded_param). Afterwards nothing may hold on to the old ones.
    """
    batch = run.batches.example(build.smallest_micro_batch(run.state.model))
    batch = map_tensors(lambda tensor: tensor.to(run.state.device), batch)
    with torch.no_grad(), run.state.precision.autocast:
        run.strategy.evaluate(run.task, batch)
    run.strategy.finish_accumulation()


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _of_data_as_before(fake: Callable[[Tensor], Tensor], memory: TracedMemory) -> Callable[[Tensor], Tensor]:
    """A view of a data set's tensor stays one, which never counts."""

    def made(tensor: Tensor) -> Tensor:
        of_data = memory.kept.of_data
        if storage_id(tensor.untyped_storage()) not in of_data:
            return fake(tensor)
        with outside_dispatch_modes():  # making it would be counted
            new = fake(tensor)
        of_data.add(new.untyped_storage())
        return new

    return made


def _remembered(fake: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Of tensors that existed before the trace, one each: a task may hold some, and use them in every step."""
    made: dict[int, tuple[Tensor, Tensor]] = {}

    def stand_in(tensor: Tensor) -> Tensor:
        if is_fake(tensor):
            return tensor
        if id(tensor) not in made:
            made[id(tensor)] = tensor, fake(tensor)
        return made[id(tensor)][1]

    return stand_in


def _creates_state_late(config: Config, device: torch.device) -> bool:
    """Whether the optimizer has no state before its first step. That depends on values: asked of a tiny real one."""
    for optimizer in config.optimizers.values():
        settings = dataclasses.replace(optimizer, groups=[], layer_decay=None)
        with contextlib.suppress(UserError), outside_dispatch_modes():
            tiny = nn.Linear(2, 2, bias=False, device=device)
            if not build_optimizer(settings, tiny, device, config.user_packages).state:
                return True
    return False
