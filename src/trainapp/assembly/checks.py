"""`train.check_loss`: before the first step, whether the task's loss is a sum over samples, so that a batch can be cut.

A mean would be divided by the count again, making gradients that many times too small; a loss that compares the samples
of its batch depends on the micro-batch. Neither shows in a curve. The loss of the first four samples is therefore
compared with those of their two halves, in evaluation mode and without gradients; if the halves are padded differently,
the loss of the first half twice is compared with the first half's.

Costs five forwards and fetching twelve samples. A stream's samples are read once and kept for training. What cannot be
compared is skipped silently:

- a task that draws random numbers
- a loss that is not finite
- a batch whose halves hold other values (then only a mean is reported)
- a task or model that fails here: the first step reports the error
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainapp.assembly.components import Components
from trainapp.config.schema import Config
from trainapp.data.batch import map_tensors, tensors_in
from trainapp.data.loader import Fetcher, Request
from trainapp.errors import UserError
from trainapp.losses.losses import compares_samples, is_built_in
from trainapp.memory.device import uncompiled
from trainapp.models.inspect import belongs_to_trainapp
from trainapp.optim.precision import Precision
from trainapp.parallel.ranks import Ranks
from trainapp.rng import preserved_rng
from trainapp.snapshot import Snapshot
from trainapp.stateful import Stateful
from trainapp.torch_private import DispatchMode, draws_numbers, has_values
from trainapp.units import listed

SAMPLES = 4
# Relative tolerances. Kernels choose their order of additions by batch size, which changes the last bits, and layers
# amplify that; a mean is off by half, a contrastive loss of 4 and 2 samples by a third.
FINE, COARSE = 1e-3, 2e-2  # COARSE: for matmuls in less than fp32 precision
FLOOR = 0.1  # per count: a loss whose summands cancel out has their rounding errors
_IF_MEANT = "train.check_loss=false trains with it as it is"
log = logging.getLogger(__name__)


class Sums(NamedTuple):
    """The task's result for a batch. divisor: its count. bits: of the loss's dtype."""

    loss: float
    divisor: float
    bits: int = 32


class Comparison(NamedTuple):
    """The task's results for a batch of `samples` samples and its halves. same: whether both hold the same values."""

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
    """Raises UserError for a loss or a count that does not add up, and errors of reading a stream. Collective. Call
    before the model is compiled or sharded. Restores everything a Snapshot covers; modules end up on `device`.

    setting: the setting that names the task, with its value. first: as `TrainBatches.first`; None: nothing is checked.
    """
    task = components.task
    is_known = is_built_in(task) and belongs_to_trainapp(model)
    if first is None or compares_samples(task) or is_known:
        return
    verdict = None
    if all(map(has_values, model.parameters())):  # with parallel.fsdp.meta_init there are no values yet
        # Outside the comparison, whose errors are left to the first step: a stream raises its error only once.
        parts = dataclasses.replace(components, train_data=first(SAMPLES))
        compared = None
        try:
            with preserved_rng(device):
                compared = _compared(config, parts, model, device, precision)
        except Exception as error:  # the first step raises it again, with its traceback
            log.debug("train.check_loss: nothing can be compared: %s", error)
        if compared is not None:
            has_bits = min(own.bits for own in (compared.whole, *compared.halves)) >= 32
            is_fine = config.precision.mode == "fp32" and has_bits and _has_fine_weights(model)
            verdict = _verdict(compared, setting, FINE if is_fine else COARSE)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    by_rank = [text for text in ranks.all_gather_object(verdict) if text]  # a rank may have run out of memory here
    if by_rank:
        raise UserError(by_rank[0])


def _has_fine_weights(model: nn.Module) -> bool:
    return all(p.dtype.itemsize >= 4 for p in model.parameters() if p.is_floating_point())


class _Draws(DispatchMode):
    """Detects operations that draw random numbers, from any generator. Attribute: `found`."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.found or draws_numbers(func)
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _compared(
    config: Config, components: Components, model: nn.Module, device: torch.device, precision: Precision
) -> Comparison | None:
    """The results to compare; None if they cannot be compared. Raises errors of the data, the task and the model."""
    data, task = components.train_data, components.task
    stateful = Stateful(model=model, task=task, data=data)
    modules = (model, *stateful.modules.values())
    for module in modules:
        module.to(device)  # modules of the task and the data are moved later anyway
    snapshot, samples = Snapshot.of(stateful), min(SAMPLES, len(data))
    if samples < 2:
        return None

    def result(batch: Any) -> Sums | None:
        loss, count, _ = task(model, map_tensors(lambda tensor: tensor.to(device), batch))
        if not isinstance(loss, Tensor) or loss.ndim or not (math.isfinite(loss) and math.isfinite(count)):
            return None
        return Sums(float(loss), float(count), 8 * loss.dtype.itemsize)

    with snapshot.undone():  # including changes from reading the data
        batch, halves, same = _halves(data, config.train.seed, samples)
    with snapshot.undone("trained"), precision.autocast, uncompiled(), _Draws() as draws:
        for module in modules:
            module.eval()
        # The first forward may initialise state. The next two differ if NumPy or Python draw random numbers.
        _, first, whole, *others = map(result, (batch, batch, batch, *halves))
    if snapshot.lost:
        log.warning("the check of the loss has written %s, frozen and in place", listed(snapshot.lost))
    known = [half for half in others if half is not None]
    if draws.found or first is None or whole is None or len(known) < 2:
        return None
    if not all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(first, whole, strict=True)):
        return None
    return Comparison(samples, whole, known, same)


def _halves(data: Any, seed: int, samples: int) -> tuple[Any, list[Any], bool]:
    """A batch of `samples` samples, its halves, and whether these are known to hold the same values."""
    first, second = list(range(samples // 2)), list(range(samples // 2, samples))
    requests = [Request(0, indices) for indices in (first + second, first, second, first + first)]
    whole, a, b, twice = map(Fetcher(data, seed).__getitem__, requests)
    for batch, halves in ((whole, [a, b]), (twice, [a, a])):
        if consists_of(batch, halves):
            return batch, halves, True
    return whole, [a, b], False


def consists_of(batch: Any, parts: Sequence[Any]) -> bool:
    """Whether each tensor of the batch is the concatenation of its parts in some dimension, ignoring tensors that are
    identical in all of them.
    """
    of_each = [tensors_in(batch), *map(tensors_in, parts)]
    if len({len(tensors) for tensors in of_each}) > 1:
        return False
    together = list(zip(*of_each, strict=True))
    if any(t.layout is not torch.strided or t.is_nested for tensors in together for t in tensors):
        return False
    of_samples = [tensors for tensors in together if not all(torch.equal(tensors[0], t) for t in tensors[1:])]
    return bool(of_samples) and all(_is_made_of(whole, pieces) for whole, *pieces in of_samples)


def _is_made_of(whole: Tensor, pieces: list[Tensor]) -> bool:
    for dimension in range(whole.ndim):
        if any(piece.ndim != whole.ndim for piece in pieces):
            return False
        rows = {(*t.shape[:dimension], *t.shape[dimension + 1 :]) for t in (whole, *pieces)}
        if len(rows) == 1 and torch.equal(whole, torch.cat(pieces, dimension)):
            return True
    return False


def _verdict(compared: Comparison, setting: str, tolerance: float) -> str | None:
    """The message; None if the results add up or cannot be compared."""
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
            f"their number, such as the mean times its number of summands. {_IF_MEANT}"
        )
    if not same:
        return None
    if difference > tolerance * (size + FLOOR * abs(whole.divisor)):
        return (
            f"{setting}: the loss is not a sum over samples: {numbers}. It would depend on the micro-batch, and so "
            "on the memory. If it compares the samples of its batch, declare `whole_batch = True` on the "
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


def _is_mean(compared: Comparison, tolerance: float) -> bool:
    """Whether the whole batch's loss is the mean of its halves' losses, weighted equally or by their counts; if both
    hold the same values, with any weights (such as tokens, while the count is of samples).
    """
    _, whole, (a, b), same = compared
    weights = [(1.0, 1.0), (a.divisor, b.divisor)]
    means = [(x * a.loss + y * b.loss) / (x + y) for x, y in weights if x + y]
    if any(math.isclose(whole.loss, mean, rel_tol=tolerance) for mean in means):
        return True
    margin = tolerance * abs(whole.loss)
    low, high = sorted((a.loss, b.loss))
    return same and low * high > 0 and low - margin <= whole.loss <= high + margin
