"""Worker processes, which fetch batches or read a stream ahead."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from trainapp.torch_private import outside_dispatch_modes

PARENT_CHECK = 1.0  # seconds
MOST_WORKERS = 8  # per rank, with data.num_workers=auto


def build_loader(dataset: Dataset, workers: int, **options: Any) -> DataLoader:
    """Return a DataLoader, with worker processes, of items that are complete as the data set returns them.

    On Linux the processes are forked, so that a data set need not pickle, unless the program has set another start
    method than Python's default, which is no longer fork on 3.14.
    """
    default_method = multiprocessing.get_all_start_methods()[0]
    program_chose_method = multiprocessing.get_start_method(allow_none=True) not in (None, default_method)
    forks = workers > 0 and sys.platform == "linux" and not program_chose_method
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=workers,
        worker_init_fn=_follow_the_run,
        generator=torch.Generator(),  # the default draws from the run's, so workers would change the result
        multiprocessing_context="fork" if forks else None,
        **options,
    )


def _follow_the_run(worker: int) -> None:
    """Make this worker end with the process that started it: not before, and not after."""
    # Signals may reach the whole process group; the step in progress still needs the workers.
    for stop_signal in (signal.SIGINT, signal.SIGTERM):
        # Unlike SIG_IGN, a handler is not passed on to programs that a worker starts.
        signal.signal(stop_signal, lambda signal_number, frame: None)

    parent = os.getppid()
    watcher = threading.Thread(target=_end_with, args=(parent,), name="parent", daemon=True)
    watcher.start()


def _end_with(parent: int) -> None:
    """End this process once `parent` is gone, as after SIGKILL.

    torch's workers notice that too (2.13), but then wait for what they have sent to be read. The system's own signal
    (PR_SET_PDEATHSIG) already comes when the thread that started the worker ends.
    """
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK)
    os._exit(1)


def start_iteration(loader: DataLoader) -> Iterator[Any]:
    """Start a new iteration over a loader. Since its processes ignore SIGTERM, torch and multiprocessing kill a stuck
    one.
    """
    with outside_dispatch_modes():  # processes inherit active modes: a memory counter, with its limit
        iterator: Any = iter(loader)
    for worker in iterator._workers:
        worker._popen.terminate = worker._popen.kill
    return iterator


def worker_count(setting: int | str, dataset: Dataset, ranks: int = 1) -> int:
    """Return the loader processes per rank: none for data in memory, otherwise this rank's share of the cores, less one
    for training.

    Args:
        setting: `data.num_workers`, a number or "auto".
        dataset: which the processes fetch from.
        ranks: the number of ranks on this machine.
    """
    if setting != "auto":
        return int(setting)
    if getattr(dataset, "in_memory", False):
        return 0

    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    spare_cores_per_rank = cores // ranks - 1
    return max(0, min(MOST_WORKERS, spare_cores_per_rank))
