"""The comparison of `loss_check` once more, in a few later steps: the loss may be another one in a later stage of
training, such as with deferred re-weighting.

In steps 16, 64, 256, and so on (`training.limits`), the loss and the count of the first micro-batch are compared with
those of its halves: three forwards without gradients, which leave no trace. Nothing is refused, as a run is under way:
what does not add up is said once, and recorded as depending on the micro-batch.

Nothing is compared where a difference would mean little, or is said already: see `_is_comparable`. Nor on several
ranks, which would have to agree on it; nor where a batch cannot be cut without fetching its samples again, a call
fails, or a repetition differs from the first call.
"""

import contextlib
import functools
import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trainapp.data.batch import MicroBatch, flatten_container, map_tensors, split_micro_batch
from trainapp.draws.record import DrawRecord, TopicKind, noted_draws
from trainapp.draws.sample_draws import SampleDraws
from trainapp.losses.losses import CheckedTask, has_embeddings, needs_no_check, needs_whole_batch
from trainapp.rng import preserved_rng
from trainapp.state.snapshot import Snapshot
from trainapp.torch_private import BatchNorm
from trainapp.training.session import Session
from trainapp.trials.comparison import Comparison, Difference, Rounding, SplitResults
from trainapp.trials.messages import warning_of_later_difference
from trainapp.trials.parts import REPRODUCIBLE
from trainapp.trials.probe import Sums, generator_states

FLOATING_POINT_MODES = ("fp32", "tf32", "fp16", "bf16", "bf16_pure")  # others round by the largest of the micro-batch
COARSE_EPSILON = torch.finfo(torch.bfloat16).eps  # of the rounding in all modes but fp32, at most


def with_comparison(session: Session, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    """Return a step's micro-batches, the first of which is compared with its halves before."""
    is_first = True
    for micro in micro_batches:
        if is_first and micro.samples > 1 and _is_comparable(session):
            _compare_with_halves(session, micro)
        is_first = False
        yield micro


def _is_comparable(session: Session) -> bool:
    """Return whether a difference would mean that the loss is no sum, and nothing is known yet that explains one."""
    engine = session.engine
    config = session.config
    task = engine.task
    record = engine.draw_record
    if not config.train.check_loss or session.ranks.world_size > 1 or config.train.compile:
        return False
    if session.sizes.train.is_unvalidated:  # its steps' allocations are counted
        return False
    if needs_no_check(task, session.state.model) or has_embeddings(task) or needs_whole_batch(task):
        return False

    # What depends on the micro-batch by itself.
    if config.precision.mode not in FLOATING_POINT_MODES or record.depends or session.snapshot.changes:
        return False
    if any(isinstance(module, BatchNorm) and module.training for module in session.state.model.modules()):
        return False
    knows_draws = engine.draws_by_sample and engine.draws_for[0] in record.layouts
    return knows_draws or not record.draws


def _compare_with_halves(session: Session, micro: MicroBatch) -> None:
    """Compare the results of a micro-batch with those of its halves. Warn once of a difference, and record it."""
    try:
        difference = _difference(session, micro)
    except Exception:  # such as a model that does not run so few samples: the step itself is not concerned
        return
    task = session.engine.task
    if difference is None or not isinstance(task, CheckedTask):
        return
    step = session.engine.context.step_number
    text = warning_of_later_difference(difference, task.setting, step, micro.samples)
    topic = TopicKind.SUM.topic(task.setting)
    session.engine.draw_record.note(topic, text)
    session.tracker.warn_once(text, topic=topic)


def _difference(session: Session, micro: MicroBatch) -> Difference | None:
    """Return what of a micro-batch is not the sum of its halves'; None if everything is, or if a call is no function of
    its samples. Raises errors of the task and the model.
    """
    # What the calls draw is noted apart: the run's own record stays as it is.
    layouts = {work: dict(of_work) for work, of_work in session.engine.draw_record.layouts.items()}
    record = DrawRecord(layouts)
    # The step's snapshot stays, too: a retry returns to where the step began, before its first batch was fetched.
    snapshot = Snapshot.of(session.state.stateful)
    snapshot.add_written(session.snapshot.written)
    call = functools.partial(_sums_of, session, snapshot=snapshot, record=record)

    halves = _halves(session, micro)
    if halves is None:
        return None
    first_half, second_half = halves
    results = SplitResults(call(micro), call(first_half), call(second_half))
    if not all(math.isfinite(sums.loss) and math.isfinite(sums.divisor) for sums in results):
        return None
    comparison = Comparison(micro.samples, results, rounding=Rounding(epsilon_of_loss=_epsilon(session)))
    difference = comparison.difference()
    if difference is None:
        return None

    # A second call for the same samples, or other draws than those learnt, would explain it.
    repeated = call(micro)
    is_reproducible = math.isclose(repeated.loss, results.whole.loss, rel_tol=max(REPRODUCIBLE, _epsilon(session)))
    drew_otherwise = record.depends or (record.draws and not session.engine.draws_by_sample)
    if not is_reproducible or drew_otherwise or any(sums.drew_outside_torch for sums in results):
        return None
    return difference


def _halves(session: Session, micro: MicroBatch) -> tuple[MicroBatch, MicroBatch] | None:
    """Return the halves of a micro-batch, cut without fetching its samples again, which may be drawn anew, be slow to
    load or move a stream; None if that is not possible.
    """
    middle = micro.samples // 2
    parts = (range(middle), range(middle, micro.samples))
    if session.batches.split is not None:
        first_half, second_half = split_micro_batch(micro, parts)
        return first_half, second_half
    if session.batches.has_users_collate or not _is_stacked(micro.data, micro.samples):
        return None

    halves = []
    for part in parts:
        start, end = part[0], part[-1] + 1
        data = map_tensors(operator.itemgetter(slice(start, end)), micro.data)
        halves.append(micro._replace(data=data, positions=micro.positions[start:end]))
    first_half, second_half = halves
    return first_half, second_half


def _is_stacked(batch: Any, samples: int) -> bool:
    """Return whether a batch is nothing but tensors with a row per sample."""
    if isinstance(batch, Tensor):
        return batch.layout is torch.strided and not batch.is_nested and batch.shape[:1] == (samples,)
    flattened = flatten_container(batch)
    if flattened is None:
        return False
    children, _ = flattened
    return all(_is_stacked(child, samples) for child in children)


def _sums_of(session: Session, micro: MicroBatch, snapshot: Snapshot, record: DrawRecord) -> Sums:
    """Return loss and count of a micro-batch as training computes them, and undo what that changes and draws."""
    engine = session.engine
    device = session.state.device
    draws: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if engine.draws_by_sample:
        work, key = engine.draws_for
        draws = SampleDraws(key, micro.positions, record, work)
    if not (engine.draws_by_sample and device.type == "cpu"):
        draws = noted_draws(record, device, engine.draws_by_sample, draws)
    with torch.no_grad(), snapshot.undone(), preserved_rng(device):
        states_before = generator_states()
        with draws:
            loss, count, _ = engine.evaluate(engine.task, micro.data)
        drew_outside_torch = generator_states() != states_before
        return Sums(float(loss), float(count), {}, drew_outside_torch)


def _epsilon(session: Session) -> float:
    """Return the relative rounding error of the forward, at most; of fp32 at least, in which a part may compute."""
    epsilons = [torch.finfo(torch.float32).eps]
    if session.config.precision.mode != "fp32":
        epsilons.append(COARSE_EPSILON)
    for parameter in session.engine.parameters:
        if parameter.is_floating_point():
            epsilons.append(torch.finfo(parameter.dtype).eps)
    return max(epsilons)
