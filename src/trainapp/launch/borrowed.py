"""A process that is the caller's, such as a notebook's: a run from Python leaves it as it was.

What stays: the settings of malloc (see `host_guard`), and the modules that were imported.
"""

import contextlib
import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from trainapp.config.schema import Config
from trainapp.launch import launch
from trainapp.tracking import terminal

LOG = "trainapp.log"


@contextlib.contextmanager
def borrowed(expandable_segments: bool = False) -> Iterator[None]:
    """Restores the environment, the import path and what a run changes in torch, NumPy and Python.

    expandable_segments: `memory.expandable_segments` of the run.
    """
    environment, path = dict(os.environ), list(sys.path)
    frozen, monitor = gc.get_freeze_count(), tqdm.monitor
    try:
        # before torch is imported; other runs may follow in this process
        launch.prepare_process(expandable_segments, deterministic=True)
        with _warnings_are_no_errors(), _switches_of_torch():
            yield
    finally:
        sys.path[:] = path
        _restore(environment)
        if not frozen:  # else the caller's objects would never be collected
            gc.unfreeze()
        if monitor is None and tqdm.monitor is not None:  # a thread that outlives the bars
            tqdm.monitor.exit()
            tqdm.monitor = None


@contextlib.contextmanager
def _warnings_are_no_errors() -> Iterator[None]:
    """Libraries warn in the course of a run: a program whose filters make errors of warnings would end it."""
    with warnings.catch_warnings():
        for action, message, category, module, line in reversed(warnings.filters):
            if action == "error":
                kinds = category if isinstance(category, tuple) else (category,)
                for kind in kinds:
                    warnings.filterwarnings("default", _pattern(message), kind, _pattern(module), line)
        yield


def _pattern(compiled: Any) -> str:
    return getattr(compiled, "pattern", compiled) or ""


def _restore(environment: dict[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


@contextlib.contextmanager
def _switches_of_torch() -> Iterator[None]:
    import torch

    from trainapp.rng import preserved_rng
    from trainapp.torch_modes import without_modes

    uses_cuda, cudnn = torch.cuda.is_initialized(), torch.backends.cudnn
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    anomalies = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    products, kernels = torch.get_float32_matmul_precision(), (cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic)
    share = torch.cuda.get_per_process_memory_fraction() if uses_cuda else 1.0
    try:
        # A caller's `no_grad` would train nothing, and an autocast in other numbers than `precision` says.
        with without_modes(), preserved_rng(torch.device("cuda" if uses_cuda else "cpu")):
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
        torch.autograd.set_detect_anomaly(*anomalies)
        torch.set_float32_matmul_precision(products)
        cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic = kernels
        if torch.cuda.is_initialized():
            gc.collect()  # the run's model, which may be in a cycle
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(share)


@contextlib.contextmanager
def logged(config: Config) -> Iterator[None]:
    """The run's log in its directory, and on the terminal unless the program has handlers of its own."""
    logger = logging.getLogger("trainapp")
    file = terminal.LogFile(Path(config.run_dir) / LOG)
    file.setFormatter(logging.Formatter("[%(asctime)s] %(levelname)s %(message)s"))
    handlers: list[logging.Handler] = [file]
    if not logger.hasHandlers():
        handlers.append(terminal.Handler(sys.stderr))
    level = logger.level
    if level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.setLevel(level)
        for handler in handlers:
            logger.removeHandler(handler)
        file.close()
