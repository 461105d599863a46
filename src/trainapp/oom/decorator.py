"""Help for loops of your own: `find_executable_batch_size`."""

import functools
import gc
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from trainapp.oom.errors import is_out_of_memory, log


def find_executable_batch_size(
    function: Callable | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
    *,
    minimum_batch_size: int = 1,
) -> Callable:
    """A decorator that calls `function(batch_size, ...)` again with a smaller batch when memory runs out.

    For a training function of your own; the call shape is Accelerate's. The wrapped function is called without its
    first argument. reduce_batch_size_fn: takes nothing, or the batch size that failed, and returns the next; by
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
    needed = [
        p for p in inspect.signature(reduce).parameters.values() if p.default is p.empty and p.kind < p.VAR_POSITIONAL
    ]
    smaller = int(reduce(size) if needed else reduce())
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
