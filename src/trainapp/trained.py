"""Which parameters are trained: for a while, only some of a model's."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor


@contextlib.contextmanager
def trained_alone(chosen: Iterable[Tensor], among: Sequence[Tensor]) -> Iterator[None]:
    """Inside the block, of the parameters `among` only the `chosen` require gradients; after it, all of them do.

    What else a loss depends on then gets no gradients, which saves their memory and their part of the backward.
    """
    ids = {id(parameter) for parameter in chosen}
    for parameter in among:
        parameter.requires_grad_(id(parameter) in ids)
    try:
        yield
    finally:
        for parameter in among:
            parameter.requires_grad_(True)
