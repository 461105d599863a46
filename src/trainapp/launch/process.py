"""What a process needs before torch is imported: variables that malloc, torch and cuBLAS read once."""

import multiprocessing
import os
import sys
from pathlib import Path
from typing import NoReturn

from trainapp.config.schema import Config
from trainapp.memory import host
from trainapp.run.directory import HAS_NOT_SAVED, HAS_SAVED, REPLACES_A_PROCESS

# On import, torch 2.13 reads the first of these that is set: c10/cuda/CUDAAllocatorConfig.h. (The second only in a ROCm
# build.)
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


OSRELEASE = Path("/proc/sys/kernel/osrelease")


def uses_expandable_segments(config: Config) -> bool:
    """Return whether the run asks torch for expandable segments: by its setting and, on Windows' Linux (WSL), only if
    the user has made it. There the first allocation may fail ("CUDA driver error: unknown error" or "device not ready",
    pytorch#192330), which is no out-of-memory error, so the run would end.
    """
    name = "memory.expandable_segments"
    return config.memory.expandable_segments and (name in config.given or not _is_wsl())


def _is_wsl() -> bool:
    """Return whether this is Linux inside Windows, by the name of its kernel."""
    try:
        return "microsoft" in OSRELEASE.read_text().lower()
    except OSError:  # not Linux
        return False


def replace_process(run_dir: str, has_saved: bool) -> NoReturn:
    """Continue the run in a new process, in place of this one: for whoever waits for it nothing changes.

    Args:
        run_dir: of the run.
        has_saved: whether this process has saved a checkpoint there.
    """
    if has_saved:
        os.environ[REPLACES_A_PROCESS] = HAS_SAVED
    else:
        os.environ.setdefault(REPLACES_A_PROCESS, HAS_NOT_SAVED)  # unless the process before has

    # Loader workers watch for the end of this process's number, which the new one keeps.
    for worker in multiprocessing.active_children():
        worker.kill()
        worker.join()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "trainapp", "continue", run_dir])


def prepare_process(expandable_segments: bool, deterministic: bool) -> None:
    """Set variables that malloc, torch and cuBLAS read once per process, unless the user has. Call before torch is
    imported.

    Args:
        expandable_segments: see `uses_expandable_segments`.
        deterministic: whether a run in this process may have `train.deterministic=true`.
    """
    host.prepare_allocator()
    is_set_by_user = any(name in os.environ for name in ALLOCATOR_SETTINGS)
    if expandable_segments and not is_set_by_user:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
