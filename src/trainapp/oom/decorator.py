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
    """A decorator that retries `function(batch_size, ...)` with a smaller batch when memory runs out.

    For your own training function, with Accelerate's signature. The wrapped function is called without its first
    argument and restarts from its beginning each time, unlike a step of `python -m trainapp`.
    reduce_batch_size_fn: takes nothing, or the batch size that failed, and returns the next one, which must be smaller;
    by default half.

    When called, raises NoExecutableBatchSize (a RuntimeError) if no size is left, and TypeError for arguments that do
    not fit `function` behind the batch size. Other errors pass through.
    """
    if function is None:
        return lambda function: find_executable_batch_size(function, starting_batch_size, reduce_batch_size_fn)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _require_arguments_after_size(function, args, kwargs)
        size, why = starting_batch_size, ""
        while size > 0:
            refused = refused_allocations()
            try:
                return function(size, *args, **kwargs)
            except Exception as error:
                if not is_out_of_memory(error, refused_allocations() - refused):
                    raise
                reason = str(error).strip().partition("\n")[0]  # a string: the error keeps the failed tensors alive
            _release()
            why = f" The last error, with batch size {size}: {reason}"
            smaller = _reduced(size, reduce_batch_size_fn)
            if smaller > 0:
                log.warning("out of memory with batch size %d (%s); trying %d", size, reason, smaller)
            size = smaller
        # Accelerate's wording, which callers may match.
        raise NoExecutableBatchSize(f"No executable batch size found, reached zero.{why}")

    return wrapper


def _require_arguments_after_size(
    function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> None:
    """Raises TypeError, as Accelerate does, for arguments that do not fit the function behind the batch size.

    The usual mistake is a call with the batch size among them, for which Python would count one argument too many.
    """
    try:
        # Not the signature of a function that it wraps: a decorator may supply arguments of its own.
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # written in C, without a signature
        return
    try:
        signature.bind(None, *arguments, **keywords)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        parameters = [own.replace(annotation=own.empty) for own in signature.parameters.values()]
        if not parameters:
            raise TypeError(f"{name}() must take the batch size as its first argument") from None
        plain = signature.replace(parameters=parameters, return_annotation=signature.empty)
        without_size = plain.replace(parameters=parameters[1:])
        raise TypeError(
            f"{name}{plain}: {error}; {parameters[0].name} is passed by the decorator; call {name}{without_size}"
        ) from None


def _reduced(size: int, reduce: Callable[..., int] | None) -> int:
    if reduce is None:
        return size // 2
    parameters = inspect.signature(reduce).parameters.values()
    takes_size = any(p.default is p.empty and p.kind < p.VAR_POSITIONAL for p in parameters)
    return int(reduce(size) if takes_size else reduce())


def _release() -> None:
    release_failed_backward()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
