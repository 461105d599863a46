"""Rank 0 looks something up, or asks for it, and all ranks get its answer."""

from collections.abc import Callable
from typing import TypeVar, cast

from trainapp.errors import UserError
from trainapp.parallel.ranks import Ranks

T = TypeVar("T")


def answered_by_rank_zero(ranks: Ranks, ask: Callable[[], T]) -> T:
    """What `ask` returns on rank 0, the only one that calls it. Collective.

    Its UserError is raised on all ranks: none waits for another.
    """
    answer, problem = None, None
    if ranks.is_rank_zero:
        try:
            answer = ask()
        except UserError as error:
            problem = error
    answer, problem = ranks.all_gather_object((answer, problem))[0]
    if problem is not None:
        raise problem
    return cast(T, answer)
