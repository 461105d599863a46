"""Which errors mean out of memory, on every backend."""

import contextlib
import errno
import re
from collections.abc import Iterator

import torch

# Messages of out-of-memory errors that are a plain RuntimeError (or a backend's own type).
# Each is anchored to the exact wording of its source, so that users' errors that mention memory do not count.
_PATTERNS = (
    r"^(?:[\w.]*Error: )?(?:CUDA|HIP|XPU|MPS backend|MPS) out of memory",  # torch's caching allocators
    r"^Invalid buffer size: \d",  # MPS: a single tensor that is too large
    r"(?:CUDA|HIP)(?: driver)? error: out of memory",  # the driver, outside torch's cache
    r"Triton Error \[\w+\]:.*out of memory",  # loading a kernel, or its stack
    r"cuda(?:Malloc|MallocAsync|HostAlloc)\b.*out of memory",
    r"cudaErrorMemoryAllocation|hipErrorOutOfMemory|CUDA_ERROR_OUT_OF_MEMORY",
    r"CUBLAS_STATUS_ALLOC_FAILED|HIPBLAS_STATUS_ALLOC_FAILED|CUSOLVER_STATUS_ALLOC_FAILED",
    r"CUDNN_STATUS_\w*ALLOC(?:ATION)?_FAILED|CUFFT_ALLOC_FAILED|CUSPARSE_STATUS_ALLOC_FAILED",
    r"cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",  # also: the workspace does not fit
    r"MIOPEN_STATUS_ALLOC_FAILED|miopenStatusAllocFailed",
    r"UR_RESULT_ERROR_OUT_OF_(?:DEVICE|HOST|RESOURCES)|PI_ERROR_OUT_OF_(?:RESOURCES|HOST_MEMORY)",
    r"NCCL (?:Error|WARN).*(?:out of memory|Cuda failure '?2)|Cuda failure 2? ?'out of memory'",
    # NCCL's own buffers (NVIDIA/nccl, src/include/alloc.h); the words as torch passes them on
    r"NCCL error in: [\s\S]*Failed to CUDA (?:host alloc|malloc|calloc(?: async)?) \d+ bytes",
    r"NVML_SUCCESS == r INTERNAL ASSERT FAILED",  # a MIG slice out of memory, reported through NVML
    r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)",  # Linux; Windows
    # oneDNN; not for a primitive descriptor, whose failure means that no kernel exists
    r"could not create a (?:primitive(?! desc)|memory object)|could not execute a primitive: out of memory",
    r"unable to mmap \d+ bytes.*Cannot allocate memory|mmap.*Cannot allocate memory",
    r"std::bad_alloc",
    r"PT_DEVMEM Allocation failed",  # Gaudi
    # how a loader worker reports an error whose constructor takes more than a message, such as NumPy's
    r"^Caught \w*(?:MemoryError|OutOfMemory\w*|MemoryLimitExceeded) in ",
)
_MESSAGES = [re.compile(pattern, re.IGNORECASE | re.MULTILINE) for pattern in _PATTERNS]
_NOT_MEMORY = re.compile(r"device-side assert triggered|No space left on device", re.IGNORECASE)
# Errors with several possible causes, including memory. They count if torch's allocator has refused an allocation
# meanwhile, or if the device is full, which it never is under a limit. The last line is from cuDNN's plan search, which
# catches the out-of-memory error of each plan (torch 2.13, aten/src/ATen/native/cudnn/Conv_v8.cpp and Conv_v7.cpp).
_AMBIGUOUS = re.compile(
    r"CUBLAS_STATUS_(?:NOT_INITIALIZED|EXECUTION_FAILED|INTERNAL_ERROR)"
    r"|CUDNN_STATUS_(?:NOT_INITIALIZED|EXECUTION_FAILED|INTERNAL_ERROR)"
    r"|CUSOLVER_STATUS_INTERNAL_ERROR|CUFFT_INTERNAL_ERROR|ncclUnhandledCudaError"
    r"|unable to find an engine to execute this computation|[Uu]nable to find a valid cuDNN algorithm"
)
_FULL = 256 * 2**20  # bytes free on the device; library handles and workspaces need about this much
# Out-of-memory errors after which a part of this process keeps failing.
_BREAKING = {
    # The driver refuses to map memory that the allocator has already recorded as mapped, so later maps fail on an
    # assertion (torch 2.13, c10/cuda/CUDACachingAllocator.cpp, ExpandableSegment::mapAndSetAccess; pytorch#188008).
    # If the driver refuses to create the memory, torch raises its OutOfMemoryError and the allocator stays intact.
    "the allocator of expandable segments": re.compile(r"(?:CUDA|HIP) driver error: out of memory", re.IGNORECASE),
    # The peers have queued a collective that this rank never joins.
    "the NCCL communicator": re.compile(r"NCCL (?:error|WARN)|ncclUnhandledCudaError", re.IGNORECASE),
}


def is_out_of_memory(error: BaseException, refused: int = 0) -> bool:
    """Return whether `error` means that memory ran out, on a device or on the host.

    Decided by type (torch.OutOfMemoryError, MemoryError, OSError with ENOMEM), then by each backend's wording for plain
    RuntimeErrors. If the wording is ambiguous, by `refused`, then by how full the device is. Follows the explicit cause
    of an error. Other types of error never count.

    Args:
        error: caught.
        refused: the number of allocations refused by the device's allocator during the failed work.
    """
    return out_of_memory_in(error, refused) is not None


def out_of_memory_in(error: BaseException, refused: int = 0) -> BaseException | None:
    """Return the error itself or its cause, whichever means that memory ran out, or None; see `is_out_of_memory`."""
    for cause in causes(error):
        if _is_out_of_memory_itself(cause, refused):
            return cause
    return None


def _is_out_of_memory_itself(error: BaseException, refused: int) -> bool:
    """Return whether this error means that memory ran out, whatever its cause."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        if error.errno is None:  # a loader worker passes on only the text
            return f"[Errno {errno.ENOMEM}]" in _message(error)
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError) or isinstance(error, RecursionError):
        return False

    # Of other errors, the wording decides; if that is ambiguous, the device.
    message = _message(error)
    if _NOT_MEMORY.search(message):
        return False
    if any(pattern.search(message) for pattern in _MESSAGES):
        return True
    return bool(_AMBIGUOUS.search(message)) and (refused > 0 or _device_is_full())


def _device_is_full() -> bool:
    """Return whether little device memory is free, by the driver's count, which includes allocations outside torch."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # a lost context raises its own error
            free, _ = torch.cuda.mem_get_info()
            return free < _FULL
    return False


def broken_part(error: BaseException) -> str | None:
    """Return what an out-of-memory error has broken until this process ends; None if the process can recover."""
    messages = [_message(cause) for cause in causes(error) if isinstance(cause, RuntimeError)]
    for part, wording in _BREAKING.items():
        if any(wording.search(message) for message in messages):
            return part
    return None


def requested_bytes(message: str) -> int | None:
    """Return the size of the failed allocation, if the message has it: "Tried to allocate 2.00 GiB"."""
    match = re.search(r"(?:tried|unable) to allocate (\d+(?:\.\d+)?) ?([KMGTP]i?B)?", message, re.IGNORECASE)
    if not match:
        return None
    number = float(match[1])
    unit = match[2] or "B"
    power_of_1024 = "BKMGTP".index(unit[0].upper())  # also for MB: MPS writes that for 2**20 bytes
    return int(number * 1024**power_of_1024)


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and the errors that it was explicitly raised from."""
    visited: set[int] = set()  # ids: a cause may lead back to its error
    cause: BaseException | None = error
    while cause is not None and id(cause) not in visited:
        visited.add(id(cause))
        yield cause
        cause = cause.__cause__


def _message(error: BaseException) -> str:
    """Return the message, without the traceback that a loader worker includes.

    With several arguments it is the first: `str(error)` would be the repr of a tuple.
    """
    if len(error.args) < 2:
        text = str(error)
    else:
        text = str(error.args[0])
    if not text.startswith("Caught "):
        return text
    lines = [line for line in text.splitlines() if not line.startswith("  ")]  # the traceback's are indented
    return "\n".join(lines)
