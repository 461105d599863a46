"""One rank of many in a single process: torch's fake process group, whose collectives exchange nothing."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from trainapp.config.excludes import require_several_ranks
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.parallel.ranks import Ranks, SingleRank
from trainapp.parallel.world_size import rank_count
from trainapp.torch_private import DispatchMode, outside_dispatch_modes


def planned_world_size(config: Config) -> int:
    """Return the number of ranks to plan for: `plan.world`, otherwise as many as the run would have on this machine.

    Raises UserError for settings that conflict or leave it open.
    """
    parallel = config.parallel
    world_size = config.plan.world

    # One process.
    if parallel.strategy == "single":
        if world_size is not None and world_size > 1:
            raise UserError(
                f"plan.world={world_size}: parallel=single is one process; use parallel=ddp or parallel=fsdp"
            )
        return 1

    # Several: the number that is set, or this machine's devices.
    setting = f"plan.world={world_size}"
    if world_size is None:
        world_size = rank_count(config)
        setting = f"parallel.devices={parallel.devices}"
    if not world_size:
        raise UserError("parallel.devices=auto: this machine has no GPUs; set plan.world=N to plan for N ranks")
    require_several_ranks(config, world_size, setting)
    return world_size


@contextlib.contextmanager
def simulated(rank: int, world_size: int, device: torch.device) -> Iterator[Ranks]:
    """Yield the rank, in a process group that exists inside the block. A single process if `world_size` is 1."""
    if world_size == 1:
        yield SingleRank()
        return
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    try:
        yield SimulatedRanks(rank, world_size, device)
    finally:
        dist.destroy_process_group()


class SimulatedRanks(Ranks):
    """Rank `rank` of `world_size`, whose peers all have the same values. Use inside `simulated`."""

    def __init__(self, rank: int, world_size: int, device: torch.device):
        self.rank = rank
        self.world_size = world_size
        self.device = device

    def all_reduce_sum(self, value: torch.Tensor) -> torch.Tensor:
        with outside_dispatch_modes():  # not counted, as in a run
            return value.clone()

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value] * self.world_size

    def exchange_in_library(self) -> contextlib.AbstractContextManager[None]:
        return _RealIntegers()


class _RealIntegers(DispatchMode):
    """Integer tensors with values, on the host: DDP's reducer writes and reads the order of its buckets in C++
    (torch 2.13, csrc/distributed/c10d/reducer.cpp, sync_bucket_indices). The buckets themselves are unchanged.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}

        # A new tensor, and each operation on it.
        if func is torch.ops.aten.empty.memory_format and kwargs.get("dtype") is torch.int32:
            with outside_dispatch_modes():
                return torch.empty(*args, dtype=torch.int32)
        operand = _first_operand(args)
        if type(operand) is torch.Tensor and operand.dtype is torch.int32:
            with outside_dispatch_modes():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _first_operand(args: tuple[Any, ...]) -> Any:
    """Return the first argument; of a list that is not empty, its first element. None without arguments."""
    if not args:
        return None
    if isinstance(args[0], list) and args[0]:
        return args[0][0]
    return args[0]
