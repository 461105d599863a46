"""The check of `loss_check` once more, in a few later steps: the loss may be another one in a later stage of training,
such as with deferred re-weighting.

In steps 16, 64, 256, and so on (`training.limits`), the first four samples of the first micro-batch are compared as the
first four of training were before the first step: in the same precisions, in training and in evaluation mode, with
BatchNorm in evaluation mode. Only without noise: the parameters are trained. Nothing is refused, as a run is under way:
what does not add up is said once, and recorded as depending on the micro-batch.

Nothing is compared where that is said already (`_is_comparable`); on several ranks, which would have to agree on it;
where a batch cannot be cut without fetching its samples again; or where a call fails.
"""

import logging
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trainapp.data.batch import MicroBatch, flatten_container, map_tensors
from trainapp.draws.record import EVALUATION, DrawRecord, TopicKind
from trainapp.errors import summary_of
from trainapp.losses.losses import CheckedTask, has_embeddings, needs_no_check, needs_whole_batch
from trainapp.training.memory_watch import begin_counting_refused
from trainapp.training.session import Session
from trainapp.trials.messages import Refused, warning_instead_of_refusal
from trainapp.trials.modes import Mode
from trainapp.trials.parts import TaskFindings, compare_with_parts
from trainapp.trials.precisions import first_working_result, probe_factories
from trainapp.trials.probe import ProbeInputs, TaskProbe
from trainapp.trials.samples import COMPARED_SAMPLES, Samples, samples_in_batches

log = logging.getLogger(__name__)
FLOATING_POINT_MODES = ("fp32", "tf32", "fp16", "bf16", "bf16_pure")  # others round by the largest of the micro-batch


def with_comparison(session: Session, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    """Return a step's micro-batches, the first samples of which are compared before."""
    is_first = True
    for micro in micro_batches:
        if is_first and _is_comparable(session):
            try:
                _compare(session, micro)
            except Exception as error:
                # A model that does not run so few samples, or too little memory: the step itself is not concerned.
                step = session.engine.context.step_number
                log.info("the loss could not be compared with its parts in step %d: %s", step, summary_of(error))
            _leave_no_trace_in_memory(session)
        is_first = False
        yield micro


def _is_comparable(session: Session) -> bool:
    """Return whether a step's tasks can be called besides the step itself."""
    config = session.config
    if not config.train.check_loss or session.ranks.world_size > 1 or config.train.compile:
        return False
    if session.sizes.train.is_unvalidated:  # its steps' allocations are counted
        return False
    return config.precision.mode in FLOATING_POINT_MODES


def _compare(session: Session, micro: MicroBatch) -> None:
    """Compare the first samples of a micro-batch, together and in parts. Raises errors of the task and the model."""
    modes = _modes_to_compare(session)
    samples = _samples_of(session, micro) if modes else None
    if samples is None:
        return
    for mode in modes:
        finding = _findings(session, samples, mode).loss
        if isinstance(finding, Refused):
            _warn(session, mode, finding)
            return


def _leave_no_trace_in_memory(session: Session) -> None:
    """Free what the allocator keeps of the copies, and do not count against the step what it has refused them."""
    if session.state.device.type == "cuda":
        torch.cuda.empty_cache()
    begin_counting_refused(session)


def _modes_to_compare(session: Session) -> list[Mode]:
    """Return the update's task in training mode and the task in evaluation, without those known to be no sum."""
    engine = session.engine
    modes = []
    for task, work, is_training in ((engine.task, engine.draws_for[0], True), (session.task, EVALUATION, False)):
        if not isinstance(task, CheckedTask):  # in chunks
            continue
        if needs_no_check(task, session.state.model) or has_embeddings(task) or needs_whole_batch(task):
            continue
        if not _is_known_to_depend(session, task):
            modes.append(Mode(task, work, is_training))
    return modes


def _is_known_to_depend(session: Session, task: CheckedTask) -> bool:
    depends = session.engine.draw_record.depends
    return TopicKind.SUM.topic(task.setting) in depends or TopicKind.LATER_SUM.topic(task.setting) in depends


def _findings(session: Session, samples: Samples, mode: Mode) -> TaskFindings:
    """Return what the comparison says of a task, in the first precision that works."""
    config = session.config
    state = session.state
    names = session.metrics.names
    inputs = ProbeInputs(
        mode.task, state.model, samples, state.device, config.train.seed, names, written=session.snapshot.written
    )

    def compare(probe: TaskProbe) -> TaskFindings:
        # What the calls draw is noted apart: the run's own record stays as it is.
        layouts = {work: dict(of_work) for work, of_work in session.engine.draw_record.layouts.items()}
        return compare_with_parts(probe, mode, DrawRecord(layouts), looks_for_divided_metrics=False)

    # With gradients where the task needs them, but not with an optimizer that a backward would start.
    may_need_gradients = mode.is_trained and not config.optimizer.in_backward
    factories = probe_factories(inputs, state.precision.autocast)
    return first_working_result(factories, compare, may_need_gradients).value


def _warn(session: Session, mode: Mode, finding: Refused) -> None:
    """Warn once of a task that is no sum any more, and record it."""
    setting = mode.task.setting
    step = session.engine.context.step_number
    text = warning_instead_of_refusal(finding.message, setting, f"from step {step} at the latest")
    topic = TopicKind.LATER_SUM.topic(setting)
    session.engine.draw_record.note(topic, text)
    session.tracker.warn_once(text, topic=topic)


def _samples_of(session: Session, micro: MicroBatch) -> Samples | None:
    """Return the first samples of a micro-batch in the batches to compare, cut without fetching them again: they may be
    drawn anew, be slow to load or move a stream. Return None if that is not possible.
    """
    numbers = range(min(COMPARED_SAMPLES, micro.samples))
    if session.batches.split is not None:
        return samples_in_batches(lambda part: micro.slice_samples(part[0], part[-1] + 1), numbers, micro.positions)
    if session.batches.has_users_collate or not _is_stacked(micro.data, micro.samples):
        return None

    def rows_of(part: Sequence[int]) -> Any:
        return map_tensors(operator.itemgetter(slice(part[0], part[-1] + 1)), micro.data)

    return samples_in_batches(rows_of, numbers, micro.positions)


def _is_stacked(batch: Any, samples: int) -> bool:
    """Return whether a batch is nothing but tensors with a row per sample."""
    if isinstance(batch, Tensor):
        return batch.layout is torch.strided and not batch.is_nested and batch.shape[:1] == (samples,)
    flattened = flatten_container(batch)
    if flattened is None:
        return False
    children, _ = flattened
    return all(_is_stacked(child, samples) for child in children)
