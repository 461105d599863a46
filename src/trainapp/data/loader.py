"""Fetches batches and moves them to the device: per-sample seeds, copies from pinned memory."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from trainapp.data.batch import MicroBatch, compacted, map_tensors
from trainapp.data.sampler import Draw
from trainapp.data.workers import build_loader, start_iteration
from trainapp.rng import CPU, preserved_rng, seed_from

DUMMY = 0  # the sample of a micro-batch that only keeps its rank in step with the others
Split = Callable[[Any, int, int], Any]  # `split(batch, start, end)`: the batch of only its samples [start, end)


class Request(NamedTuple):
    """A micro-batch to fetch."""

    epoch: int  # augmentation depends on it
    indices: Sequence[int]  # into the data set; none for a dummy
    positions: Sequence[int] = ()  # as of `MicroBatch`
    last: bool = False  # as of `MicroBatch`
    fewest: int = 1  # the number of samples of a dummy


class Fetcher(Dataset):
    """`fetcher[request]` is a collated batch. Runs in the loader's workers, or in the main process without them.

    A data set with `__getitems__` that also has `set_epoch` (or is `in_memory`) returns whole batches, and promises
    that a sample depends only on (seed, epoch, index). For other data sets the global generators are seeded from these
    three before each sample, so random transforms give the same sample every time it is fetched. They are also seeded
    before the data set's own `collate`, which may mix samples at random, and before its `set_epoch`.

    Attributes: `collate`, the data set's own, None: torch's.
    """

    def __init__(self, dataset: Any, seed: int):
        self.dataset = dataset
        self.seed = seed
        self._epoch: int | None = None
        promises_equal_samples = hasattr(dataset, "set_epoch") or getattr(dataset, "in_memory", False)
        self._fetches_batches = hasattr(dataset, "__getitems__") and promises_equal_samples
        self.collate = getattr(dataset, "collate", None)

    @property
    def only_stacks(self) -> bool:
        """Whether torch makes the batches, so that samples of different shapes are an error."""
        return self.collate is None and not self._fetches_batches

    def __getitem__(self, request: Request) -> Any:
        if request.epoch != self._epoch:
            self._epoch = request.epoch
            self._begin_epoch(request.epoch)

        indices = request.indices or [DUMMY] * request.fewest
        samples = None
        if self._fetches_batches:
            samples = self.dataset.__getitems__(indices)
            if not isinstance(samples, list):
                return samples  # collated by the data set

        # Seeding must not disturb the generators of a run that fetches in its own process.
        with preserved_rng(CPU):
            if not samples:
                samples = [self._sample(request.epoch, index) for index in indices]
            if self.collate is None:
                return default_collate(samples)
            seed_from(CPU, self.seed, request.epoch, *indices)
            return self.collate(samples)

    def _begin_epoch(self, epoch: int) -> None:
        """Call the data set's `set_epoch`. What it draws, such as new negative samples, is the same in every process
        and after a resume.
        """
        if not hasattr(self.dataset, "set_epoch"):
            return
        with preserved_rng(CPU):
            seed_from(CPU, self.seed, epoch)
            self.dataset.set_epoch(epoch)

    def _sample(self, epoch: int, index: int) -> Any:
        """Return one sample, after seeding the global generators for it."""
        # A sample drawn again gets other random transforms.
        draw_position = [index.position] if isinstance(index, Draw) else []
        seed_from(CPU, self.seed, epoch, index, *draw_position)
        return self.dataset[int(index)]


class BatchedDataset(Dataset, Sized):
    """The base of the built-in data sets: fetches whole batches, and a single sample as a batch of one.

    Derived classes write `__len__` and `__getitems__`, which returns a batch that is already collated.
    """

    # Fetching is so cheap that loader workers would only add overhead.
    in_memory = True

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the batch of these samples, collated. Raises IndexError for an index outside the data."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one sample, without the batch dimension. Raises IndexError beyond the data."""
        batch = self.__getitems__([index])
        return {key: tensor[0] for key, tensor in batch.items()}

    def _positions(self, indices: Sequence[int]) -> np.ndarray:
        """Return `indices` as int64 [B]. Raises IndexError for one that is not in [0, len(self)).

        Negative indices are refused: a sample's random numbers depend on its index, so it must have only one.
        """
        positions = np.asarray(indices, dtype=np.int64)
        # Viewed as unsigned, a negative index is huge: one comparison for both limits, 3 us instead of 5 per batch.
        if positions.size and positions.view(np.uint64).max() >= len(self):
            raise IndexError(f"sample indices must lie in [0, {len(self)}), got {list(indices)}")
        return positions


class BatchLoader:
    """Turns requests into batches on the device.

    Args:
        dataset: the samples.
        seed: see `Fetcher`.
        workers: number of loader processes; 0 fetches in this process.
        device: of the batches.
        split: splits a fetched batch, unless the data set has its own method `split`; None: without such a method,
            samples are collated again to split a batch.

    Attributes: `split`, whichever of the two is used.
    """

    def __init__(self, dataset: Dataset, seed: int, workers: int, device: torch.device, split: Split | None = None):
        self.fetcher = Fetcher(dataset, seed)
        self.seed = seed
        self.device = device
        self.workers = workers
        # Data sets often have an attribute of this name that is "train" or "val".
        dataset_split = getattr(dataset, "split", None)
        self.split = dataset_split if callable(dataset_split) else split
        self._pins_memory = device.type == "cuda"
        self._requests: Iterator[Request] = iter(())  # for the worker processes
        self._loader: DataLoader | None = None  # None: batches are fetched in this process
        if workers:
            self._loader = build_loader(
                self.fetcher,
                workers,
                # Torch's default makes lists of tuples, and loses attributes of mappings. A view of the data would be
                # sent by copying all of the data to shared memory, once per worker.
                collate_fn=compacted,
                sampler=self,
                pin_memory=self._pins_memory,
                persistent_workers=True,
            )

    def __iter__(self) -> Iterator[Request]:
        """Return what the worker processes are to fetch."""
        return self._requests

    def example(self, dataset: Any, samples: int) -> Any:
        """Return the first `samples` samples of an indexable data set as a batch, on the CPU, fetched in this
        process.
        """
        indices = list(range(min(samples, len(dataset))))
        return Fetcher(dataset, self.seed)[Request(0, indices)]

    def batches(self, requests: Iterator[Request]) -> Iterator[MicroBatch]:
        """Return an iterator of the requested batches on the device; copies from pinned memory do not block the host.

        Starts a new iteration, which ends the previous one. Raises the data set's errors.
        """
        # A request is read twice: to fetch its batch, and to label it. `tee` buffers those of prefetched batches.
        requests_to_fetch, requests_to_label = itertools.tee(requests)
        fetched: Iterator[Any]
        if self._loader is None:
            fetched = map(self.fetcher.__getitem__, requests_to_fetch)
            if self._pins_memory:
                fetched = (map_tensors(_pinned, batch) for batch in fetched)
        else:
            self._requests = requests_to_fetch
            fetched = start_iteration(self._loader)
        return map(self._micro_batch, fetched, requests_to_label)

    def close(self) -> None:
        """End the processes. Discards prefetched batches."""
        self._requests = iter(())
        self._loader = None  # torch ends the workers with the last reference to their iterator

    def _micro_batch(self, batch: Any, request: Request) -> MicroBatch:
        batch = self._move(batch)
        slice_samples = functools.partial(self._slice_samples, batch, request)
        positions = request.positions or [DUMMY] * request.fewest
        return MicroBatch(batch, request.last, bool(request.indices), positions, slice_samples)

    def _slice_samples(self, batch: Any, request: Request, start: int, end: int) -> Any:
        """Return the batch of only the samples [start, end) of a fetched batch, on the device.

        They are fetched and collated again, in this process, unless `split` splits the batch. No other way works for
        every batch: tensors may be packed, have time first, belong to no sample, or depend on all samples.
        """
        if self.split is not None:
            return self.split(batch, start, end)
        piece_request = Request(request.epoch, request.indices[start:end])
        return self._move(self.fetcher[piece_request])

    def _move(self, batch: Any) -> Any:
        if self.device.type == "cpu":
            return batch
        return map_tensors(lambda tensor: tensor.to(self.device, non_blocking=self._pins_memory), batch)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in pinned memory; one that a data set keeps on a device, which cannot be pinned, unchanged."""
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor
