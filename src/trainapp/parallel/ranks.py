"""How the ranks of a run communicate, apart from gradients: votes on running out of memory, reductions, flags.

Votes have their own gloo group. A rank that runs out of memory leaves its forward or backward at an arbitrary point;
the others would wait for it in their next collective forever. Therefore, while a size is unvalidated, all ranks vote
before each collective of a step: healthy ranks vote 0, and the one that ran out votes 1 exactly once, from its handler.
That vote pairs with the others' next one, and all ranks leave the step together.
"""

import contextlib
import datetime
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainapp.errors import UserError
from trainapp.torch_private import outside_dispatch_modes

T = TypeVar("T")
STOP, ASK_EVERY = "stop", 0.2  # the store's key of a signal; seconds
OUT_OF_MEMORY_EXIT = 82  # a worker's exit code: memory ran out and could not be recovered in place


class PeerOutOfMemory(torch.OutOfMemoryError):
    """Another rank ran out of memory in this step."""


class Flags(NamedTuple):
    """Flags that ranks exchange once per step. After the exchange: the maximum of each over all ranks."""

    stop_signal: int = 0  # the number of the signal to stop for, or 0
    still_saving: bool = False  # a checkpoint is being written in the background
    size_may_change: bool = False  # this rank has run a shape whose size is unvalidated or may grow
    save_is_due: bool = False  # by this rank's clock, for `every.save` in minutes


class Ranks:
    """The ranks of a run, from the view of one. "Collective" means: call on every rank, in the same order.

    In this base class every collective returns its input.

    votes_enabled: whether ranks vote before each collective. saving_group: the process group for checkpoints.
    """

    rank, world_size = 0, 1
    device = torch.device("cpu")
    votes = 0  # number of votes so far
    votes_enabled = False
    saving_group: dist.ProcessGroup | None = None
    _read_flags: Callable[[], Flags]

    @property
    def is_rank_zero(self) -> bool:
        """Whether this rank writes the run's files and its messages."""
        return self.rank == 0

    def enable_votes(self, unvalidated: bool) -> None:
        """Decide whether to vote from now on. unvalidated: whether a size in use is unvalidated; equal on all ranks."""

    def disable_votes(self) -> None:
        """Disable votes for this run, overriding `parallel.vote_on_oom`: the strategy cannot recover in place."""

    def check_peers(self) -> None:
        """Call before a collective. Raises PeerOutOfMemory if another rank aborted the step. No cost while voting is
        off.
        """

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """Around a collective: calls `check_peers`, and disables dispatch modes inside, so that live tensors do not
        include gloo's buffers.
        """
        self.check_peers()
        with outside_dispatch_modes():
            yield

    def meshes(self, replicas: int) -> tuple[DeviceMesh, DeviceMesh]:
        """A mesh across replicas, and one across this rank's replica. Collective, and never preceded by a vote."""
        shape = replicas, self.world_size // replicas
        with outside_dispatch_modes():  # it reads rank ids, which fake tensors do not have
            mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard"))
            return mesh["replicate"], mesh["shard"]

    def vote(self, failed: bool) -> bool:
        """Whether any rank voted that it ran out of memory. Collective."""
        return failed

    def reset_votes(self) -> None:
        """Call after all ranks have left an aborted step, before the next vote."""

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        """The sum over ranks. Collective; raises PeerOutOfMemory as `check_peers` does."""
        return value

    def all_reduce_max(self, *values: int) -> list[int]:
        """The maximum of each over ranks. Collective; raises PeerOutOfMemory as `check_peers` does."""
        return list(values)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's `value`, a small Python object, ordered by rank. Collective, and never preceded by a vote."""
        return [value]

    def announced(self, own: int) -> int:
        """`own`, the number of this rank's signal, or 0; then that of another rank that has announced one. Not
        collective and only a hint, which spares the others the rest of their work: `agree` decides.
        """
        return own

    def agree(self, heard: Callable[[], int]) -> int:
        """The maximum over ranks of `heard()`, called on arrival. Collective, and never preceded by a vote. A signal to
        a rank that waits here is announced to those at work.
        """
        return heard()

    def start_flag_exchange(self, read: Callable[[], Flags]) -> None:
        """Start to exchange the flags that `read()` returns, in the background of a step. Collective."""
        self._read_flags = read

    def finish_flag_exchange(self) -> Flags:
        """The maximum of each flag over ranks. Waits for the slowest rank.

        A single process reads the flags only now, so that a signal during the step is seen at its end.
        """
        return self._read_flags()

    def cancel_flag_exchange(self) -> None:
        """End the exchange that an aborted step has started."""

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the values of rank 0, in place. Collective, and never preceded by a vote."""

    def exchange_in_library(self) -> contextlib.AbstractContextManager[None]:
        """Wraps a library's collective that needs real values; overridden when tracing."""
        return contextlib.nullcontext()


class SingleRank(Ranks):
    """A single process."""


class DistributedRanks(Ranks):
    """This process among the ranks of a run. Needs torch.distributed to be initialised.

    timeout: seconds after which an unresponsive peer is an error. vote_on_oom: when ranks vote, "unvalidated", "always"
    or "never"; see `enable_votes`.
    """

    def __init__(self, device: torch.device, timeout: float, vote_on_oom: str = "unvalidated"):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = device
        self._vote_on_oom = vote_on_oom
        self._aborted = False
        self.enable_votes(True)
        limit = datetime.timedelta(seconds=timeout)
        groups = [dist.new_group(backend="gloo", timeout=limit) for _ in range(4)]
        self._vote_group, self._side_group, self.saving_group, self._flag_group = groups
        # The group's own keys of the store, from torch 2.13 on; before, ranks hear of each other's signals in `agree`.
        self._store = getattr(self._side_group, "get_group_store", lambda: None)()
        self._announced, self._asked = 0, 0.0
        self._flag_work: dist.Work | None = None
        self._flags = torch.zeros(len(Flags()), dtype=torch.int64)

    def release_groups(self) -> None:
        """Drop the process groups, after the last collective."""
        self.cancel_flag_exchange()
        self._vote_group = self._side_group = self.saving_group = self._flag_group = None

    def enable_votes(self, unvalidated: bool) -> None:
        self.votes_enabled = self._vote_on_oom == "always" or (self._vote_on_oom == "unvalidated" and unvalidated)

    def disable_votes(self) -> None:
        self._vote_on_oom, self.votes_enabled = "never", False

    def check_peers(self) -> None:
        """Votes that this rank is healthy. Raises PeerOutOfMemory if another one is not."""
        if self.votes_enabled and self.vote(False):
            raise PeerOutOfMemory("another rank ran out of memory")

    def vote(self, failed: bool) -> bool:
        """One integer over gloo: 0.3 to 0.7 ms on two busy cores.

        An aborted step has no further votes: a rank that runs out of memory, or reaches another collective, on its way
        out of the step would wait for votes that no other rank casts.
        """
        if not self._aborted:
            self._aborted = bool(_maximum([int(failed)], self._vote_group)[0])
            self.votes += 1
        return self._aborted

    def reset_votes(self) -> None:
        self._aborted = False

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        """Uses the gradients' group, so the value may be on the device."""
        with self.collective():
            value = value.clone()
            dist.all_reduce(value)
        return value

    def all_reduce_max(self, *values: int) -> list[int]:
        self.check_peers()
        return _maximum(values, self._side_group)

    def all_gather_object(self, value: Any) -> list[Any]:
        by_rank: list[Any] = [None] * self.world_size
        with outside_dispatch_modes():
            dist.all_gather_object(by_rank, value, group=self._side_group)
        return by_rank

    def announced(self, own: int) -> int:
        """Asks the store, which takes 30 microseconds on one machine, at most every 0.2 seconds."""
        if self._store is not None and not self._announced and (own or time.monotonic() - self._asked > ASK_EVERY):
            self._asked = time.monotonic()
            with contextlib.suppress(RuntimeError):  # the store's host may have left
                if own:
                    self._store.set(STOP, str(own))
                elif self._store.check([STOP]):
                    own = int(self._store.get(STOP))
                self._announced = own
        return own or self._announced

    def agree(self, heard: Callable[[], int]) -> int:
        with outside_dispatch_modes():
            number = torch.tensor(heard())
            work = dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self._side_group, async_op=True)
            while not work.is_completed():  # by itself after an error, too; Python calls signal handlers only here
                heard()
                time.sleep(0.002)
            work.wait()
            return int(number)

    def start_flag_exchange(self, read: Callable[[], Flags]) -> None:
        """Asynchronous, on its own group: the step hides its latency."""
        self.cancel_flag_exchange()
        with outside_dispatch_modes():
            self._flags = torch.tensor(read(), dtype=torch.int64)
            self._flag_work = dist.all_reduce(self._flags, op=dist.ReduceOp.MAX, group=self._flag_group, async_op=True)

    def finish_flag_exchange(self) -> Flags:
        self.cancel_flag_exchange()
        with outside_dispatch_modes():
            stop_signal, *others = self._flags.tolist()
        return Flags(stop_signal, *map(bool, others))

    def cancel_flag_exchange(self) -> None:
        """Waits for the exchange: every rank has started it with the step, so it ends by itself."""
        if self._flag_work is not None:
            self._flag_work.wait()
            self._flag_work = None

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        with outside_dispatch_modes(), torch.no_grad():
            for tensor in tensors:
                dist.broadcast(tensor, 0)


def _maximum(values: Sequence[int], group: dist.ProcessGroup | None) -> list[int]:
    with outside_dispatch_modes():
        numbers = torch.tensor(values)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
        return numbers.tolist()


def answered_by_rank_zero(ranks: Ranks, ask: Callable[[], T]) -> T:
    """The result of `ask`, which only rank 0 calls. Collective.

    Its UserError is raised on all ranks, so none waits for another.
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


def gather_rows(ranks: Ranks, tensors: list[Tensor], setting: str) -> tuple[list[Tensor], int, int]:
    """Tensors of shape [n, ...], where n may differ between ranks, as [sum of n, ...] in the order of the ranks; this
    rank's rows are [start, end). Collective; no gradients.

    Each is summed with zeros for the other ranks' rows: exact, and all_reduce is the only collective that every backend
    and tracing support. Raises UserError if shapes or dtypes differ between ranks; PeerOutOfMemory as `check_peers`
    does. setting: names the tensors in messages.
    """
    own = len(tensors[0])
    if ranks.world_size == 1:
        return tensors, 0, own
    ranks.check_peers()
    by_rank = ranks.all_gather_object((own, [(tuple(t.shape[1:]), str(t.dtype)) for t in tensors]))
    if any(forms != by_rank[0][1] for _, forms in by_rank):
        raise UserError(f"{setting}: the embeddings of different ranks have different shapes; make them equal")
    start = sum(rows for rows, _ in by_rank[: ranks.rank])
    total = sum(rows for rows, _ in by_rank)
    gathered = []
    for tensor in tensors:
        # gloo cannot sum booleans, nor every half precision: both are exact in a wider type.
        widened = {torch.bool: torch.uint8, torch.float16: torch.float32, torch.bfloat16: torch.float32}
        wide = widened.get(tensor.dtype, tensor.dtype)
        whole = torch.zeros((total, *tensor.shape[1:]), dtype=wide, device=tensor.device)
        whole[start : start + own] = tensor
        gathered.append(ranks.all_reduce_sum(whole).to(tensor.dtype))
    return gathered, start, start + own
