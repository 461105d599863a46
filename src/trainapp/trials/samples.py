"""The first samples of training, in the batches that the checks compare.

A batch is compared with its halves, and with batches of the same values in another order. That does not show what
depends on the padding: samples that are collated differently together than in halves, mostly because they are padded to
the longest, are therefore looked for (`with_cut`), and compared with their halves as training makes them: collated
apart, or cut by `split`. `FirstSamples` fetches them once for all trials.
"""

import pickle
import random
from collections.abc import Sequence
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
UNEVEN = ("first", "rest")  # names of batches: a cut into unequal parts


class Cut(NamedTuple):
    """A batch and its halves as training makes them, which may hold other values than the batch: padding."""

    names: tuple[str, ...] = ()  # theirs in `Samples.batches`, the whole one first; empty if they are not compared
    obstacle: Obstacle | None = None  # why they are not compared; None for data whose batches torch stacks
    is_padded: bool = False  # whether the batch is known to differ from its halves by padding alone


class Samples(NamedTuple):
    """The batches to compare, on the CPU, by name.

    `a` and `b` are halves of the samples, and `ab` is the two together. If `is_joined`, there are also `ba`, `aa` and
    `bb`, or `b` is the first half again; and of four samples `first` and `rest`, a cut into unequal parts. The names of
    `cut` come in addition: `c` for another second half, capital letters for halves made by `split`.
    """

    number: int  # of samples in `ab`
    batches: dict[str, Any]
    is_joined: bool  # whether `ab` is known to be its halves joined: padding and graphs may depend on the whole batch
    cut: Cut = Cut()
    collate_draws: bool = False  # whether the data's `collate` has drawn random numbers

    def positions(self, name: str) -> list[int]:
        """Return the positions of a batch's samples: `a` and `A` have the first ones."""
        if name == "first":
            return [0]
        if name == "rest":
            return list(range(1, self.number))
        half = self.number // 2
        positions: list[int] = []
        for letter in name:
            positions.extend(range(half) if letter in "aA" else range(half, self.number))
        return positions


class FirstSamples:
    """The first samples of training, fetched when they are first asked for, once for all trials.

    Args:
        source: of the samples of training.
        dataset: theirs.
        split: see `BatchLoader`.
        seed: see `Fetcher`.
        device: of modules that the data set has.
    """

    def __init__(self, source: Source, dataset: Any, split: Split | None, seed: int, device: torch.device):
        self.is_of_stream = is_stream(dataset)
        self._source = source
        self._dataset = dataset
        self._split = split
        self._seed = seed
        self._device = device
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
        for module in stateful.modules.values():
            module.to(self._device)
        try:
            with Snapshot.of(stateful).undone():
                samples = first_samples(data, indices[:COMPARED_SAMPLES], self._seed)
                if samples is None:
                    return Obstacle(Reason.ONE_SAMPLE)
                return with_cut(samples, data, indices, self._seed, self._split)
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
    number = len(indices) // 2 * 2
    if number < 2:
        return None
    half = number // 2
    first_half = list(indices[:half])
    second_half = list(indices[half:number])
    fetcher = WatchedFetcher(data, seed)
    whole = fetcher[Request(0, first_half + second_half)]
    a = fetcher[Request(0, first_half)]
    b = fetcher[Request(0, second_half)]

    # A batch that is its halves joined: other orders of the same samples, and unequal parts.
    dims = batch_dims(whole, [a, b])
    if dims:
        batches = {"ab": whole, "a": a, "b": b}
        for name, parts in {"ba": (b, a), "aa": (a, a), "bb": (b, b)}.items():
            batches[name] = join_parts(whole, parts, dims)
        if number > 2:
            first = fetcher[Request(0, first_half[:1])]
            all_but_first = fetcher[Request(0, first_half[1:] + second_half)]
            uneven = [first, all_but_first]
            if batch_dims(whole, uneven):
                batches.update(zip(UNEVEN, uneven, strict=True))
        return Samples(number, batches, is_joined=True, collate_draws=fetcher.collate_draws)

    # Two halves of different lengths: the first one twice may still be itself joined.
    twice = fetcher[Request(0, first_half * 2)]
    is_joined = bool(batch_dims(twice, [a, a]))
    batches = {"ab": twice, "a": a, "b": a} if is_joined else {"ab": whole, "a": a, "b": b}
    return Samples(number, batches, is_joined, collate_draws=fetcher.collate_draws)


# --- samples that are collated differently together than in halves


def with_cut(samples: Samples, data: Any, indices: Sequence[Any], seed: int, split: Split | None) -> Samples:
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
        samples = _with_cut(samples, fetcher, list(indices), split)
    except Exception as error:  # training meets it, too, and tells where
        samples = samples._replace(cut=Cut(obstacle=Obstacle(Reason.ERROR, summary_of(error))))
    return samples._replace(collate_draws=fetcher.collate_draws)


def _with_cut(samples: Samples, fetcher: WatchedFetcher, indices: list[Any], split: Split | None) -> Samples:
    half = samples.number // 2
    batches = dict(samples.batches)

    # The whole batch: of the compared samples where it differs from its halves, or else with another second half.
    names: tuple[str, ...]
    if samples.is_joined:
        different_half = _differently_shaped_half(samples, fetcher, indices)
        if not different_half:
            obstacle = None
            if fetcher.collate is not None:
                obstacle = Obstacle(Reason.ONE_SHAPE, str(len(indices)))
            return samples._replace(cut=Cut(obstacle=obstacle))
        whole_indices = indices[:half] + different_half
        names = ("ac", "a", "c")
        batches["ac"] = fetcher[Request(0, whole_indices)]
        batches["c"] = fetcher[Request(0, different_half)]
    else:
        whole_indices = indices[: samples.number]
        names = ("ab", "a", "b")

    whole = batches[names[0]]
    chance = _chance_in(fetcher, whole, whole_indices)
    if chance is not None:
        return samples._replace(cut=Cut(obstacle=Obstacle(chance)))

    # Its halves, as training makes them.
    if split is not None:
        batches["A"] = split(map_tensors(Tensor.clone, whole), 0, half)
        batches["C"] = split(map_tensors(Tensor.clone, whole), half, 2 * half)
        cuts_more_than_samples = not batch_dims(whole, [batches["A"], batches["C"]])  # such as padding
        if cuts_more_than_samples:
            names = (names[0], "A", "C")
    halves = [batches[name] for name in names[1:]]
    if batch_dims(whole, halves):
        return samples._replace(cut=Cut(obstacle=Obstacle(Reason.ALWAYS_JOINED)))
    cut = Cut(names, is_padded=is_padded(whole, halves))
    return samples._replace(batches=batches, cut=cut)


def _differently_shaped_half(samples: Samples, fetcher: Fetcher, indices: list[Any]) -> list[Any]:
    """Return the indices of half as many samples as are compared, whose batch has other shapes than the first half: the
    first with a sufficient ratio of elements, or the most different. Empty if all have the same shapes.
    """
    half = samples.number // 2
    first_half = samples.batches["a"]
    most_different: list[Any] = []
    if "ba" not in samples.batches:  # the two halves are known to differ, if not by their shapes
        most_different = indices[half : 2 * half]

    # Half after half, as each is fetched and collated: one that differs enough ends the search.
    largest_ratio = 0.0
    for start in range(half, len(indices) - half + 1, half):
        candidate = indices[start : start + half]
        ratio = _ratio_of_elements(first_half, fetcher[Request(0, candidate)])
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
