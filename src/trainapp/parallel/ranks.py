"""How the ranks of a run talk beside the gradients: votes on running out of memory, sums, agreements.

Votes have a gloo group of their own. A rank that runs out of memory leaves its forward or backward at a place that no
other rank knows of; the others would wait for it in the next collective for ever. So, while a size is unproven, every
rank asks the group before each collective: healthy ranks vote 0; the one that ran out votes 1 exactly once, from its
handler, which pairs with the others' next vote; and everybody leaves the step together.
"""

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

OUT_OF_MEMORY_EXIT = 82  # a worker's exit code: memory ran out where it could not be recovered in place


class PeerOutOfMemory(torch.OutOfMemoryError):
    """Another rank ran out of memory in this step."""


class SingleRank:
    """A single process: agrees with itself at no cost."""

    rank, world = 0, 1
    votes_enabled = False  # whether ranks vote before each collective
    device = torch.device("cpu")
    saving_group: dist.ProcessGroup | None = None  # for checkpoints alone

    def enable_votes(self, unproven: bool) -> None:
        """Vote from here on, or not: by default while a size is at work that is not proven. The same on all ranks."""

    def check_peers(self) -> None:
        """Before a collective: raises PeerOutOfMemory when another rank gave up. Free while not armed."""

    def vote(self, failed: bool) -> bool:
        """Whether any rank voted that it ran out of memory."""
        return failed

    def all_reduce_sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over ranks."""
        return value

    def all_reduce_min(self, value: int) -> int:
        """The least over ranks."""
        return value

    def all_reduce_max(self, *values: int) -> list[int]:
        """The most of each over ranks, asked inside a step or an evaluation: raises PeerOutOfMemory like a gate."""
        return list(values)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Everybody's small Python object, by rank."""
        return [value]

    def start_agreement(self, read: Callable[[], tuple[int, int, int]]) -> None:
        """Begin to find the largest of each of the values of `read()` over ranks, while the step goes on."""
        self._read = read

    def finish_agreement(self) -> tuple[int, int, int]:
        """What was found."""
        return self._read()

    def drop_agreement(self) -> None:
        """End what a step that was given up had begun."""

    def reset_votes(self) -> None:
        """All have left the step that was given up: the next vote is about another one."""

    def barrier(self) -> None:
        """Wait for everybody."""

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is the rank that writes and speaks for all."""
        return self.rank == 0


class DistributedRanks(SingleRank):
    """This process among the ranks of a run. Needs torch.distributed to be initialised.

    timeout: after how many seconds a peer that does not answer is an error.
    policy: "unproven", "always" or "never", when `arm` lets the ranks vote.
    """

    def __init__(self, device: torch.device, timeout: float, policy: str = "unproven"):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = device
        self.votes_enabled, self.policy = True, policy
        self.votes = 0
        self._given_up = False
        limit = datetime.timedelta(seconds=timeout)
        self._votes = dist.new_group(backend="gloo", timeout=limit)
        self._side = dist.new_group(backend="gloo", timeout=limit)
        self.saving_group = dist.new_group(backend="gloo", timeout=limit)
        self._agreements = dist.new_group(backend="gloo", timeout=limit)
        self._work: dist.Work | None = None
        self._flags = torch.zeros(3, dtype=torch.int64)

    def forget_groups(self) -> None:
        """At the end, after the last exchange."""
        self.drop_agreement()
        self._votes = self._side = self.saving_group = self._agreements = None

    def enable_votes(self, unproven: bool) -> None:
        """Vote from here on, or not."""
        self.votes_enabled = self.policy == "always" or (self.policy == "unproven" and unproven)

    def check_peers(self) -> None:
        """Raises PeerOutOfMemory when another rank ran out of memory."""
        if self.votes_enabled and self.vote(False):
            raise PeerOutOfMemory("another rank ran out of memory")

    def vote(self, failed: bool) -> bool:
        """One integer over gloo: 0.3 to 0.7 ms on two busy cores.

        Once a step is given up nobody asks any more, so that a rank that runs out on its own way out, or meets further
        gates there, is left with no vote that none of the others would answer.
        """
        if self._given_up:
            return True
        with undisturbed():
            flag = torch.tensor([int(failed)])
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._votes)
            self._given_up = bool(flag)
        self.votes += 1
        return self._given_up

    def reset_votes(self) -> None:
        """All have left the step that was given up."""
        self._given_up = False

    def all_reduce_sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, on the group of the gradients."""
        self.check_peers()
        with undisturbed():
            value = value.clone()
            dist.all_reduce(value)
        return value

    def all_reduce_min(self, value: int) -> int:
        """The least over ranks."""
        with undisturbed():
            number = torch.tensor([value])
            dist.all_reduce(number, op=dist.ReduceOp.MIN, group=self._side)
            return int(number)

    def all_reduce_max(self, *values: int) -> list[int]:
        """The most of each over ranks; gated."""
        self.check_peers()
        with undisturbed():
            numbers = torch.tensor(values)
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._side)
            return numbers.tolist()

    def all_gather_object(self, value: Any) -> list[Any]:
        """Everybody's small Python object, by rank."""
        found: list[Any] = [None] * self.world
        with undisturbed():
            dist.all_gather_object(found, value, group=self._side)
        return found

    def start_agreement(self, read: Callable[[], tuple[int, int, int]]) -> None:
        """On a group of its own, in the background: the step hides it."""
        self.drop_agreement()
        with undisturbed():
            self._flags[:] = torch.tensor(read())
            self._work = dist.all_reduce(self._flags, op=dist.ReduceOp.MAX, group=self._agreements, async_op=True)

    def finish_agreement(self) -> tuple[int, int, int]:
        """Waits for the others."""
        self.drop_agreement()
        with undisturbed():
            first, second, third = self._flags.tolist()
        return first, second, third

    def drop_agreement(self) -> None:
        """Every rank began it with the step, so it ends by itself."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def barrier(self) -> None:
        """Wait for everybody, on the side group."""
        dist.barrier(group=self._side)


def undisturbed():
    """Around what ranks say to each other: its few bytes are no part of what is measured and limited."""
    return torch.utils._python_dispatch._disable_current_modes()
