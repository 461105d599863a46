"""What a process needs before torch is imported: variables that malloc, torch and cuBLAS read once."""

import os

from trainapp.memory import host

# On import, torch 2.13 reads the first of these that is set: c10/cuda/CUDAAllocatorConfig.h. (The second only in a ROCm
# build.)
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def prepare_process(expandable_segments: bool, deterministic: bool) -> None:
    """Set variables that malloc, torch and cuBLAS read once per process, unless the user has. Call before torch is
    imported.

    Args:
        expandable_segments: the setting `memory.expandable_segments`.
        deterministic: whether a run in this process may have `train.deterministic=true`.
    """
    host.prepare_allocator()
    is_set_by_user = any(name in os.environ for name in ALLOCATOR_SETTINGS)
    if expandable_segments and not is_set_by_user:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
