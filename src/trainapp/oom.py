"""Tells what truly is an out-of-memory error, on every backend; and the same help for loops of your own."""

import functools
import gc
import inspect
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

log = logging.getLogger(__name__)

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


def requested_bytes(message: str) -> int | None:
    """What the failed allocation asked for, where the message says so: "Tried to allocate 2.00 GiB"."""
    match = re.search(r"tried to allocate (\d+(?:\.\d+)?) ?(bytes|B|KiB|MiB|GiB)?", message, re.IGNORECASE)
    if not match:
        return None
    unit = {"kib": 2**10, "mib": 2**20, "gib": 2**30}.get((match[2] or "").lower(), 1)
    return int(float(match[1]) * unit)


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


def find_executable_batch_size(
    function: Callable | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
    *,
    minimum_batch_size: int = 1,
) -> Callable:
    """A decorator that calls `function(batch_size, ...)` again with a smaller batch when memory runs out.

    For a training function of your own; the call shape is Accelerate's. The wrapped function is called without its
    first argument. reduce_batch_size_fn: takes the batch size that failed (or nothing) and returns the next; by
    default half. minimum_batch_size: nothing smaller is tried.

    Raises TypeError when the caller passes the batch size itself, ValueError for sizes that make no sense, and
    RuntimeError when the smallest size failed too. Whatever is no out-of-memory error passes through. Unlike `python
    -m trainapp`, the function starts from its beginning each time.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
            minimum_batch_size=minimum_batch_size,
        )
    if starting_batch_size < minimum_batch_size or minimum_batch_size < 1:
        raise ValueError(
            f"starting_batch_size={starting_batch_size} and minimum_batch_size={minimum_batch_size}: the minimum must "
            "be at least 1 and not above the start"
        )
    parameters = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if len(args) >= max(1, len(parameters)) or (parameters and parameters[0] in kwargs):
            shown = ", ".join(f"{name}={value!r}" for name, value in zip(parameters[1:], args[1:], strict=False))
            raise TypeError(
                f"Batch size was passed into `{function.__name__}` as the first argument when called. Remove this, as "
                f"the decorator already does so: `{function.__name__}({shown})`"
            )
        size = starting_batch_size
        while True:
            try:
                return function(size, *args, **kwargs)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).strip().partition("\n")[0]  # a string: the error keeps the failed tensors alive
            _release()
            smaller = _reduced(size, reduce_batch_size_fn)
            if smaller < minimum_batch_size:
                raise RuntimeError(
                    f"No executable batch size found, reached {'zero' if smaller < 1 else smaller}. The last error, "
                    f"with batch size {size}: {reason}"
                )
            log.warning("out of memory with batch size %d (%s); trying %d", size, reason, smaller)
            size = smaller

    return wrapper


def _reduced(size: int, reduce: Callable[..., int] | None) -> int:
    """The next size. A function that does not get smaller would be called for ever."""
    if reduce is None:
        return size // 2
    smaller = int(reduce(size) if inspect.signature(reduce).parameters else reduce())
    if smaller >= size:
        raise ValueError(
            f"reduce_batch_size_fn returned {smaller} after batch size {size}: it must return a smaller one"
        )
    return smaller


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
