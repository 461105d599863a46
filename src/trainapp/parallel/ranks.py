"""How the ranks of a run communicate, apart from gradients: votes on running out of memory, reductions, flags.

Votes have a gloo group of their own. A rank that runs out of memory leaves its forward or backward at a place that no
other rank knows; the others would wait for it in their next collective forever. So, while a size is unproven, all ranks
vote before each collective: healthy ranks vote 0, and the one that ran out votes 1 exactly once, from its handler. That
vote pairs with the others' next one, and all ranks leave the step together.
"""

import contextlib
import datetime
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from trainapp.torch_private import outside_dispatch_modes

T = TypeVar("T")
OUT_OF_MEMORY_EXIT = 82  # a worker's exit code: memory ran out where it could not be recovered in place


class PeerOutOfMemory(torch.OutOfMemoryError):
    """Another rank ran out of memory in this step."""


class Flags(NamedTuple):
    """What a rank tells the others once per step. After the exchange: the maximum of each over all ranks."""

    stop_signal: int = 0  # the number of the signal to stop for, or 0
    still_saving: bool = False  # a checkpoint is being written in the background
    search_news: bool = False  # the search for a micro-batch size has something to share


class Ranks(Protocol):
    """The ranks of a run, as one of them sees them. "Collective" means: call on every rank, in the same order."""

    rank: int
    world: int
    device: torch.device
    votes_enabled: bool  # whether ranks vote before each collective
    saving_group: dist.ProcessGroup | None  # for checkpoints alone

    @property
    def is_rank_zero(self) -> bool:
        """Whether this rank writes the run's files and its messages."""
        ...

    def enable_votes(self, unproven: bool) -> None:
        """Decide whether to vote from here on. unproven: whether a size in use is not proven; the same on all ranks."""

    def disable_votes(self) -> None:
        """Hold no votes in this run, whatever `parallel.vote_on_oom` says: the strategy cannot recover in place."""

    def check_peers(self) -> None:
        """Before a collective: raises PeerOutOfMemory when another rank aborted the step. Free without votes."""

    def vote(self, failed: bool) -> bool:
        """Whether any rank voted that it ran out of memory. Collective."""
        ...

    def reset_votes(self) -> None:
        """Call after all ranks have left an aborted step, before the next vote."""

    def all_reduce_sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over ranks. Collective; raises PeerOutOfMemory as `check_peers` does."""
        ...

    def all_reduce_min(self, value: int) -> int:
        """The minimum over ranks. Collective, and never preceded by a vote."""
        ...

    def all_reduce_max(self, *values: int) -> list[int]:
        """The maximum of each over ranks. Collective; raises PeerOutOfMemory as `check_peers` does."""
        ...

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's `value`, a small Python object, ordered by rank. Collective."""
        ...

    def start_flag_exchange(self, read: Callable[[], Flags]) -> None:
        """Start to exchange what `read()` returns, in the background of a step. Collective."""

    def finish_flag_exchange(self) -> Flags:
        """The maximum of each flag over ranks. Waits for the slowest rank."""
        ...

    def cancel_flag_exchange(self) -> None:
        """End the exchange that an aborted step has started."""

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""

    def exchange_in_library(self) -> contextlib.AbstractContextManager[None]:
        """Around a collective of a library's own on values that it reads at once: in a trace there are none."""
        ...


class NoExchange:
    """Collectives that exchange nothing: there are no peers, or in a trace only such as have what this rank has."""

    _read_flags: Callable[[], Flags]

    def enable_votes(self, unproven: bool) -> None:
        """No peer can fail."""

    def disable_votes(self) -> None:
        """No peer can fail."""

    def vote(self, failed: bool) -> bool:
        return failed

    def all_reduce_min(self, value: int) -> int:
        return value

    def all_reduce_max(self, *values: int) -> list[int]:
        return list(values)

    def start_flag_exchange(self, read: Callable[[], Flags]) -> None:
        self._read_flags = read

    def finish_flag_exchange(self) -> Flags:
        """Reads the flags only now, so that a signal during the step is seen at its end."""
        return self._read_flags()

    def cancel_flag_exchange(self) -> None:
        """Nothing runs in the background."""

    def barrier(self) -> None:
        """There are no peers to wait for."""


class SingleRank(NoExchange):
    """A single process: every collective is the identity."""

    rank, world = 0, 1
    device = torch.device("cpu")
    votes_enabled = False
    saving_group: dist.ProcessGroup | None = None
    is_rank_zero = True

    def check_peers(self) -> None:
        """There are no peers."""

    def reset_votes(self) -> None:
        """A single rank never votes."""

    def all_reduce_sum(self, value: torch.Tensor) -> torch.Tensor:
        return value

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]

    def exchange_in_library(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class DistributedRanks:
    """This process among the ranks of a run. Needs torch.distributed to be initialised.

    timeout: seconds after which a peer that does not answer is an error. vote_on_oom: "unproven", "always" or "never",
    when `enable_votes` lets the ranks vote.
    """

    def __init__(self, device: torch.device, timeout: float, vote_on_oom: str = "unproven"):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = device
        self.votes = 0  # held so far
        self._vote_on_oom = vote_on_oom
        self._aborted = False
        self.enable_votes(True)
        limit = datetime.timedelta(seconds=timeout)
        self._vote_group = dist.new_group(backend="gloo", timeout=limit)
        self._side_group = dist.new_group(backend="gloo", timeout=limit)
        self.saving_group = dist.new_group(backend="gloo", timeout=limit)
        self._flag_group = dist.new_group(backend="gloo", timeout=limit)
        self._flag_work: dist.Work | None = None
        self._flags = torch.zeros(len(Flags()), dtype=torch.int64)

    @property
    def is_rank_zero(self) -> bool:
        """Whether this rank writes the run's files and its messages."""
        return self.rank == 0

    def release_groups(self) -> None:
        """Drop the process groups, after the last collective."""
        self._wait_for_flags()
        self._vote_group = self._side_group = self.saving_group = self._flag_group = None

    def enable_votes(self, unproven: bool) -> None:
        """Decide by `vote_on_oom`."""
        self.votes_enabled = self._vote_on_oom == "always" or (self._vote_on_oom == "unproven" and unproven)

    def disable_votes(self) -> None:
        """Hold no votes for the rest of the run."""
        self._vote_on_oom, self.votes_enabled = "never", False

    def check_peers(self) -> None:
        """Votes that this rank is healthy. Raises PeerOutOfMemory when another one is not."""
        if self.votes_enabled and self.vote(False):
            raise PeerOutOfMemory("another rank ran out of memory")

    def vote(self, failed: bool) -> bool:
        """One integer over gloo: 0.3 to 0.7 ms on two busy cores.

        In an aborted step there are no further votes: a rank that runs out of memory, or reaches another collective, on
        its way out of the step would wait for votes that no other rank casts.
        """
        if self._aborted:
            return True
        with outside_dispatch_modes():
            flag = torch.tensor([int(failed)])
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._vote_group)
            self._aborted = bool(flag)
        self.votes += 1
        return self._aborted

    def reset_votes(self) -> None:
        self._aborted = False

    def all_reduce_sum(self, value: torch.Tensor) -> torch.Tensor:
        """Runs on the gradients' group, so that the value may be on the device."""
        self.check_peers()
        with outside_dispatch_modes():
            value = value.clone()
            dist.all_reduce(value)
        return value

    def all_reduce_min(self, value: int) -> int:
        with outside_dispatch_modes():
            number = torch.tensor([value])
            dist.all_reduce(number, op=dist.ReduceOp.MIN, group=self._side_group)
            return int(number)

    def all_reduce_max(self, *values: int) -> list[int]:
        self.check_peers()
        with outside_dispatch_modes():
            numbers = torch.tensor(values)
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._side_group)
            return numbers.tolist()

    def all_gather_object(self, value: Any) -> list[Any]:
        by_rank: list[Any] = [None] * self.world
        with outside_dispatch_modes():
            dist.all_gather_object(by_rank, value, group=self._side_group)
        return by_rank

    def start_flag_exchange(self, read: Callable[[], Flags]) -> None:
        """Asynchronous, on a group of its own: the step hides its latency."""
        self._wait_for_flags()
        with outside_dispatch_modes():
            self._flags[:] = torch.tensor(read(), dtype=torch.int64)
            self._flag_work = dist.all_reduce(self._flags, op=dist.ReduceOp.MAX, group=self._flag_group, async_op=True)

    def finish_flag_exchange(self) -> Flags:
        self._wait_for_flags()
        with outside_dispatch_modes():
            stop_signal, still_saving, search_news = self._flags.tolist()
        return Flags(stop_signal, bool(still_saving), bool(search_news))

    def cancel_flag_exchange(self) -> None:
        """Every rank has started it with the step, so it ends by itself. Its result is dropped."""
        self._wait_for_flags()

    def _wait_for_flags(self) -> None:
        if self._flag_work is not None:
            self._flag_work.wait()
            self._flag_work = None

    def barrier(self) -> None:
        dist.barrier(group=self._side_group)

    def exchange_in_library(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()
