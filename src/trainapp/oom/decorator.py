"""`find_executable_batch_size`, for training functions outside trainapp."""

import functools
import gc
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

from trainapp.memory.cuda import refused_allocations
from trainapp.memory.detection import is_out_of_memory
from trainapp.torch_private import release_failed_backward

log = logging.getLogger(__name__)


class NoExecutableBatchSize(ValueError, RuntimeError):
    """Even the smallest batch size ran out of memory, or there was none to try.

    Accelerate's callers catch RuntimeError, and sizes that make no sense are a ValueError: this is both.
    """


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
    *,
    minimum_batch_size: int = 1,
) -> Callable[..., Any]:
    """A decorator that retries `function(batch_size, ...)` with a smaller batch when memory runs out.

    For a training function of your own, with Accelerate's signature. The wrapped function is called without its first
    argument and starts from its beginning each time, unlike a step of `python -m trainapp`.
    reduce_batch_size_fn: takes nothing, or the batch size that failed, and returns the next; by default half.
    minimum_batch_size: nothing smaller is tried.

    Raises ValueError for a minimum below 1 or above the start. When called, raises TypeError if the caller passes the
    batch size itself and NoExecutableBatchSize (a RuntimeError) if no size is left. Errors of other kinds pass through.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
            minimum_batch_size=minimum_batch_size,
        )
    if not 1 <= minimum_batch_size <= max(1, starting_batch_size):
        raise ValueError(
            f"starting_batch_size={starting_batch_size} and minimum_batch_size={minimum_batch_size}: the minimum must "
            "be at least 1 and not above the start"
        )
    parameters = list(inspect.signature(function).parameters)
    kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    takes = sys.maxsize if inspect.Parameter.VAR_POSITIONAL in kinds else max(1, len(parameters))

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if len(args) >= takes or (parameters and parameters[0] in kwargs):
            shown = ", ".join(f"{name}={value!r}" for name, value in zip(parameters[1:], args[1:], strict=False))
            raise TypeError(
                f"Batch size was passed into `{function.__name__}` as the first argument when called. Remove this, as "
                f"the decorator already does so: `{function.__name__}({shown})`"
            )
        size = starting_batch_size
        if size < 1:  # only now: Accelerate accepts it until the call
            raise NoExecutableBatchSize(f"{_none_found(size)} It is starting_batch_size={size}")
        while True:
            refused = refused_allocations()
            try:
                return function(size, *args, **kwargs)
            except Exception as error:
                if not is_out_of_memory(error, refused_allocations() - refused):
                    raise
                reason = str(error).strip().partition("\n")[0]  # a string: the error keeps the failed tensors alive
            _release()
            smaller = _reduced(size, reduce_batch_size_fn)
            if smaller < minimum_batch_size:
                raise NoExecutableBatchSize(f"{_none_found(smaller)} The last error, with batch size {size}: {reason}")
            log.warning("out of memory with batch size %d (%s); trying %d", size, reason, smaller)
            size = smaller

    return wrapper


def _none_found(size: int) -> str:
    """Accelerate's wording, which callers may match."""
    return f"No executable batch size found, reached {'zero' if size < 1 else size}."


def _reduced(size: int, reduce: Callable[..., int] | None) -> int:
    """The next size. Raises ValueError for one that is not smaller, with which the search would never end."""
    if reduce is None:
        return size // 2
    parameters = inspect.signature(reduce).parameters.values()
    takes_size = any(p.default is p.empty and p.kind < p.VAR_POSITIONAL for p in parameters)
    smaller = int(reduce(size) if takes_size else reduce())
    if smaller >= size:
        raise ValueError(f"reduce_batch_size_fn returned {smaller} after batch size {size}; it must be smaller")
    return smaller


def _release() -> None:
    release_failed_backward()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
