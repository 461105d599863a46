"""Steps and an evaluation of a configuration, traced: the run is built and goes through its loop on fake tensors."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainapp.config.schema import Config
from trainapp.data.batch import bucket_of, elements_in, map_tensors
from trainapp.data.sampler import EvalBatches, TrainBatches
from trainapp.errors import UserError
from trainapp.memory.device import static_bytes
from trainapp.memory.kinds import MemoryKind
from trainapp.memory.levers.catalogue import available
from trainapp.memory.levers.lever import Lever, Situation
from trainapp.optim.optimizers import build_optimizer
from trainapp.parallel.dtensor import is_shard, local
from trainapp.parallel.ranks import Ranks, SingleRank
from trainapp.plan import models
from trainapp.plan.assumed_shapes import Share
from trainapp.plan.place import Place
from trainapp.plan.ranks import EqualChunks
from trainapp.plan.recorder import Peak, PhaseLog, TracedMemory
from trainapp.plan.step_time import Work, WorkCounter
from trainapp.plan.traced_part import Which, planned_config, representative, training_shapes
from trainapp.plan.values import MadeUpValues, NoOverflow
from trainapp.signals import StopRequest
from trainapp.torch_private import fake_tensor_mode, outside_dispatch_modes
from trainapp.train import build, losses
from trainapp.train.components import Components
from trainapp.train.evaluate import evaluate
from trainapp.train.loop import train_step, update_weight_average
from trainapp.train.run import Run

ON_CPU = Place()
_KNOWN = {"torch", "trainapp"}


@dataclass(frozen=True)
class Trace:
    """What was measured. training, evaluation: None where not asked for, or where there is none.

    reads: the phases in which the model or the task read values, which were made up. assumed: the operations whose
    results have shapes that depend on values. probed: those that were run for real to know what they allocate.
    varies: whether the micro-batches of the data differ in shape. bucket: where those of training do, the shape that
    was traced, see `bucket_of`; else 0. static: as `Meter.static`. uneven: whether ranks have shards of different
    sizes. smallest: the model cannot train on fewer samples at once. packages: that the model's modules are from, other
    than torch and trainapp. unsettled: why another step may need more. levers: that apply and are not in force. work:
    of one training step; None if it was not counted. allocations: what the place has recorded.
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
    levers: tuple[Lever, ...]
    packages: frozenset[str] = frozenset()
    unsettled: tuple[str, ...] = ()
    work: Work | None = None
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
    count_work: bool = False,
) -> Trace:
    """Trace training steps with micro-batches of `size` and an evaluation with `eval_size`, on one process.

    otherwise: answer reads of values the other way. share: see `MadeUpValues`. which: where shapes differ, all
    micro-batches are of this one. ranks: as `simulated` gives them; None: a single process. real_bytes: run everything
    for real, with at most so many live bytes. count_work: also count the operations of the step, for `Speeds`.
    Raises whatever the model raises on tensors without data; MemoryLimitExceeded beyond `real_bytes`. Sets torch's
    global switches and seeds the generators: call it in a process of its own.
    """
    ranks = ranks or SingleRank()
    planned = planned_config(config, size, eval_size, ranks.world)
    looked_at = build.load_parts(planned, ranks, components)
    instead = training_shapes(looked_at.batches, size, which) if training else None
    eval_instead = None
    if evaluation and looked_at.eval_batches is not None:
        eval_instead = representative(looked_at.eval_batches.from_sample(0, eval_size, ranks), which)
    parts = build.load_parts(planned, ranks, components)
    host, parts.device = parts.device, place.device or parts.device
    parts.memory = memory = TracedMemory(parts.device, place.limit(config), real_bytes)
    values = MadeUpValues(otherwise, lambda: memory.phase if memory.watching else None, config.train.grad_clip, share)
    with contextlib.ExitStack() as stack:
        fake: Callable[[Tensor], Tensor] = _unchanged
        if real_bytes is None:
            fake = _without_data(parts, planned, host, place, values, stack)
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
        work = WorkCounter(lambda: memory.phase) if count_work else None
        with place.recording(run) as allocations:
            found = _training_peak(run, memory, place.steps, work) if training else None
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
        levers=tuple(available(Situation(config, run.state.model, losses.is_built_in(run.task)))),
        packages=frozenset(type(part).__module__.partition(".")[0] for part in run.state.model.modules()) - _KNOWN,
        unsettled=_unsettled(memory, ranks),
        work=None if work is None else _of_whole_step(work.work, config, planned, size, parts.batches.samples),
        allocations=allocations,
    )


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
    model = models.built_somehow(parts.components, fake, parts.batches.example, host, parts.numerics)
    parts.components = dataclasses.replace(parts.components, model=model)
    parts.numerics = place.numerics(planned, parts)
    numerics = {field.name: getattr(parts.numerics, field.name) for field in dataclasses.fields(parts.numerics)}
    parts.numerics = NoOverflow(**numerics, values=values)
    return fake


def _of_whole_step(work: Work, config: Config, traced: Config, size: int, samples: int) -> Work:
    """The work with its shares of a step's samples and micro-batches: `planned_config` may have left out some."""
    whole, taken = (min(of.batch.global_size, samples) for of in (config, traced))
    work.share, work.traced, work.micro_batches = taken / whole, -(-taken // size), -(-whole // size)
    return work


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


def _training_peak(run: Run, memory: TracedMemory, steps: int, work: WorkCounter | None) -> Peak:
    """Of one step or two; always of two where the first creates state of the optimizer, which stays in memory.

    work: counts the last of them.
    """
    memory.reset()
    with work or contextlib.nullcontext():
        train_step(run)
    update_weight_average(run)
    state = run.state
    static = static_bytes(state.model, state.optimizer, state.average.averages, state.keeps_gradients)
    if steps > 1 or static != run.meter.static:
        with work.afresh() if work else contextlib.nullcontext():
            train_step(run)
        update_weight_average(run)
        now = static_bytes(state.model, state.optimizer, state.average.averages, state.keeps_gradients)
        memory.buffers_grow = now[MemoryKind.BUFFERS] > static[MemoryKind.BUFFERS]
    return memory.highest


def _unsettled(memory: TracedMemory, ranks: Ranks) -> tuple[str, ...]:
    """Why a step may need more than the traced ones, which nothing in them reads from a tensor.

    Of several ranks, draws say nothing: torch numbers every collective without values from Python's generator (2.13,
    distributed/_meta_registrations.py).
    """
    reasons = ["the forward draws from Python's or NumPy's generator"] if memory.draws and ranks.world == 1 else []
    if memory.buffers_grow:
        reasons.append("buffers grow")
    return tuple(reasons)


def _creates_state_late(config: Config, device: torch.device) -> bool:
    """Whether the optimizer has no state before its first step. That depends on values: asked of a tiny real one."""
    with contextlib.suppress(UserError), outside_dispatch_modes():
        tiny = nn.Linear(2, 2, bias=False, device=device)
        return not build_optimizer(config.optimizer, tiny, device, config.user_packages).state
    return False


def _is_uneven(parameters: Iterable[Any]) -> bool:
    return any(is_shard(p) and p.shape[0] % p.device_mesh.size() for p in parameters)
