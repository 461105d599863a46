"""Steps and an evaluation of a configuration, traced: the run is built and goes through its loop on fake tensors."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from trainapp.config.schema import Config
from trainapp.data.batch import bucket_of, elements_in, map_tensors
from trainapp.data.micro_batch import MicroBatch
from trainapp.data.progress import Progress
from trainapp.data.sampler import EvalBatches, TrainBatches
from trainapp.errors import UserError
from trainapp.memory.device import static_bytes
from trainapp.memory.kinds import MemoryKind
from trainapp.optim.optimizers import build_optimizer
from trainapp.parallel.dtensor import is_shard, local
from trainapp.parallel.ranks import Ranks, SingleRank
from trainapp.plan import models
from trainapp.plan.assumed_shapes import Share
from trainapp.plan.place import Place
from trainapp.plan.ranks import EqualChunks
from trainapp.plan.recorder import Peak, PhaseLog, TracedMemory
from trainapp.plan.values import MadeUpValues, NoOverflow, shapes_of
from trainapp.signals import StopRequest
from trainapp.torch_private import fake_tensor_mode, outside_dispatch_modes
from trainapp.train import build
from trainapp.train.components import Components
from trainapp.train.evaluate import evaluate
from trainapp.train.loop import train_step, update_weight_average
from trainapp.train.run import Run

SURVEYED = 256  # samples whose shapes are compared, or two micro-batches of more
Which = Literal["shortest", "longest"]
ON_CPU = Place()


@dataclass(frozen=True)
class Trace:
    """What was measured. training, evaluation: None where not asked for, or where there is none.

    reads: the phases in which the model or the task read values, which were made up. assumed: the operations whose
    results have shapes that depend on values. probed: those that were run for real to know what they allocate.
    varies: whether the micro-batches of the data differ in shape. bucket: where those of training do, the shape that
    was traced, see `bucket_of`; else 0. static: as `Meter.static`. uneven: whether ranks have shards of different
    sizes. smallest: the model cannot train on fewer samples at once. rank: the one that was traced. allocations: what
    the place has recorded.
    """

    training: Peak | None
    evaluation: Peak | None
    reads: tuple[str, ...]
    assumed: tuple[str, ...]
    probed: tuple[str, ...]
    varies: bool
    bucket: int
    static: dict[MemoryKind, int]
    uneven: bool
    smallest: int
    rank: int
    allocations: Any = None

    @property
    def peak(self) -> Peak:
        """The higher one of training and evaluation."""
        both = [peak for peak in (self.training, self.evaluation) if peak is not None]
        return functools.reduce(Peak.joined, both, Peak())


def trace(
    config: Config,
    components: Components,
    size: int,
    eval_size: int,
    *,
    training: bool = True,
    evaluation: bool = True,
    otherwise: bool = False,
    which: Which = "longest",
    place: Place = ON_CPU,
    ranks: Ranks | None = None,
    share: Share = Share.MOST,
    real_bytes: int | None = None,
) -> Trace:
    """Trace training steps with micro-batches of `size` and an evaluation with `eval_size`, on one process.

    otherwise: answer reads of values the other way. share: see `MadeUpValues`. which: where shapes differ, all
    micro-batches are of this one. ranks: as `simulated` gives them; None: a single process. real_bytes: run everything
    for real, with at most so many live bytes.
    Raises whatever the model raises on tensors without data; MemoryLimitExceeded beyond `real_bytes`. Sets torch's
    global switches and seeds the generators: call it in a process of its own.
    """
    ranks = ranks or SingleRank()
    planned = planned_config(config, size, eval_size, ranks.world)
    looked_at = build.load_parts(planned, ranks, components)
    instead = _training_shapes(looked_at.batches, size, which) if training else None
    eval_instead = None
    if evaluation and looked_at.eval_batches is not None:
        eval_instead = _chosen(looked_at.eval_batches.from_sample(0, eval_size, ranks), which)
    parts = build.load_parts(planned, ranks, components)
    host, parts.device = parts.device, place.device or parts.device
    parts.memory = memory = TracedMemory(parts.device, place.limit(config), real_bytes)
    values = MadeUpValues(otherwise, lambda: memory.phase if memory.watching else None, config.train.grad_clip, share)
    with contextlib.ExitStack() as stack:
        fake: Callable[[Tensor], Tensor] = _unchanged
        if real_bytes is None:
            stack.enter_context(place.outside())
            fake = place.fake(stack.enter_context(fake_tensor_mode()).from_tensor)
            stack.enter_context(values)
            stack.enter_context(place.inside())
            model = models.built_somehow(components, fake, parts.batches.example, host, parts.numerics)
            parts.components = dataclasses.replace(components, model=model)
            parts.numerics = place.numerics(planned, parts)
            numerics = {field.name: getattr(parts.numerics, field.name) for field in dataclasses.fields(parts.numerics)}
            parts.numerics = NoOverflow(**numerics, values=values)
        parts.batches = cast(TrainBatches, place.batches(parts.batches, fake, instead, memory.passes))
        if parts.eval_batches is not None:
            parts.eval_batches = cast(EvalBatches, place.eval_batches(parts.eval_batches, fake, eval_instead))
        values.state_is_late = late = _creates_state_late(planned, host)
        with EqualChunks():
            run = build.run_of(planned, parts, StopRequest(), ranks, initial_device=str(parts.device))
        values.state_is_late = False
        run.attempt = PhaseLog(memory)
        memory.resident = run.meter.resident
        if _has_padded_shards(run.state.model.parameters()):
            _settle_shards(run)
        with place.recording(run) as allocations:
            found = _training_peak(run, memory, place.steps) if training else None
            measured = None
            if evaluation and run.eval_batches is not None and run.cadences.evaluate:
                if late and not training:
                    train_step(run)  # evaluations find the optimizer's state in memory
                memory.reset()
                evaluate(run)
                measured = memory.highest
    return Trace(
        training=found,
        evaluation=measured,
        reads=tuple(sorted(phase.value for phase in values.model_reads)),
        assumed=tuple(sorted(values.shapes.operations)),
        probed=tuple(sorted(values.probed)),
        varies=instead is not None or eval_instead is not None,
        bucket=0 if instead is None else bucket_of(instead.samples, elements_in(instead.data)),
        static=run.meter.static,
        uneven=_is_uneven(run.state.model.parameters()),
        smallest=build.smallest_micro_batch(run.state.model),
        rank=ranks.rank,
        allocations=allocations,
    )


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


def _training_peak(run: Run, memory: TracedMemory, steps: int) -> Peak:
    """Of one step or two; always of two where the first creates state of the optimizer, which stays in memory."""
    memory.reset()
    train_step(run)
    update_weight_average(run)
    state = run.state
    static = static_bytes(state.model, state.optimizer, state.average.averages, state.keeps_gradients)
    if steps > 1 or static != run.meter.static:
        train_step(run)
        update_weight_average(run)
    return memory.highest


def _creates_state_late(config: Config, device: torch.device) -> bool:
    """Whether the optimizer has no state before its first step. That depends on values: asked of a tiny real one."""
    with contextlib.suppress(UserError), outside_dispatch_modes():
        tiny = nn.Linear(2, 2, bias=False, device=device)
        return not build_optimizer(config.optimizer, tiny, device, config.user_packages).state
    return False


def _is_uneven(parameters: Iterable[Any]) -> bool:
    return any(is_shard(p) and p.shape[0] % p.device_mesh.size() for p in parameters)


def planned_config(config: Config, size: int, eval_size: int, world: int) -> Config:
    """The configuration of the trace: what costs no memory on the device, or only in a few first steps, is off.

    size, eval_size: of micro-batches, on one of `world` ranks. A step of many micro-batches peaks in its second one, as
    in all later ones: two are traced. (Of less than three, the second one need not be full.)
    """
    whole, parts = config.batch.global_size, config.accumulation.steps
    share = -(-whole // world)
    as_given = parts != "auto" and size == -(-share // parts)
    global_size = whole if as_given or share < 3 * size else 2 * size * world
    changes: dict[str, Any] = {
        "batch": dataclasses.replace(
            config.batch,
            global_size=global_size,
            micro_size="auto" if as_given else size,
            eval_micro_size=eval_size,
            micro_schedule=None,
        ),
        "accumulation": dataclasses.replace(config.accumulation, steps=parts if as_given else "auto"),
        # A logged step computes the metrics, too, and sooner or later every run logs one.
        "every": dataclasses.replace(config.every, log=None if config.every.log is None else 1),
        "loader": dataclasses.replace(config.loader, num_workers=0),
        "model": dataclasses.replace(config.model, init_from=None),
        "train": dataclasses.replace(config.train, check_exactness=False),
        "memory": dataclasses.replace(config.memory, limit=None),
        "checkpointing": dataclasses.replace(config.checkpointing, save=False),
    }
    return dataclasses.replace(config, mode="train", **changes)


def _training_shapes(batches: TrainBatches, size: int, which: Which) -> MicroBatch | None:
    """See `_chosen`."""

    def steps() -> Iterator[MicroBatch]:
        progress = Progress()
        while progress.epoch == 0:
            micro_batches = batches.micro_batches(progress, size)
            yield from micro_batches
            batches.advance(progress)

    return _chosen(steps(), which)


def _chosen(micro_batches: Iterator[MicroBatch], which: Which) -> MicroBatch | None:
    """The first micro-batch with the most, or the fewest, elements of the first SURVEYED samples; None where all full
    ones have the same shapes.
    """
    first = chosen = next(micro_batches, None)
    if first is None or chosen is None:
        return None
    samples, varies = first.samples, False
    for micro in itertools.chain([first], micro_batches):
        if micro.samples == first.samples:
            varies = varies or shapes_of(micro.data) != shapes_of(first.data)
            size, best = elements_in(micro.data), elements_in(chosen.data)
            if (size > best) if which == "longest" else (size < best):
                chosen = micro
        samples += micro.samples
        if samples >= max(SURVEYED, 3 * first.samples):
            break
    return chosen if varies else None
