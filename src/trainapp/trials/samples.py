"""The first samples of training, in the batches that the checks compare.

A batch is compared with its halves, and with batches of the same values in another order. That does not show what
depends on the padding: samples that are collated differently together than in halves, mostly because they are padded to
the longest, are therefore looked for (`with_batch_as_trained`), and compared with their halves as training makes them:
collated apart, or by `split`. `FirstSamples` fetches them once for all trials.
"""

import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainapp.data.batch import elements_in, map_tensors, tensors_in
from trainapp.data.joining import are_equal, batch_dims, is_padded, join_parts
from trainapp.data.loader import Fetcher, Request, Split
from trainapp.data.sampler import Source
from trainapp.data.stream_reader import is_stream
from trainapp.errors import summary_of
from trainapp.state.snapshot import Snapshot
from trainapp.state.stateful import Owner, Stateful
from trainapp.trials.obstacles import Obstacle, Reason

COMPARED_SAMPLES = 4  # the fewest that have two halves, and parts of unequal sizes
SEARCHED_SAMPLES = 16  # among which other lengths are looked for: each of them is fetched and collated
# Stop the search at a half with so many times the elements of the first half: no sum of real lengths is then equal by
# chance.
SUFFICIENT_RATIO = 2.0


@dataclass(frozen=True, eq=False)  # each batch is equal to itself alone: tensors have no `==` that is true or false
class TrialBatch:
    """A batch to call a task with."""

    data: Any  # what the task gets, on the CPU
    positions: list[int]  # of its samples among all that are compared: what a sample draws depends on its position


class HalvedBatch(NamedTuple):
    """A batch and its halves."""

    whole: TrialBatch
    first_half: TrialBatch
    second_half: TrialBatch


class UnequalParts(NamedTuple):
    """Two parts of unequal sizes, which joined are the whole batch."""

    first: TrialBatch
    second: TrialBatch
    description: str  # of the parts, in words that continue "for"


class BatchAsTrained(NamedTuple):
    """A batch and its halves as training makes them, which may hold other values than the batch: padding."""

    batches: HalvedBatch | None = None  # None if they are not compared
    obstacle: Obstacle | None = None  # why they are not compared; None for data whose batches torch stacks
    is_padded: bool = False  # whether the batch is known to differ from its halves by padding alone


class Order(Enum):
    """Batches made of the halves of another one, in another order."""

    SWAPPED = auto()  # the second half, and then the first
    FIRST_HALF_TWICE = auto()
    SECOND_HALF_TWICE = auto()


class Samples(NamedTuple):
    """The batches to compare."""

    number: int  # of samples in the whole batch
    # All samples together, and in halves. If the halves have different lengths, the second may hold the data of the
    # first again, and the whole batch that data twice; their positions are still those of all samples.
    whole: TrialBatch
    first_half: TrialBatch
    second_half: TrialBatch
    # Whether the whole batch is known to be its halves joined: padding and graphs may depend on the whole batch.
    is_joined: bool
    reordered: Mapping[Order, TrialBatch] = {}  # of halves that are joined; empty for a first half that is repeated
    unequal_cuts: tuple[UnequalParts, ...] = ()  # the first sample and the others, the last and the others
    as_trained: BatchAsTrained = BatchAsTrained()
    collate_draws: bool = False  # whether the data's `collate` has drawn random numbers


class FirstSamples:
    """The first samples of training, fetched when they are first asked for, once for all trials.

    Args:
        source: of the samples of training.
        dataset: theirs.
        split: see `BatchLoader`.
        seed: see `Fetcher`.
    """

    def __init__(self, source: Source, dataset: Any, split: Split | None, seed: int):
        self.is_of_stream = is_stream(dataset)
        self._source = source
        self._dataset = dataset
        self._split = split
        self._seed = seed
        self._fetched: Samples | Obstacle | None = None  # None until they are asked for

    @property
    def has_users_collate(self) -> bool:
        """Whether batches are collated by a function of the user's."""
        collate = Fetcher(self._dataset, self._seed).collate
        return collate is not None and not getattr(collate, "__module__", "").startswith("trainapp.")

    def fetch(self) -> "Samples | Obstacle":
        """Return the samples, or why there are none: too few, or an error of the data set, which the first step
        reports. Raises errors of reading a stream, which come only once.
        """
        if self._fetched is None:
            # Other lengths are looked for only where a batch is more than its stacked samples.
            only_stacks = Fetcher(self._dataset, self._seed).only_stacks
            number = COMPARED_SAMPLES if only_stacks else SEARCHED_SAMPLES
            data, indices = self._source.first(number)
            self._fetched = self._fetch_without_a_trace(data, indices)
        return self._fetched

    def _fetch_without_a_trace(self, data: Any, indices: list[Any]) -> "Samples | Obstacle":
        """Return these samples of a data set, whose state stays as it is."""
        stateful = Stateful(data=data)
        try:
            with Snapshot.of(stateful).undone():
                samples = first_samples(data, indices[:COMPARED_SAMPLES], self._seed)
                if samples is None:
                    return Obstacle(Reason.ONE_SAMPLE)
                return with_batch_as_trained(samples, data, indices, self._seed, self._split)
        except Exception as error:
            return Obstacle(Reason.NOT_FETCHED, summary_of(error))


class WatchedFetcher(Fetcher):
    """A fetcher that watches whether the data's `collate` draws random numbers, from a global generator or from one in
    an attribute of the data.

    Attributes: `collate_draws`, whether any call has.
    """

    def __init__(self, dataset: Any, seed: int):
        super().__init__(dataset, seed)
        self.collate_draws = False
        collate = self.collate
        if collate is None:
            return
        generators = [owner for owner in Stateful(data=dataset).owners.values() if owner.kind == "generator"]

        def watched_collate(samples: list[Any]) -> Any:
            states_before = _generator_states(generators)
            batch = collate(samples)
            if states_before != _generator_states(generators):
                self.collate_draws = True
            return batch

        self.collate = watched_collate


def _generator_states(generators: Sequence[Owner]) -> bytes:
    """Return the states of the global generators, and of these."""
    states: list[Any] = [torch.get_rng_state(), np.random.get_state(), random.getstate()]
    for generator in generators:
        states.append(generator.copy())
    plain_states = [state.numpy() if isinstance(state, Tensor) else state for state in states]
    return pickle.dumps(plain_states)


def first_samples(data: Any, indices: Sequence[Any], seed: int) -> Samples | None:
    """Fetch these samples of a data set in batches. Return None for a single sample."""
    fetcher = WatchedFetcher(data, seed)
    samples = samples_in_batches(lambda chosen: fetcher[Request(0, chosen)], indices, range(len(indices)))
    if samples is None:
        return None
    return samples._replace(collate_draws=fetcher.collate_draws)


def samples_in_batches(
    batch_of: Callable[[list[Any]], Any], indices: Sequence[Any], positions: Sequence[int]
) -> Samples | None:
    """Return samples, an even number of them, in the batches that are compared. Return None for a single sample.

    Args:
        batch_of: makes the batch of the samples with these indices.
        indices: of the samples.
        positions: of the samples, see `TrialBatch`.
    """
    number = len(indices) // 2 * 2
    if number < 2:
        return None
    half = number // 2
    first_indices = list(indices[:half])
    second_indices = list(indices[half:number])
    positions = list(positions[:number])
    whole = TrialBatch(batch_of(first_indices + second_indices), positions)
    first_half = TrialBatch(batch_of(first_indices), positions[:half])
    second_half = TrialBatch(batch_of(second_indices), positions[half:])

    # A batch that is its halves joined: other orders of the same samples, and unequal parts.
    dims = batch_dims(whole.data, [first_half.data, second_half.data])
    if dims:
        samples = Samples(number, whole, first_half, second_half, is_joined=True)
        samples = samples._replace(reordered=_reordered(samples, dims))
        if number > 2:
            samples = samples._replace(unequal_cuts=_unequal_cuts(samples, batch_of, list(indices[:number])))
        return samples

    # Two halves of different lengths: the first one twice may still be itself joined.
    first_half_twice = batch_of(first_indices * 2)
    is_joined = bool(batch_dims(first_half_twice, [first_half.data, first_half.data]))
    if is_joined:
        whole = TrialBatch(first_half_twice, positions)
        second_half = TrialBatch(first_half.data, positions[half:])
    return Samples(number, whole, first_half, second_half, is_joined)


def _unequal_cuts(
    samples: Samples, batch_of: Callable[[list[Any]], Any], indices: list[Any]
) -> tuple[UnequalParts, ...]:
    """Return the whole batch cut behind its first and before its last sample, where it is these parts joined.

    One cut is not enough: a mean that is weighted by numbers such as 2, 2, 3, 1 of the samples adds up in halves and
    with the first sample apart, since 2 + 2 = 3 + 1 and 2 is their mean. Only equal ones add up in all three cuts.
    """
    whole = samples.whole
    last = len(indices) - 1
    cuts = []
    for cut, description in ((1, "the first and the others"), (last, "the others and the last")):
        first = TrialBatch(batch_of(indices[:cut]), whole.positions[:cut])
        second = TrialBatch(batch_of(indices[cut:]), whole.positions[cut:])
        if batch_dims(whole.data, [first.data, second.data]):
            cuts.append(UnequalParts(first, second, description))
    return tuple(cuts)


def _reordered(samples: Samples, dims: Sequence[int | None]) -> dict[Order, TrialBatch]:
    """Return batches of the same samples in other orders.

    Args:
        samples: whose whole batch is its halves joined.
        dims: in which they are joined, see `batch_dims`.
    """
    first_half = samples.first_half
    second_half = samples.second_half
    halves_by_order = {
        Order.SWAPPED: (second_half, first_half),
        Order.FIRST_HALF_TWICE: (first_half, first_half),
        Order.SECOND_HALF_TWICE: (second_half, second_half),
    }
    batches = {}
    for order, halves in halves_by_order.items():
        data = join_parts(samples.whole.data, [half.data for half in halves], dims)
        positions = [position for half in halves for position in half.positions]
        batches[order] = TrialBatch(data, positions)
    return batches


# --- samples that are collated differently together than in halves


def with_batch_as_trained(
    samples: Samples, data: Any, indices: Sequence[Any], seed: int, split: Split | None
) -> Samples:
    """Return the samples with a batch that is not just its halves joined, if there is one; otherwise the reason.

    Args:
        samples: from `first_samples`.
        data: their data set.
        indices: of the first samples, `SEARCHED_SAMPLES` of them if there are as many.
        seed: see `Fetcher`.
        split: see `BatchLoader`.
    """
    fetcher = WatchedFetcher(data, seed)
    fetcher.collate_draws = samples.collate_draws
    if fetcher.only_stacks:
        return samples
    try:
        as_trained = _batch_as_trained(samples, fetcher, list(indices), split)
    except Exception as error:  # training meets it, too, and tells where
        as_trained = BatchAsTrained(obstacle=Obstacle(Reason.ERROR, summary_of(error)))
    return samples._replace(as_trained=as_trained, collate_draws=fetcher.collate_draws)


def _batch_as_trained(
    samples: Samples, fetcher: WatchedFetcher, indices: list[Any], split: Split | None
) -> BatchAsTrained:
    half = samples.number // 2

    # The whole batch: of the compared samples where it differs from its halves, or else with another second half.
    whole_indices = indices[: samples.number]
    whole = samples.whole
    second_half = samples.second_half
    if samples.is_joined:
        different_indices = _differently_shaped_half(samples, fetcher, indices)
        if not different_indices:
            obstacle = None
            if fetcher.collate is not None:
                obstacle = Obstacle(Reason.ONE_SHAPE, str(len(indices)))
            return BatchAsTrained(obstacle=obstacle)
        whole_indices = indices[:half] + different_indices
        whole = TrialBatch(fetcher[Request(0, whole_indices)], whole.positions)
        second_half = TrialBatch(fetcher[Request(0, different_indices)], second_half.positions)

    chance = _chance_in(fetcher, whole.data, whole_indices)
    if chance is not None:
        return BatchAsTrained(obstacle=Obstacle(chance))

    # Its halves, as training makes them: by `split` where that does more than to separate samples, such as to cut off
    # padding; otherwise collated apart.
    batches = HalvedBatch(whole, samples.first_half, second_half)
    if split is not None:
        split_batches = _split_in_halves(batches, split)
        if not _is_joined(split_batches):
            batches = split_batches
    if _is_joined(batches):
        return BatchAsTrained(obstacle=Obstacle(Reason.ALWAYS_JOINED))
    parts = [batches.first_half.data, batches.second_half.data]
    return BatchAsTrained(batches, is_padded=is_padded(whole.data, parts))


def _split_in_halves(batches: HalvedBatch, split: Split) -> HalvedBatch:
    """Return the batch with halves made by `split`, in the place of those collated apart."""
    whole, first_half, second_half = batches
    half = len(first_half.positions)
    first_data = split(map_tensors(Tensor.clone, whole.data), 0, half)
    second_data = split(map_tensors(Tensor.clone, whole.data), half, 2 * half)
    return HalvedBatch(
        whole, TrialBatch(first_data, first_half.positions), TrialBatch(second_data, second_half.positions)
    )


def _is_joined(batches: HalvedBatch) -> bool:
    """Return whether the whole batch is its halves joined."""
    whole, first_half, second_half = batches
    return bool(batch_dims(whole.data, [first_half.data, second_half.data]))


def _differently_shaped_half(samples: Samples, fetcher: Fetcher, indices: list[Any]) -> list[Any]:
    """Return the indices of half as many samples as are compared, whose batch has other shapes than the first half: the
    first with a sufficient ratio of elements, or the most different. Empty if all have the same shapes.
    """
    half = samples.number // 2
    most_different: list[Any] = []
    if not samples.reordered:  # the two halves are known to differ, if not by their shapes
        most_different = indices[half : 2 * half]

    # Half after half, as each is fetched and collated: one that differs enough ends the search.
    largest_ratio = 0.0
    for start in range(half, len(indices) - half + 1, half):
        candidate = indices[start : start + half]
        ratio = _ratio_of_elements(samples.first_half.data, fetcher[Request(0, candidate)])
        if ratio > largest_ratio:
            most_different = candidate
            largest_ratio = ratio
        if ratio >= SUFFICIENT_RATIO:
            break
    return most_different


def _ratio_of_elements(first: Any, second: Any) -> float:
    """Return how many times as many elements one batch has as the other; 0 if all shapes are equal."""
    first_shapes = [tensor.shape for tensor in tensors_in(first)]
    second_shapes = [tensor.shape for tensor in tensors_in(second)]
    if first_shapes == second_shapes:
        return 0.0
    smaller, larger = sorted((elements_in(first), elements_in(second)))
    return larger / max(smaller, 1)


def _chance_in(fetcher: WatchedFetcher, batch: Any, indices: list[Any]) -> Reason | None:
    """Return why the batch of these samples may differ from its halves by chance; None if it does not."""
    repeated_batch = fetcher[Request(0, indices)]
    if fetcher.collate_draws:
        return Reason.RANDOM_COLLATE
    tensors = tensors_in(batch)
    repeated = tensors_in(repeated_batch)
    if len(tensors) != len(repeated) or not all(map(are_equal, tensors, repeated)):
        return Reason.OTHER_VALUES
    return None
