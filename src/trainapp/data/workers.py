"""Worker processes, which fetch batches or read a stream ahead."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from trainapp.torch_private import outside_dispatch_modes


def build_loader(dataset: Dataset, workers: int, **options: Any) -> DataLoader:
    """A DataLoader of items that are complete as the data set returns them, by worker processes.

    On Linux these are forked, so that a data set need not pickle, unless the program has set another start method
    than Python's default, which is no longer fork on 3.14.
    """
    standard = multiprocessing.get_start_method(allow_none=True) in (None, multiprocessing.get_all_start_methods()[0])
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=workers,
        worker_init_fn=_outlive_a_stop,
        generator=torch.Generator(),  # the default draws from the run's, so workers would change the result
        multiprocessing_context="fork" if workers and standard and sys.platform == "linux" else None,
        **options,
    )


def _outlive_a_stop(worker: int) -> None:
    """Ignore signals that reach the whole process group: the step in progress still needs the workers."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)  # unlike SIG_IGN, not for programs that a worker starts


def start_iteration(loader: DataLoader) -> Iterator[Any]:
    """A new iteration over it. Since its processes ignore SIGTERM, torch and multiprocessing kill a stuck one."""
    with outside_dispatch_modes():  # processes inherit active modes: a memory counter, with its limit
        items: Any = iter(loader)
    for worker in items._workers:
        worker._popen.terminate = worker._popen.kill
    return items


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
