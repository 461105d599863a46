"""Tells what truly is an out-of-memory error, on every backend."""

import re
from collections.abc import Iterator

import torch

# Messages of errors that are a plain RuntimeError (or a backend's own type) though they mean that memory ran out.
# Each is anchored to how its source words it, so that a user's own error which mentions memory does not count.
_MESSAGES = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"^(?:CUDA|HIP|XPU|MPS backend|MPS) out of memory",  # torch's caching allocators
        r"(?:CUDA|HIP|hip) error: out of memory",  # the driver, outside torch's cache
        r"cuda(?:Malloc|MallocAsync|HostAlloc)\b.*out of memory",
        r"cudaErrorMemoryAllocation|hipErrorOutOfMemory|CUDA_ERROR_OUT_OF_MEMORY",
        r"CUBLAS_STATUS_ALLOC_FAILED|HIPBLAS_STATUS_ALLOC_FAILED|CUSOLVER_STATUS_ALLOC_FAILED",
        r"CUDNN_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED|CUSPARSE_STATUS_ALLOC_FAILED",
        r"cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",  # also: the workspace does not fit
        r"MIOPEN_STATUS_ALLOC_FAILED|miopenStatusAllocFailed",
        r"UR_RESULT_ERROR_OUT_OF_(?:DEVICE|HOST|RESOURCES)|PI_ERROR_OUT_OF_(?:RESOURCES|HOST_MEMORY)",
        r"NCCL (?:Error|WARN).*(?:out of memory|Cuda failure '?2)|Cuda failure 2? ?'out of memory'",
        r"NVML_SUCCESS == r INTERNAL ASSERT FAILED",  # a MIG slice out of memory, through NVML's refusal
        r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)",  # Linux; Windows
        r"could not create a (?:primitive|memory object)|could not execute a primitive: out of memory",  # oneDNN
        r"unable to mmap \d+ bytes.*Cannot allocate memory|mmap.*Cannot allocate memory",
        r"std::bad_alloc",
    )
]
_NOT_MEMORY = re.compile(r"device-side assert|No space left on device|recursion", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` means that memory ran out, on a device or on the host.

    By type first (torch.OutOfMemoryError, MemoryError), then by the wording of each backend for plain RuntimeErrors.
    Follows the cause of an error that was raised from another one. A user's error of another type never counts.
    """
    return any(_is_one(e) for e in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and those that it was explicitly raised from."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__


def _is_one(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, RecursionError):
        return False
    text = str(error)
    if _NOT_MEMORY.search(text):
        return False
    return any(pattern.search(text) for pattern in _MESSAGES)
