"""Steps and an evaluation of a configuration, traced: the run is built and goes through its loop on fake tensors."""

import contextlib
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from trainapp.assembly import build
from trainapp.assembly.components import Components
from trainapp.config.schema import Config
from trainapp.data.batch import tensors_in
from trainapp.memory.device import static_bytes
from trainapp.memory.kept import WeakStorages
from trainapp.memory.kinds import MemoryKind
from trainapp.parallel.ranks import Ranks, SingleRank
from trainapp.parallel.strategy import is_shard
from trainapp.planning.built import built
from trainapp.planning.moving_state import Snapshot, buffer_shapes, moved, moving_state
from trainapp.planning.norms_watch import NormsWatch
from trainapp.planning.own_loss import LogitsWatch
from trainapp.planning.place import Place
from trainapp.planning.recorder import Peak, TracedMemory
from trainapp.planning.step_work import Work, WorkCounter
from trainapp.planning.traced_part import SURVEYED
from trainapp.planning.ways import FIRST, Way
from trainapp.techniques.catalogue import available_levers
from trainapp.techniques.lever import Lever, Situation
from trainapp.torch_private import storage_id
from trainapp.train.evaluate import evaluate
from trainapp.train.loop import train_step, update_weight_average
from trainapp.train.run import Run
from trainapp.units import listed

ON_CPU = Place()
_KNOWN = {"torch", "trainapp"}


@dataclass(frozen=True)
class Trace:
    """What was measured. training, evaluation: None where not asked for, or where there is none.

    reads: the phases in which the model or the task read values, which were made up. assumed: the operations whose
    results have shapes that depend on values. probed: those that were run for real to know what they allocate.
    varies: whether micro-batches of the data differ in shape. elements: where those of training do, those of a sample
    in the one that was traced; else 0. static: as `Meter.static`. uneven: whether ranks have shards of different sizes.
    smallest: the model cannot train on fewer samples at once. levers: that apply and are not in force. packages: that
    the model's modules are from, other than torch and trainapp. unsettled: why another step may need more. hints: what
    the user's own code could do. work: of one training step; None if it was not counted. allocations: what the place
    has recorded. kept: bytes that training steps leave to later work; 0 for a GPU, which holds the next batch. leaves:
    names of attributes and buffers that may make evaluations differ after training, or training after an evaluation;
    none where the model counts or draws, since no two steps are then alike.
    """

    training: Peak | None
    evaluation: Peak | None
    reads: tuple[str, ...]
    assumed: tuple[str, ...]
    probed: tuple[str, ...]
    varies: bool
    elements: int
    static: dict[MemoryKind, int]
    uneven: bool
    smallest: int
    levers: tuple[Lever, ...]
    packages: frozenset[str] = frozenset()
    unsettled: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    work: Work | None = None
    allocations: Any = None
    kept: int = 0
    leaves: tuple[str, ...] = ()

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
    way: Way = FIRST,
    *,
    place: Place = ON_CPU,
    ranks: Ranks | None = None,
    real_bytes: int | None = None,
    count_work: bool = False,
) -> Trace:
    """Trace training steps with micro-batches of `size` and an evaluation with `eval_size`, on one process.

    size, eval_size: 0 leaves out training, or evaluation. ranks: as `simulated` gives them; None: a single process.
    real_bytes: run everything for real, with at most so many live bytes. count_work: also count the operations of the
    training step, for `Speeds`.
    Raises whatever the model raises on tensors without data; MemoryLimitExceeded beyond `real_bytes`. Sets torch's
    global switches and seeds the generators: call it in a process of its own.
    """
    ranks = ranks or SingleRank()
    with built(config, components, size, eval_size, way, place, ranks, real_bytes) as subject:
        run, memory, values = subject.run, subject.memory, subject.values
        work = WorkCounter(lambda: memory.phase) if count_work and size else None
        training = evaluation = None
        norms = NormsWatch()
        with LogitsWatch(run) as logits, norms.of(run.state.model), place.recording(run) as allocations:
            if size:
                training = _training_peak(run, memory, place.steps, work)
            evaluates = bool(run.eval_sets) and run.cadences.evaluates
            if eval_size and evaluates:
                evaluation = _evaluation_peak(run, memory, needs_step=subject.state_is_late and not size)
            if training is not None and evaluation is not None and memory.left:
                before, memory.left = _plain_state(run), set()
                training = training.joined(_training_peak(run, memory, 1, None))
                evaluation = evaluation.joined(_evaluation_peak(run, memory, needs_step=False))
                memory.left = {*moved(before, _plain_state(run))}
    return Trace(
        training=training,
        evaluation=evaluation,
        reads=tuple(sorted(phase.value for phase in values.model_reads)),
        assumed=tuple(sorted(values.shapes.operations)),
        probed=tuple(sorted(values.probed)),
        varies=subject.varies,
        elements=subject.elements,
        static=run.meter.static,
        uneven=_is_uneven(run.state.model.parameters()),
        smallest=max(build.smallest_micro_batch(run.state.model), norms.smallest),
        levers=tuple(available_levers(Situation(config, run.state.model, run.knows_loss))),
        packages=frozenset(type(part).__module__.partition(".")[0] for part in run.state.model.modules()) - _KNOWN,
        unsettled=(*_unsettled(memory, ranks, run, components.train_data), *_untraced_hooks(config)),
        hints=logits.notes(),
        work=None
        if work is None
        else _of_whole_step(work.work, config, subject.planned, size * ranks.world, run.batches.samples),
        allocations=allocations,
        kept=memory.kept_by_steps if place.device is None else 0,
        leaves=tuple(sorted(memory.left)) if evaluates and not memory.moving else (),
    )


def _of_whole_step(work: Work, config: Config, traced: Config, size: int, samples: int) -> Work:
    """The work with its shares of a step's samples and micro-batches: `planned_config` may have left out some. size:
    of the micro-batches of all ranks together.
    """
    whole, taken = (min(of.batch.global_size, samples or of.batch.global_size) for of in (config, traced))
    work.share, work.micro_batches = taken / whole, -(-whole // size)
    return work


def _training_peak(run: Run, memory: TracedMemory, steps: int, work: WorkCounter | None) -> Peak:
    """Of one step or two; always of two where the first leaves something, such as state of the optimizer or a count.

    work: counts the last of them.
    """
    memory.reset()
    state = run.state
    kept_before, before = memory.kept_bytes(), _plain_state(run)
    with work if work and steps == 1 else contextlib.nullcontext():
        train_step(run)
    update_weight_average(run)
    static = static_bytes(state.model, state.optimizers, state.average.averages, state.keeps_gradients)
    kept, after = _kept(run, memory), _plain_state(run)
    first = after  # what was first set, such as a cache, moves, too
    if steps > 1 or moved(before, after) or kept != kept_before or static != run.meter.static:
        with work.restarted() if work else contextlib.nullcontext():
            train_step(run)
        update_weight_average(run)
        now = static_bytes(state.model, state.optimizers, state.average.averages, state.keeps_gradients)
        memory.buffers_grow |= now[MemoryKind.BUFFERS] > static[MemoryKind.BUFFERS]
        memory.kept_by_steps = max(memory.kept_by_steps, _kept(run, memory) - kept_before)
        memory.kept_grows |= memory.kept_by_steps > kept - kept_before
        after = _plain_state(run)
        memory.moving |= {*moved(first, after)} - {*moved({}, buffer_shapes(_modules(run)))}
    memory.left |= {*moved(before, after)}
    return memory.highest


def _plain_state(run: Run) -> Snapshot:
    """What a step or an evaluation may leave for later ones: what a trace cannot follow, and the extents of buffers."""
    return moving_state(run.state.stateful.roots) | buffer_shapes(_modules(run))


def _modules(run: Run) -> dict[str, Any]:
    return {**run.state.stateful.roots, **run.state.stateful.modules}


def _kept(run: Run, memory: TracedMemory) -> int:
    """Bytes that a step has left for the next one, which begins with a restore point: the last one's may hold buffers
    that the forward has replaced.
    """
    run.snapshot.take()
    return memory.kept_bytes()


def _evaluation_peak(run: Run, memory: TracedMemory, needs_step: bool) -> Peak:
    """needs_step: evaluations find the optimizer's state in memory, which only a step creates."""
    if needs_step:
        for own in run.sizes.by_update.values():
            own.train.start = max(own.train.start, build.smallest_micro_batch(run.state.model))
        train_step(run)
    memory.reset()
    kept, before = memory.kept_bytes(), _plain_state(run)
    evaluate(run)
    memory.kept_by_evaluation = max(memory.kept_by_evaluation, memory.kept_bytes() - kept)
    memory.left |= {*moved(before, _plain_state(run))}
    return memory.highest


def _unsettled(memory: TracedMemory, ranks: Ranks, run: Run, data: Any) -> tuple[str, ...]:
    """Why a step may need more than the traced ones, which nothing in them reads from a tensor.

    Of several ranks, draws say nothing: torch numbers every collective without values from Python's generator (2.13,
    distributed/_meta_registrations.py).
    """
    reasons = ["the forward draws from Python's or NumPy's generator"] if memory.draws and ranks.world == 1 else []
    if memory.moving:
        reasons.append(f"the model counts or draws ({listed(sorted(memory.moving))})")
    if memory.buffers_grow:
        reasons.append("buffers grow")
    if memory.kept_grows:
        reasons.append("what is kept from step to step grows")
    if memory.kept_by_evaluation > 0:
        reasons.append("evaluations keep tensors")
    if any(type(module).get_extra_state is not nn.Module.get_extra_state for module in run.state.model.modules()):
        reasons.append("the model has state besides its tensors")
    if any(_package(optimizer) not in _KNOWN for optimizer in run.state.optimizers):
        reasons.append("the optimizer may create state later than in its first step")
    if hasattr(data, "set_epoch") and _package(data) not in _KNOWN:
        reasons.append("the data set may change from epoch to epoch")
    if _package(data) not in _KNOWN and hasattr(data, "collate") and not _is_surveyed(data):
        reasons.append(f"the data set's own collate may make others of samples after the first {SURVEYED}")
    if _has_views(data, memory.kept.of_data):
        reasons.append("samples are views of larger tensors, which a run may count as a whole")
    return tuple(reasons)


def _untraced_hooks(config: Config) -> tuple[str, ...]:
    """Metrics and callbacks, which may keep tensors. The callbacks of the application keep none."""
    own = [name for name, callback in config.callbacks.items() if not callback.target.startswith("trainapp.")]
    reasons = [f"callbacks are not traced ({listed(own)}), which may keep tensors or change the model"] if own else []
    if config.metrics:
        reasons.append(f"metrics are not traced ({listed(sorted(config.metrics))}), which keep their states")
    return tuple(reasons)


def _package(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _is_surveyed(data: Any) -> bool:
    """Whether all samples are among those whose shapes are compared."""
    try:
        return len(data) <= SURVEYED
    except TypeError:  # a stream
        return False


def _has_views(data: Any, known: WeakStorages) -> bool:
    """Whether the first sample has tensors that are parts of larger ones, which are not known to be the data set's."""
    try:
        sample = data[0]
    except Exception:  # whatever this is, the run will say it
        return False
    storages = [(tensor.untyped_storage(), tensor.nbytes) for tensor in tensors_in(sample)]
    return any(storage.nbytes() > size and storage_id(storage) not in known for storage, size in storages)


def _is_uneven(parameters: Iterable[Any]) -> bool:
    return any(is_shard(p) and p.shape[0] % p.device_mesh.size() for p in parameters)
