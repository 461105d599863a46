"""Memory that runs out while a run is being built: there is no step to roll back and no micro-batch to shrink."""

import contextlib
from collections.abc import Iterator

import torch

from trainapp.config.schema import Config
from trainapp.errors import OutOfMemory
from trainapp.memory.cuda import refused_allocations
from trainapp.memory.detection import out_of_memory_in
from trainapp.parallel.ranks import Ranks, SingleRank


@contextlib.contextmanager
def explain_out_of_memory(config: Config, ranks: Ranks) -> Iterator[None]:
    """Explain an out-of-memory error inside the block, in which a run is built.

    Raises OutOfMemory for it, even if it was reported as a mistake: many are RuntimeErrors, as are the errors of an
    unsuitable optimizer or checkpoint.

    With several ranks raises torch.OutOfMemoryError: the others would wait for a rank that ends with a UserError, but
    the launcher ends them when one fails.
    """
    refused_before = refused_allocations()
    try:
        yield
    except Exception as error:
        reason = out_of_memory_in(error, refused_allocations() - refused_before)
        if reason is None:
            raise
        error_type = OutOfMemory if isinstance(ranks, SingleRank) else torch.OutOfMemoryError
        raise error_type(_message(config, reason)) from error


def _message(config: Config, reason: BaseException) -> str:
    limit_text = ""
    if config.memory.limit is not None:
        limit_text = f" (memory.limit={config.memory.limit})"
    # The first line is always the same, so the launcher recognises that a restart does not help.
    return (
        f"out of memory while building the run{limit_text}, before any batch, so that no micro-batch size can help: "
        "use a smaller model, an optimizer with less state (optimizer=sgd optimizer.momentum=0 "
        "optimizer.nesterov=false) or parallel=fsdp on more devices, or free what other processes use\n"
        f"{type(reason).__name__}: {str(reason).strip()}"
    )
