"""`find_executable_batch_size`, for training functions outside trainapp."""

import functools
import gc
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trainapp.memory.cuda import refused_allocations
from trainapp.memory.detection import is_out_of_memory
from trainapp.torch_private import release_failed_backward

log = logging.getLogger(__name__)


class NoExecutableBatchSize(RuntimeError):
    """Even the smallest batch size ran out of memory, or there was none to try."""


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
) -> Callable[..., Any]:
    """Decorate `function(batch_size, ...)` so that it is retried with a smaller batch when memory runs out.

    For your own training function, with Accelerate's signature. The wrapped function is called without its first
    argument and restarts from its beginning each time, unlike a step of `python -m trainapp`.

    When called, raises NoExecutableBatchSize (a RuntimeError) if no size is left, and TypeError for arguments that do
    not fit `function` behind the batch size. Other errors pass through.

    Args:
        function: to decorate. None: return a decorator with these settings.
        starting_batch_size: the first to try.
        reduce_batch_size_fn: takes nothing, or the batch size that failed, and returns the next one, which must be
            smaller; by default half.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _require_arguments_after_size(function, args, kwargs)
        batch_size = starting_batch_size
        last_error = ""
        while batch_size > 0:
            # A library may catch an error of the allocator and raise its own: count what was refused.
            refused_before = refused_allocations()
            try:
                return function(batch_size, *args, **kwargs)
            except Exception as error:
                if not is_out_of_memory(error, refused_allocations() - refused_before):
                    raise
                reason, _, _ = str(error).strip().partition("\n")  # a string: the error keeps the failed tensors alive

            # Outside `except`, whose traceback would keep the failed tensors alive.
            _release()
            last_error = f" The last error, with batch size {batch_size}: {reason}"
            smaller = _smaller_size(batch_size, reduce_batch_size_fn)
            if smaller > 0:
                log.warning("out of memory with batch size %d (%s); trying %d", batch_size, reason, smaller)
            batch_size = smaller

        # Accelerate's wording, which callers may match.
        raise NoExecutableBatchSize(f"No executable batch size found, reached zero.{last_error}")

    return wrapper


def _require_arguments_after_size(
    function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> None:
    """Raise TypeError, as Accelerate does, for arguments that do not fit the function behind the batch size.

    The usual mistake is a call with the batch size among them, for which Python would count one argument too many.
    """
    try:
        # Not the signature of a function that it wraps: a decorator may supply further arguments.
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # written in C, without a signature
        return

    try:
        signature.bind(None, *arguments, **keywords)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        if not parameters:
            raise TypeError(f"{name}() must take the batch size as its first argument") from None

        # Show both signatures: the function's own, and that of the decorated one.
        size_name = parameters[0].name
        with_size = signature.replace(parameters=parameters, return_annotation=signature.empty)  # no annotations
        without_size = with_size.replace(parameters=parameters[1:])
        raise TypeError(
            f"{name}{with_size}: {error}; {size_name} is passed by the decorator; call {name}{without_size}"
        ) from None


def _release() -> None:
    """Free what the failed call has left."""
    release_failed_backward()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


def _smaller_size(batch_size: int, reduce: Callable[..., int] | None) -> int:
    """Return the next size to try: by the user's function, which may take the one that failed, or half."""
    if reduce is None:
        return batch_size // 2
    if _requires_argument(reduce):
        return int(reduce(batch_size))
    return int(reduce())


def _requires_argument(function: Callable[..., Any]) -> bool:
    """Return whether the function has a positional parameter without a default."""
    parameters = inspect.signature(function).parameters.values()
    return any(p.default is p.empty and p.kind < p.VAR_POSITIONAL for p in parameters)
