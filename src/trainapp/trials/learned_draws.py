"""Finds the dimension of the samples in each random tensor that a forward draws, before the first step.

Shapes tell most of it: a task is called with four samples and with two of them, and the dimension that is twice as long
is theirs. Where a sample has several rows they may be neighbours, as in the weights of attention, or one batch apart,
as in `cat([view, view])`: the loss of the four is that of their halves only if rows are read as they are meant. This is
seen best in fp64, with noise on the parameters. The recipe says which draws belong to samples, what could not be tried,
and why.
"""

import functools
import math

import torch

from trainapp.draws.layout import DrawLayout, RandomDraw, interleaved_layouts, layouts_by_shape
from trainapp.draws.random_operations import belong_to_samples
from trainapp.draws.record import COLLATE, NUMBER_OF_DRAWS, DrawRecord, TopicKind, shown_name
from trainapp.draws.sample_draws import SampleDraws
from trainapp.errors import summary_of
from trainapp.losses.losses import needs_no_check, needs_whole_batch
from trainapp.memory.module_path import ModulePath
from trainapp.parallel.ranks import Ranks
from trainapp.trials.comparison import SplitValues
from trainapp.trials.modes import NO_CHECK_NEEDED, OF_CHECKPOINT, Mode, TrialSetup, has_all_values
from trainapp.trials.obstacles import Obstacle, Reason
from trainapp.trials.precisions import first_working_result, note_traces, precisions_to_try
from trainapp.trials.probe import TaskProbe
from trainapp.trials.samples import Samples
from trainapp.units import listed

# By how much the loss may deviate from that of its halves, relative, if rows are read right. Rounding is far below it:
# fp64's epsilon is 2e-16, fp32's 1.2e-7, and "as trained" may be in 16 bits.
MAX_DEVIATION_IN_FP64 = 1e-5
MAX_DEVIATION = 1e-3
# Standard deviation of what is added to the parameters of copies. More than in `loss_check`: nothing is said about the
# task here, and rows that are read wrong have to show in the loss.
NOISE = 0.3
BY_DEFAULT = "the first dimension as long as the batch counts as theirs"  # of draws that are not known
Layouts = dict[int, DrawLayout]  # of the draws of a forward, by the draw's number


def learn_draws(setup: TrialSetup, ranks: Ranks) -> tuple[DrawRecord, dict[str, str]]:
    """Return the first rank's record of draws; and, by the name of the check, whose draws are whose, in words.
    Collective. Call before the model is compiled or sharded. Restores all that a Snapshot covers. Raises errors of
    reading a stream.
    """
    draw_record = DrawRecord()
    outcomes: dict[str, str] = {}

    # Skip modes of which nothing can or need be learnt. Samples are read for the others only.
    tried_modes = []
    for mode in setup.modes:
        if mode.is_trained and not mode.training:  # an update's task is not evaluated
            continue
        if needs_no_check(mode.task, setup.model):
            draw_record.samples_come_first.add(mode.work)
        reason = _reason_to_skip(setup, mode)
        if reason:
            outcomes[mode.check_name("draws")] = reason
        else:
            tried_modes.append(mode)

    for mode in tried_modes:
        samples = setup.samples.fetch()
        if isinstance(samples, Obstacle):
            text = f"not tried: {samples}"
        elif not samples.is_joined:
            text = f"not tried: {Obstacle(Reason.NEVER_JOINED)}; {BY_DEFAULT}"
        else:
            text = _learn_mode(setup, samples, mode, draw_record)
        outcomes[mode.check_name("draws")] = text

    # The first rank's on all of them: ranks have different samples, and may have learnt different things.
    return ranks.all_gather_object(draw_record)[0], outcomes


def note_draws_of_collate(setup: TrialSetup, ranks: Ranks, draw_record: DrawRecord) -> None:
    """Note in the record that the training data's own `collate` draws random numbers. Collective. Raises errors of
    reading a stream.
    """
    if setup.resumes or not setup.samples.has_users_collate:  # the checkpoint has the record of the first session
        return
    samples = setup.samples.fetch()
    draws_here = isinstance(samples, Samples) and samples.collate_draws
    if any(ranks.all_gather_object(draws_here)):
        draw_record.depends[COLLATE] = (
            "the data's `collate` draws random numbers for each micro-batch, not for the step, so they depend on the "
            "size of the micro-batch; draw them in `__getitem__`, where the generators are seeded for each sample (for "
            "mixup, also the index of the other sample), or give the loss `whole_batch = True`"
        )


def _reason_to_skip(setup: TrialSetup, mode: Mode) -> str:
    """Return why nothing is learnt of a mode, the same on all ranks; "" if it is."""
    draws = setup.settings.draws
    if not belong_to_samples(draws, setup.device):
        return f"torch's own, of the micro-batch: train.draws={draws} on {setup.device.type}"
    if setup.resumes:
        return OF_CHECKPOINT
    if needs_no_check(mode.task, setup.model):
        return NO_CHECK_NEEDED
    if needs_whole_batch(mode.task):
        return "of the whole batch: the task declares whole_batch, it is never split"
    if not has_all_values(setup.model):
        return f"not tried: {Obstacle(Reason.NO_VALUES)}; {BY_DEFAULT}"
    return ""


def _learn_mode(setup: TrialSetup, samples: Samples, mode: Mode, draw_record: DrawRecord) -> str:
    """Add a mode's draws to the record. Return whose draws are whose, in words."""
    factories = functools.partial(precisions_to_try, setup, samples, mode.task)

    # By the shapes of the draws. Rounding does not matter to them, so that no copies are needed.
    read = functools.partial(_read_shapes, mode=mode, draw_record=draw_record)
    try:
        result = first_working_result(factories(noise=None), read, mode.is_trained)
        note_traces(result, draw_record)
        candidates, other_draws = result.value
    except Exception as error:  # the first step raises it again, with its traceback
        return f"not known: {summary_of(error)}; {BY_DEFAULT}"
    text = _in_words(draw_record, mode, other_draws)

    # By the loss, which depends on how rows are read. Best in fp64, with noise.
    if candidates:
        choose = functools.partial(_choose_layouts, mode=mode, draw_record=draw_record, candidates=candidates)
        try:
            first_working_result(factories(noise=NOISE), choose, mode.is_trained)
        except Exception as error:
            text += f", by their shapes alone: {summary_of(error)}"
    if _topic(mode) in draw_record.depends:
        text += ", but some perhaps to the wrong ones: with each sample's own draws the loss does not add up"
    return text


def _read_shapes(probe: TaskProbe, mode: Mode, draw_record: DrawRecord) -> tuple[list[Layouts], list[str]]:
    """Add what is drawn to the record, with layouts by the shapes of the draws.

    Returns:
        The layouts that are possible, one or two, empty if no draw has samples; and what else is drawn, in words.
    """
    samples = probe.samples

    # Note what is drawn for all samples and for half of them.
    noted = DrawRecord()
    other_draws: list[str] = []
    draws_of_whole: dict[int, RandomDraw] = {}
    draws_of_half: dict[int, RandomDraw] = {}
    modules: dict[int, str] = {}  # that draw, by the number of the draw
    for batch, draws in ((samples.whole, draws_of_whole), (samples.first_half, draws_of_half)):
        module_path = ModulePath()
        running_module = functools.partial(getattr, module_path, "running")
        sample_draws = SampleDraws((0,), batch.positions, noted, mode.work, draws, running_module=running_module)
        with module_path.watch():
            sums = probe(batch, mode.training, sample_draws)
        modules |= sample_draws.modules
        if sums.drew_outside_torch and not other_draws:
            other_draws.append("Python's or NumPy's of the micro-batch")
    for topic, text in noted.depends.items():
        # A generator of the user's, fused kernels. Whose the draws of other topics are was not known to this record.
        if not TopicKind.DRAWS.includes(topic):
            other_draws.append(text)

    # The dimension of the samples is the one that grows with their number.
    number = len(samples.whole.positions)
    number_in_half = len(samples.first_half.positions)
    layouts = layouts_by_shape(draws_of_whole, draws_of_half, number, number_in_half)
    draw_record.layouts[mode.work] = layouts
    for draw_number, layout in layouts.items():
        if layout.is_shared and modules.get(draw_number):
            draw_record.modules_of_shared.setdefault(layout.kernel, set()).add(modules[draw_number])
    if len(draws_of_whole) != len(draws_of_half):
        draw_record.depends[NUMBER_OF_DRAWS] = (
            f"the forward draws {len(draws_of_whole)} times for {number} samples and {len(draws_of_half)} times for "
            f"{number_in_half}: later draws depend on the micro-batch"
        )
        other_draws.append("their number depends on the micro-batch")

    # Shapes do not tell whether a sample's rows are neighbours or one batch apart.
    if all(layout.axis is None for layout in layouts.values()):
        return [], other_draws
    candidates = [layouts]
    interleaved = interleaved_layouts(layouts)
    if interleaved != layouts:
        candidates.append(interleaved)
    return candidates, other_draws


def _in_words(draw_record: DrawRecord, mode: Mode, other_draws: list[str]) -> str:
    """Return whose draws are whose.

    Args:
        draw_record: has the mode's draws.
        mode: the mode.
        other_draws: what else is drawn, in words.
    """
    layouts = draw_record.layouts[mode.work].values()
    varying = {shown_name(layout.kernel) for layout in layouts if layout.varies}
    shared = {shown_name(layout.kernel) for layout in layouts if layout.is_shared}
    texts = []
    if shared:
        texts.append(f"shared by all samples: {listed(sorted(shared))}")
    if varying:
        texts.append(f"of the micro-batch: {listed(sorted(varying))}")
    texts.extend(other_draws)
    if any(layout.axis is not None for layout in layouts):
        subject = "the others" if texts else "all"
        texts.append(f"{subject} belong to samples")
    if not texts:
        return "none"
    return "; ".join(texts)


def _choose_layouts(probe: TaskProbe, mode: Mode, draw_record: DrawRecord, candidates: list[Layouts]) -> None:
    """Record the layouts with which the loss of all samples is that of their halves. Raises ArithmeticError for a loss
    that is not finite.
    """
    deviations = [_deviation(probe, mode, layouts) for layouts in candidates]
    smallest = min(deviations)
    if not math.isfinite(smallest):
        raise ArithmeticError("the loss is not finite")
    draw_record.layouts[mode.work] = candidates[deviations.index(smallest)]

    # The best reading may still be wrong: then something depends on the split, and the run says so.
    tolerance = MAX_DEVIATION_IN_FP64 if probe.dtype is torch.float64 else MAX_DEVIATION
    if smallest > tolerance:
        draw_record.depends[_topic(mode)] = (
            f"the loss of {probe.samples.number} samples is not that of their halves, by {smallest:.1%}, though each "
            "sample draws the same in both: draws cannot be assigned to samples, or the loss compares samples"
        )


def _deviation(probe: TaskProbe, mode: Mode, layouts: Layouts) -> float:
    """Return by how much the loss of all samples differs from that of their halves with these layouts, relative."""
    samples = probe.samples
    losses = []
    for batch in (samples.whole, samples.first_half, samples.second_half):
        record = DrawRecord({mode.work: layouts})
        sample_draws = SampleDraws((0,), batch.positions, record, mode.work)
        losses.append(probe(batch, mode.training, sample_draws).loss)
    values = SplitValues(*losses)
    return abs(values.excess) / (values.size or 1.0)


def _topic(mode: Mode) -> str:
    """Return the topic under which draws that cannot be assigned are noted."""
    return TopicKind.DRAWS.topic(mode.work)
