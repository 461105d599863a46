"""Fetches batches and moves them to the device: worker processes, per-sample seeds, copies from pinned memory."""

import functools
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from trainapp.data.batch import MicroBatch, compacted, map_tensors
from trainapp.data.sampler import Draw
from trainapp.rng import CPU, preserved_rng, seed_from
from trainapp.torch_private import outside_dispatch_modes

PARENT_CHECK = 1.0  # seconds
DUMMY = 0  # the sample of a micro-batch that only keeps its rank in step with the others
Split = Callable[[Any, int, int], Any]  # `split(batch, start, end)`: the batch of only its samples [start, end)


class Request(NamedTuple):
    """A micro-batch to fetch: the epoch, on which augmentation depends; indices into the data set, none for a dummy;
    `positions` and `last` of `MicroBatch`; the number of samples of a dummy.
    """

    epoch: int
    indices: Sequence[int]
    positions: Sequence[int] = ()
    last: bool = False
    fewest: int = 1


class Fetcher(Dataset):
    """`fetcher[request]` is a collated batch. Runs in the loader's workers, or in the main process without them.

    A data set with `__getitems__` that also has `set_epoch` (or is `in_memory`) returns whole batches, and promises
    that a sample depends only on (seed, epoch, index). For other data sets the global generators are seeded from these
    three before each sample, so random transforms give the same sample every time it is fetched. They are also seeded
    before the data set's own `collate`, which may mix samples at random.

    Attributes: `collate`, the data set's own, None: torch's.
    """

    def __init__(self, dataset: Any, seed: int):
        self.dataset, self.seed = dataset, seed
        self._epoch: int | None = None
        promises = hasattr(dataset, "set_epoch") or getattr(dataset, "in_memory", False)
        self._batched = hasattr(dataset, "__getitems__") and promises
        self.collate = getattr(dataset, "collate", None)

    @property
    def only_stacks(self) -> bool:
        """Whether torch makes the batches, so that samples of different shapes are an error."""
        return self.collate is None and not self._batched

    def __getitem__(self, request: Request) -> Any:
        if request.epoch != self._epoch:
            self._epoch = request.epoch
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(request.epoch)
        indices, samples = request.indices or [DUMMY] * request.fewest, None
        if self._batched:
            samples = self.dataset.__getitems__(indices)
            if not isinstance(samples, list):
                return samples
        with preserved_rng(CPU):
            samples = samples or [self._sample(index) for index in indices]
            if self.collate is None:
                return default_collate(samples)
            seed_from(CPU, self.seed, request.epoch, *indices)
            return self.collate(samples)

    def _sample(self, index: int) -> Any:
        # A sample drawn again gets other random transforms.
        own = (index, index.position) if isinstance(index, Draw) else (index,)
        seed_from(CPU, self.seed, self._epoch or 0, *own)
        return self.dataset[int(index)]


class BatchedDataset(Dataset, Sized):
    """The base of the built-in data sets: fetches whole batches, and a single sample as a batch of one.

    Derived classes write `__len__` and `__getitems__`, which returns a batch that is already collated.
    """

    # Fetching is so cheap that loader workers would only add overhead.
    in_memory = True

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """The batch of these samples, collated. Raises IndexError for an index outside the data."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One sample, without the batch dimension. Raises IndexError beyond the data."""
        return {key: value[0] for key, value in self.__getitems__([index]).items()}

    def _positions(self, indices: Sequence[int]) -> np.ndarray:
        """`indices` as int64 [B]. Raises IndexError for one that is not in [0, len(self)).

        Negative indices are refused: a sample's random numbers depend on its index, so it must have only one.
        """
        positions = np.asarray(indices, dtype=np.int64)
        # Viewed as unsigned, a negative index is huge: one comparison catches both kinds.
        if positions.size and positions.view(np.uint64).max() >= len(self):
            raise IndexError(f"sample indices must lie in [0, {len(self)}), got {list(indices)}")
        return positions


def loader_of(dataset: Dataset, workers: int, **options: Any) -> DataLoader:
    """A DataLoader of items that are complete as the data set returns them, by worker processes.

    On Linux these are forked, so that a data set need not pickle, unless the program has set another start method
    than Python's default, which is no longer fork on 3.14.
    """
    standard = multiprocessing.get_start_method(allow_none=True) in (None, multiprocessing.get_all_start_methods()[0])
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=workers,
        worker_init_fn=_follow_the_run,
        generator=torch.Generator(),  # the default draws from the run's, so workers would change the result
        multiprocessing_context="fork" if workers and standard and sys.platform == "linux" else None,
        **options,
    )


def _follow_the_run(worker: int) -> None:
    """Make this worker end with the process that started it: not before, and not after."""
    # Signals may reach the whole process group; the step in progress still needs the workers.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)  # unlike SIG_IGN, not for programs that a worker starts
    threading.Thread(target=_end_with, args=(os.getppid(),), name="parent", daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process once `parent` is gone, as after SIGKILL.

    torch's workers notice that too (2.13), but then wait for what they have sent to be read. The system's own signal
    (PR_SET_PDEATHSIG) already comes when the thread that started the worker ends.
    """
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK)
    os._exit(1)


def started(loader: DataLoader) -> Iterator[Any]:
    """A new iteration over it. Since its processes ignore SIGTERM, torch and multiprocessing kill a stuck one."""
    with outside_dispatch_modes():  # processes inherit active modes: a memory counter, with its limit
        items: Any = iter(loader)
    for worker in items._workers:
        worker._popen.terminate = worker._popen.kill
    return items


class BatchLoader:
    """Turns requests into batches on the device.

    workers: number of loader processes; 0 fetches in this process. split: cuts a fetched batch, unless the data set has
    its own method `split`; None: without such a method, samples are collated again to cut a batch.
    Attributes: `split`, whichever of the two is used.
    """

    def __init__(self, dataset: Dataset, seed: int, workers: int, device: torch.device, split: Split | None = None):
        self.fetcher, self.seed, self.device = Fetcher(dataset, seed), seed, device
        # Data sets often have an attribute of this name that is "train" or "val".
        self.split = next(filter(callable, (getattr(dataset, "split", None), split)), None)
        self._pinned, self.workers = device.type == "cuda", workers
        self._coming: Iterator[Request] = iter(())
        self._loader: DataLoader | None = None
        if workers:
            self._loader = loader_of(
                self.fetcher,
                workers,
                # Torch's default makes lists of tuples, and loses attributes of mappings. A view of the data would be
                # sent by copying all of the data to shared memory, once per worker.
                collate_fn=compacted,
                sampler=self,
                pin_memory=self._pinned,
                persistent_workers=True,
            )

    def __iter__(self) -> Iterator[Request]:
        """What the worker processes are to fetch."""
        return self._coming

    def example(self, dataset: Any, samples: int) -> Any:
        """The first `samples` samples of an indexable data set as a batch, on the CPU, fetched in this process."""
        return Fetcher(dataset, self.seed)[Request(0, list(range(min(samples, len(dataset)))))]

    def batches(self, requests: Iterator[Request]) -> Iterator[MicroBatch]:
        """The requested batches on the device, in order; copies from pinned memory do not block the host.

        Starts a new iteration, which ends the previous one. Raises the data set's errors.
        """
        requests, used = itertools.tee(requests)  # buffers those of prefetched batches
        fetched: Iterator[Any]
        if self._loader is None:
            fetched = map(self.fetcher.__getitem__, requests)
            if self._pinned:
                fetched = (map_tensors(torch.Tensor.pin_memory, batch) for batch in fetched)
        else:
            self._coming = requests
            fetched = started(self._loader)
        return map(self._micro_batch, fetched, used)

    def close(self) -> None:
        """End the processes. Discards prefetched batches."""
        self._coming = iter(())
        self._loader = None  # torch ends the workers with the last reference to their iterator

    def _micro_batch(self, batch: Any, request: Request) -> MicroBatch:
        batch = self._move(batch)
        piece = functools.partial(self._piece, batch, request)
        positions = request.positions or [DUMMY] * request.fewest
        return MicroBatch(batch, request.last, bool(request.indices), positions, piece)

    def _piece(self, batch: Any, request: Request, start: int, end: int) -> Any:
        """The batch of only the samples [start, end) of a fetched batch, on the device.

        They are fetched and collated again, in this process, unless `split` cuts the batch. No other way works for
        every batch: tensors may be packed, have time first, belong to no sample, or depend on all samples.
        """
        if self.split is not None:
            return self.split(batch, start, end)
        return self._move(self.fetcher[Request(request.epoch, request.indices[start:end])])

    def _move(self, batch: Any) -> Any:
        if self.device.type == "cpu":
            return batch
        return map_tensors(lambda t: t.to(self.device, non_blocking=self._pinned), batch)


def worker_count(setting: int | str, dataset: Dataset, ranks: int = 1) -> int:
    """Loader processes per rank: none for data in memory, otherwise this rank's share of the cores, less one for
    training.

    setting: `data.num_workers`, a number or "auto"; ranks: number of ranks on this machine.
    """
    if setting != "auto":
        return int(setting)
    if getattr(dataset, "in_memory", False):
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0, min(8, cores // ranks - 1))
