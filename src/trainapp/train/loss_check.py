"""`train.check_loss`: before the first step, whether the task's loss is a sum over samples, so that a batch can be cut.

A mean would be divided by the count again, making gradients that many times too small; a loss that compares the
samples of its batch depends on the micro-batch. Neither shows in a curve. So the loss of the first few samples is
compared with those of their two halves, in evaluation mode and without gradients.

Costs six forwards of at most 4 samples and fetching 12; where 2 samples must do, twice as many and 6 more. Samples of a
stream are read once, and held until they are trained. What cannot be compared is skipped silently: a task that draws
random numbers, a loss that is not finite, a batch whose halves hold other values (see `halves_of`; only a mean is
reported then), a task or model that fails here: the first step reports that error.
"""

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainapp.checkpoint.stateful import Stateful
from trainapp.config.schema import Config
from trainapp.data.batch import map_tensors
from trainapp.data.loader import worker_count
from trainapp.errors import UserError
from trainapp.models.inspect import belongs_to_trainapp
from trainapp.optim.precision import Precision
from trainapp.parallel.ranks import Ranks
from trainapp.torch_private import is_tracing
from trainapp.train.components import Components
from trainapp.train.loss_halves import halves_of
from trainapp.train.losses import compares_samples, is_built_in
from trainapp.train.modes import evaluation_mode, uncompiled
from trainapp.train.side_effects import untouched

SAMPLES = (4, 2)  # the second where the first fail, such as for want of memory
# Relative. Kernels choose their order of additions by the batch's size, which changes the last bits, and layers amplify
# them; a mean is off by half, a contrastive loss of 4 and 2 samples by a third.
FINE, COARSE = 1e-3, 2e-2  # COARSE: for products of less than fp32 precision
FLOOR = 0.1  # per count: a loss whose summands cancel out has the rounding errors of the summands
log = logging.getLogger(__name__)


class Sums(NamedTuple):
    """What the task returns for a batch. divisor: its count. bits: of the loss's type."""

    loss: float
    divisor: float
    bits: int = 32


class Comparison(NamedTuple):
    """The task's results for a batch of so many samples, and for its halves."""

    samples: int
    whole: Sums
    halves: list[Sums]
    same: bool


def require_sum(
    setting: str,
    config: Config,
    components: Components,
    model: nn.Module,
    device: torch.device,
    precision: Precision,
    ranks: Ranks,
    first: Callable[[int], Any] | None,
) -> None:
    """Raises UserError for a loss or a count that does not add up, and what a stream raises that is read. Collective.
    Call before the model is compiled or sharded. Leaves model, task, data and generators as they are, but on `device`;
    see `untouched`.

    setting: what names the task, with its value. first: as `TrainBatches.first`; None: nothing is checked.
    """
    task = components.task
    is_known = is_built_in(task) and belongs_to_trainapp(model)
    if config.mode != "train" or not config.train.check_loss or first is None or is_tracing():
        return
    if compares_samples(task) or is_known:
        return
    verdict = None
    if not any(p.is_meta for p in model.parameters()):  # with parallel.fsdp.meta_init there are no values yet
        # Outside of the comparison, whose errors are the first step's to report: a stream has its error only once.
        parts = dataclasses.replace(components, train_data=first(max(SAMPLES)))
        workers = 0  # for a stream's samples, which are held here
        if parts.train_data is components.train_data:
            workers = worker_count(config.loader.num_workers, parts.train_data, ranks.world // config.parallel.nodes)
        compared = _compared(config, parts, model, device, precision, workers)
        has_bits = compared is not None and min(own.bits for own in (compared.whole, *compared.halves)) >= 32
        is_fine = config.precision.mode == "fp32" and model_is_fine(model) and has_bits
        verdict = None if compared is None else _verdict(compared, setting, FINE if is_fine else COARSE)
    by_rank = [text for text in ranks.all_gather_object(verdict) if text]  # one may have had no memory for it
    if by_rank:
        raise UserError(by_rank[0])


def model_is_fine(model: nn.Module) -> bool:
    """Whether its weights have at least 32 bits."""
    return all(p.dtype.itemsize >= 4 for p in model.parameters() if p.is_floating_point())


def _compared(
    config: Config, components: Components, model: nn.Module, device: torch.device, precision: Precision, workers: int
) -> Comparison | None:
    data = components.train_data
    roots = {"model": model, "task": components.task, "data": data}
    modules = [model, *Stateful(**roots).modules.values()]
    for module in modules:
        module.to(device)  # those of the task and the data will be
    for samples in (min(most, len(data)) for most in SAMPLES):
        if samples < 2:
            return None
        try:
            with untouched(device, **roots):
                cut = halves_of(components, config.train.seed, samples, device)
            batches = (cut.batch, *cut.halves)
            sums = [_result(cut.batch, batch, roots, modules, device, precision) for batch in batches]
        except Exception as error:  # the first step shows it, in its place and with its traceback
            log.debug("train.check_loss: %d samples cannot be compared: %s", samples, error)
            continue
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()
        whole, *halves = sums
        known = [half for half in halves if half is not None]
        return Comparison(samples, whole, known, cut.same) if whole is not None and len(known) == 2 else None
    return None


def _result(
    whole: Any, batch: Any, roots: dict[str, Any], modules: list[nn.Module], device: torch.device, precision: Precision
) -> Sums | None:
    """What the task returns for a batch, after it was called with the whole one: a first forward may initialise what it
    finds empty from its batch. None if the result is not finite, or random: two calls with the whole batch then differ.

    Raises what the task raises.
    """
    with contextlib.ExitStack() as stack:
        watched = stack.enter_context(untouched(device, **roots))
        for context in (torch.no_grad(), evaluation_mode(modules), precision.autocast, uncompiled()):
            stack.enter_context(context)
        sums = []
        for part in (whole, batch):
            loss, count, _ = roots["task"](roots["model"], map_tensors(lambda tensor: tensor.to(device), part))
            if not isinstance(loss, Tensor) or loss.ndim:
                return None
            sums.append(Sums(float(loss), float(count), 8 * loss.dtype.itemsize))
    is_certain = batch is not whole or all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(*sums, strict=True))
    return sums[1] if is_certain and not watched.has_drawn and all(map(math.isfinite, sums[1])) else None


def _verdict(compared: Comparison, setting: str, tolerance: float) -> str | None:
    """The message, or None where the results add up, or nothing can be said."""
    samples, whole, (a, b), same = compared
    together = Sums(a.loss + b.loss, a.divisor + b.divisor)
    size = (abs(whole.loss) + abs(a.loss) + abs(b.loss)) / 2
    counts_add_up = math.isclose(whole.divisor, together.divisor, rel_tol=tolerance)
    difference = abs(whole.loss - together.loss)
    numbers = (
        f"for {samples} samples it returns {whole.loss:.6g} with a count of {whole.divisor:g}, and for their halves "
        f"{a.loss:.6g} with {a.divisor:g} and {b.loss:.6g} with {b.divisor:g}"
    )
    if difference > tolerance * size and size > 1e-6 * min(1.0, abs(whole.divisor)) and _is_mean(compared, tolerance):
        return (
            f"{setting}: the loss is a mean, where a sum is needed: {numbers}. It would be divided by the count "
            "once more, and weigh uneven micro-batches wrongly: return the sum of the samples' (or tokens') losses and "
            f"how many there are, such as the mean times its number of summands. {_IF_MEANT}"
        )
    if not same:
        return None
    if difference > tolerance * (size + FLOOR * abs(whole.divisor)):
        return (
            f"{setting}: the loss is no sum over samples: {numbers}. So it would depend on the micro-batch, and "
            "with that on the memory. If it compares the samples of its batch, say so by `whole_batch = True` on the "
            "task: its batch is then never cut (or give it embed and loss_of_embeddings: docs/extending.md). If it is "
            "the model that normalises over the batch in evaluation mode, "
            f"let it use running statistics there. {_IF_MEANT}"
        )
    if not counts_add_up:
        return (
            f"{setting}: the count does not add up: {numbers}. Micro-batches would be weighed wrongly: return how "
            f"many samples or tokens the loss is a sum of, or the sum of their weights. {_IF_MEANT}"
        )
    return None


_IF_MEANT = "train.check_loss=false trains with it as it is"


def _is_mean(compared: Comparison, tolerance: float) -> bool:
    """Whether the loss of the whole is the mean of those of its halves: weighed alike, or by their counts. Where the
    values are the same, by whatever weights: tokens, say, while the count is of samples.
    """
    _, whole, (a, b), same = compared
    weights = [(1.0, 1.0), (a.divisor, b.divisor)]
    means = [(x * a.loss + y * b.loss) / (x + y) for x, y in weights if x + y]
    if any(math.isclose(whole.loss, mean, rel_tol=tolerance) for mean in means):
        return True
    margin = tolerance * abs(whole.loss)
    low, high = sorted((a.loss, b.loss))
    return same and low * high > 0 and low - margin <= whole.loss <= high + margin
