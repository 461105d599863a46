"""`train.check_loss`: before the first step, whether the task's loss is a sum over samples, so that a batch can be cut.

A mean would be divided by the count again, making gradients that many times too small; a loss that compares the samples
of its batch depends on the micro-batch. Neither shows in a curve. The loss of the first four samples is therefore
compared with those of their two halves, in evaluation mode and without gradients; if the halves are padded differently,
the loss of the first half twice is compared with the first half's.

Costs five forwards and fetching twenty samples. A stream's samples are read once and kept for training. What cannot be
compared is skipped silently:

- a task that draws random numbers: its loss changes if it is called again, or (for a generator that it seeds itself) if
  the halves change places
- a loss that is not finite
- a batch whose halves hold other values (then only a mean is reported)
- a task or model that fails here: the first step reports the error
"""

import logging
import math
from typing import Any, NamedTuple

import torch
from torch import nn

from trainapp.assembly.parts import Parts
from trainapp.assembly.trials import SAMPLES, Sums, Trials, first_samples
from trainapp.config.schema import Config
from trainapp.data.stream_reader import is_stream
from trainapp.errors import UserError
from trainapp.losses.losses import CheckedTask, compares_samples, is_built_in
from trainapp.memory.device import uncompiled
from trainapp.parallel.ranks import Ranks
from trainapp.rng import preserved_rng
from trainapp.snapshot import Snapshot
from trainapp.stateful import Stateful
from trainapp.torch_private import has_values
from trainapp.units import listed

# Relative tolerances. Kernels choose their order of additions by batch size, which changes the last bits, and layers
# amplify that; a mean is off by half, a contrastive loss of 4 and 2 samples by a third.
FINE, COARSE = 1e-3, 2e-2  # COARSE: for matmuls in less than fp32 precision
FLOOR = 0.1  # per count: a loss whose summands cancel out has their rounding errors
_IF_MEANT = "If it is intended, set train.check_loss=false"
log = logging.getLogger(__name__)


class Comparison(NamedTuple):
    """The task's results for a batch of `samples` samples and its halves. same: whether both hold the same values."""

    samples: int
    whole: Sums
    halves: list[Sums]
    same: bool
    tolerance: float = FINE


def require_sum(task: CheckedTask, config: Config, parts: Parts, model: nn.Module, ranks: Ranks) -> None:
    """Raises UserError for a loss or a count that does not add up, and errors of reading a stream. Collective. Call
    before the model is compiled or sharded. Restores everything a Snapshot covers; modules end up on the device.
    """
    # Of trainapp's models, samples do not interact in evaluation mode.
    is_known = is_built_in(task) and type(model).__module__.startswith("trainapp.models.")
    was_checked = parts.resumes and is_stream(parts.components.train_data)  # which is not read from its start again
    if is_known or was_checked or compares_samples(task):
        return
    verdict = None
    if all(map(has_values, model.parameters())):  # with parallel.fsdp.meta_init there are no values yet
        data = parts.batches.source.first(SAMPLES)  # outside `try`: a stream raises its error only once
        try:
            with preserved_rng(parts.device):
                compared = _compared(task, config, parts, model, data)
            verdict = None if compared is None else _verdict(compared, task.setting)
        except Exception as error:  # the first step raises it again, with its traceback
            log.debug("train.check_loss: nothing can be compared: %s", error)
    if parts.device.type == "cuda":
        torch.cuda.empty_cache()
    by_rank = [text for text in ranks.all_gather_object(verdict) if text]  # a rank may have run out of memory here
    if by_rank:
        raise UserError(by_rank[0])


def _compared(task: CheckedTask, config: Config, parts: Parts, model: nn.Module, data: Any) -> Comparison | None:
    """The results to compare; None if they cannot be compared. Raises errors of the data, the task and the model."""
    stateful = Stateful(model=model, task=task.unchecked, data=data)
    for module in (model, *stateful.modules.values()):
        module.to(parts.device)  # modules of the task and the data are moved later anyway
    snapshot = Snapshot.of(stateful)
    with snapshot.undone():  # including changes from reading the data
        samples = first_samples(data, config.train.seed)
    if samples is None:
        return None
    trial = Trials(task, model, samples, snapshot, parts.device, config.train.seed)
    with parts.numerics.autocast, uncompiled():
        whole, again, turned, a, b = map(trial, ("ab", "ab", "ba" if "ba" in samples.batches else "ab", "a", "b"))
    if trial.lost:
        log.warning("the check of the loss has written %s, frozen and in place", listed(trial.lost))
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    is_fine = config.precision.mode == "fp32" and all(dtype.itemsize >= 4 for dtype in {whole.dtype, *dtypes})
    tolerance = FINE if is_fine else COARSE
    is_finite = all(math.isfinite(value) for sums in (whole, a, b) for value in sums[:2])
    is_random = whole.drawn or not (
        math.isclose(whole.loss, again.loss, rel_tol=1e-5)
        and math.isclose(whole.loss, turned.loss, rel_tol=tolerance / 10)
    )
    if is_random or not is_finite:
        return None
    return Comparison(samples.number, whole, [a, b], samples.same, tolerance)


def _verdict(compared: Comparison, setting: str) -> str | None:
    """The message; None if the results add up or cannot be compared."""
    samples, whole, (a, b), same, tolerance = compared
    size = (abs(whole.loss) + abs(a.loss) + abs(b.loss)) / 2
    difference = abs(whole.loss - a.loss - b.loss)
    numbers = (
        f"for {samples} samples it returns {whole.loss:.6g} with a count of {whole.divisor:g}, and for their halves "
        f"{a.loss:.6g} with {a.divisor:g} and {b.loss:.6g} with {b.divisor:g}"
    )
    if difference > tolerance * size and size > 1e-6 * min(1.0, abs(whole.divisor)) and _is_mean(compared):
        return (
            f"{setting}: the loss is a mean, but a sum is required: {numbers}. It would be divided by the count "
            "twice, and uneven micro-batches weighted wrongly: return the sum of the samples' (or tokens') losses and "
            f"their number, such as the mean times its number of summands. {_IF_MEANT}"
        )
    if same and difference > tolerance * (size + FLOOR * abs(whole.divisor)):
        return (
            f"{setting}: the loss is not a sum over samples: {numbers}. It would depend on the micro-batch, and so on "
            "free memory. Do shapes broadcast, such as [B, 1] with [B]? If it compares the samples of its batch, "
            "declare `whole_batch = True` on the task: its batch is then never cut (or give it embed and "
            "loss_of_embeddings: docs/extending.md). If the model normalises over the batch in evaluation mode, let it "
            f"use running statistics there. {_IF_MEANT}"
        )
    if same and not math.isclose(whole.divisor, a.divisor + b.divisor, rel_tol=tolerance):
        return (
            f"{setting}: the count does not add up: {numbers}. Micro-batches would be weighted wrongly: return the "
            f"number of samples or tokens that the loss sums over, or the sum of their weights. {_IF_MEANT}"
        )
    return None


def _is_mean(compared: Comparison) -> bool:
    """Whether the whole batch's loss is the mean of its halves' losses, weighted equally or by their counts; if both
    hold the same values, with any weights (such as tokens, while the count is of samples).
    """
    _, whole, (a, b), same, tolerance = compared
    weights = [(1.0, 1.0), (a.divisor, b.divisor)]
    means = [(x * a.loss + y * b.loss) / (x + y) for x, y in weights if x + y]
    if any(math.isclose(whole.loss, mean, rel_tol=tolerance) for mean in means):
        return True
    margin = tolerance * abs(whole.loss)
    low, high = sorted((a.loss, b.loss))
    return same and low * high > 0 and low - margin <= whole.loss <= high + margin
