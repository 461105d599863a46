"""How the ranks of a run communicate, apart from gradients: votes on running out of memory, reductions, flags.

The order of votes. A collective call ends only once every rank has made it, and a process group matches calls by their
order alone: the third call of one rank is the third of all. A rank that runs out of memory leaves its forward or
backward at an arbitrary point, and the others would wait in their next collective for a call that never comes.
Therefore, while a size is unvalidated, ranks vote before each collective of a step:

    healthy rank:  vote(0) all_reduce  vote(0) all_reduce  vote(0) -> PeerOutOfMemory, leaves the step
    failing rank:  vote(0) all_reduce  vote(0) all_reduce  out of memory, leaves the step, vote(1)

A vote is a maximum over all ranks, in a group of its own. The failing rank casts its 1 from the handler of the error,
exactly once, in place of the 0 that it would have cast before its next collective: so it pairs with the others' next
vote, wherever they are, and all of them have made the same collectives. After it an aborted step has no further votes
(see `vote`). Outside the step all ranks are at the same point again, `oom.recovery`, and make the same calls there:
they exchange what failed and what was lost, agree on the size, and retry.
"""

import contextlib
import datetime
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainapp.errors import UserError
from trainapp.parallel.peer_watch import PeerWatch
from trainapp.torch_private import outside_dispatch_modes

T = TypeVar("T")
log = logging.getLogger(__name__)
STOP_KEY = "stop"  # of the store: the number of a signal
STORE_INTERVAL = 0.2  # seconds between two looks at the store
OUT_OF_MEMORY_EXIT = 82  # a worker's exit code: memory ran out and could not be recovered in place


class PeerOutOfMemory(torch.OutOfMemoryError):
    """Another rank ran out of memory in this step."""


class Flags(NamedTuple):
    """Flags that ranks exchange once per step. After the exchange: the maximum of each over all ranks."""

    stop_signal: int = 0  # the number of the signal to stop for, or 0
    still_saving: bool = False  # a checkpoint is being written in the background
    size_may_change: bool = False  # this rank has run a shape whose size is unvalidated or may grow
    save_is_due: bool = False  # by this rank's clock, for `every.save` in minutes
    shape_is_unsteady: bool = False  # this rank's latest micro-batches were not all of one shape


class Ranks:
    """The ranks of a run, from the view of one. "Collective" means: call on every rank, in the same order.

    In this base class every collective returns its input.
    """

    rank = 0
    world_size = 1
    device = torch.device("cpu")
    votes = 0  # number of votes so far
    votes_enabled = False  # whether ranks vote before each collective
    why_not_voting = "once a size is validated"  # continues "ranks do not vote"
    saving_group: dist.ProcessGroup | None = None  # for checkpoints
    _read_flags: Callable[[], Flags]

    @property
    def is_rank_zero(self) -> bool:
        """Whether this rank writes the run's files and its messages."""
        return self.rank == 0

    def enable_votes(self, unvalidated: bool) -> None:
        """Decide whether to vote from now on.

        Args:
            unvalidated: whether a size in use is unvalidated; equal on all ranks.
        """

    def disable_votes(self) -> None:
        """Disable votes for this run, overriding `parallel.vote_on_oom`: the strategy cannot recover in place."""

    def check_peers(self) -> None:
        """Call before a collective. Raises PeerOutOfMemory if another rank aborted the step. No cost while voting is
        off.
        """

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """Call `check_peers`, then disable dispatch modes inside the block, which is for a collective: live tensors do
        not include gloo's buffers.
        """
        self.check_peers()
        with outside_dispatch_modes():
            yield

    def meshes(self, replicas: int) -> tuple[DeviceMesh, DeviceMesh]:
        """Return a mesh across replicas, and one across this rank's replica. Collective, and never preceded by a vote.

        Args:
            replicas: the number of copies of the model.
        """
        shape = (replicas, self.world_size // replicas)
        with outside_dispatch_modes():  # the mesh reads rank ids, which fake tensors do not have
            mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard"))
            return mesh["replicate"], mesh["shard"]

    def vote(self, failed: bool) -> bool:
        """Return whether any rank voted that it ran out of memory. Collective.

        Args:
            failed: this rank's vote.
        """
        return failed

    def announce_end(self) -> None:
        """Let the other ranks end at once, too, before this one ends without having cast a vote. Not collective."""

    def reset_votes(self) -> None:
        """Allow votes again. Call after all ranks have left an aborted step, before the next vote."""

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        """Return the sum over ranks. Collective; raises PeerOutOfMemory as `check_peers` does."""
        return value

    def all_reduce_max(self, *values: int) -> list[int]:
        """Return the maximum of each over ranks. Collective; raises PeerOutOfMemory as `check_peers` does."""
        return list(values)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's `value`, a small Python object, by rank. Collective, and never preceded by a vote."""
        return [value]

    def announced(self, signal_here: int) -> int:
        """Return the number of this rank's signal, or else that of a signal which another rank has announced, or 0.

        Not collective and only a hint, which spares the others the rest of their work: `agree` decides.

        Args:
            signal_here: the number of this rank's signal, which is announced to the others; 0 without one.
        """
        return signal_here

    def agree(self, read_signal: Callable[[], int]) -> int:
        """Return the maximum over ranks of `read_signal()`, as each of them arrives. Collective, and never preceded by
        a vote.

        Args:
            read_signal: also called while this rank waits, to announce a signal to the ranks that are still at work.
        """
        return read_signal()

    def start_flag_exchange(self, read: Callable[[], Flags]) -> None:
        """Start to exchange the flags that `read()` returns, in the background of a step. Collective."""
        self._read_flags = read

    def finish_flag_exchange(self) -> Flags:
        """Return the maximum of each flag over ranks. Waits for the slowest rank.

        A single process reads the flags only now, so that a signal during the step is seen at its end.
        """
        return self._read_flags()

    def cancel_flag_exchange(self) -> None:
        """End the exchange that an aborted step has started."""

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the values of rank 0, in place. Collective, and never preceded by a vote."""

    def exchange_in_library(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for a library's collective that needs real values; overridden when tracing."""
        return contextlib.nullcontext()


class SingleRank(Ranks):
    """A single process."""


class DistributedRanks(Ranks):
    """This process among the ranks of a run. Needs torch.distributed to be initialised.

    Args:
        device: of this rank.
        timeout: seconds after which an unresponsive peer is an error.
        vote_on_oom: when ranks vote, "unvalidated", "always" or "never"; see `enable_votes`.
    """

    def __init__(self, device: torch.device, timeout: float, vote_on_oom: str = "unvalidated"):
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = device

        # Votes
        self._vote_on_oom = vote_on_oom
        if vote_on_oom == "never":
            self.why_not_voting = "with parallel.vote_on_oom=never"
        self._aborted = False  # whether a vote has aborted the current step
        self.enable_votes(True)

        # Each kind of exchange has a group of its own: they overlap, and each group must see its calls in one order.
        limit = datetime.timedelta(seconds=timeout)
        self._vote_group: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=limit)
        self._side_group: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=limit)
        self.saving_group = dist.new_group(backend="gloo", timeout=limit)
        self._flag_group: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=limit)

        # Signals. The group's own keys of the store, from torch 2.13 on; before, ranks hear of each other's signals in
        # `agree`.
        self._store = getattr(self._side_group, "get_group_store", lambda: None)()
        self._announced_signal = 0
        self._store_read_at = 0.0  # by `time.monotonic()`
        self._peer_watch: PeerWatch | None = None
        if self._store is not None:
            self._peer_watch = PeerWatch(self._store, self._leave_with_peer)

        # The exchange of flags that a step has started
        self._flag_work: dist.Work | None = None
        self._flags = torch.zeros(len(Flags()), dtype=torch.int64)

    def end_peer_watch(self) -> None:
        """Call when this rank leaves, after an error, too: the store may leave before it."""
        if self._peer_watch is not None:
            self._peer_watch.close()

    def release_groups(self) -> None:
        """Drop the process groups, after the last collective."""
        self.cancel_flag_exchange()
        self._vote_group = None
        self._side_group = None
        self.saving_group = None
        self._flag_group = None

    def enable_votes(self, unvalidated: bool) -> None:
        if self._vote_on_oom == "unvalidated":
            self.votes_enabled = unvalidated
        else:
            self.votes_enabled = self._vote_on_oom == "always"

    def disable_votes(self) -> None:
        self._vote_on_oom = "never"
        self.why_not_voting = "with FSDP2 on torch < 2.13, which cannot retry a step"
        self.votes_enabled = False

    def check_peers(self) -> None:
        """Vote that this rank is healthy. Raises PeerOutOfMemory if another one is not."""
        if self.votes_enabled and self.vote(False):
            raise PeerOutOfMemory("another rank ran out of memory")

    def vote(self, failed: bool) -> bool:
        """Exchange one integer over gloo: 0.3 to 0.7 ms on two busy cores.

        An aborted step has no further votes: a rank that runs out of memory, or reaches another collective, on its way
        out of the step would wait for votes that no other rank casts.
        """
        if self._aborted:
            return True
        [failures] = _maximum([int(failed)], self._vote_group)
        self._aborted = failures > 0
        self.votes += 1
        return self._aborted

    def announce_end(self) -> None:
        if self._peer_watch is not None:
            self._peer_watch.announce()

    def _leave_with_peer(self) -> None:
        """End this process for a peer that has run out of memory, from the thread that watches for it."""
        log.warning("rank %d: ends, since another rank has run out of memory; the launcher restarts all", self.rank)
        logging.shutdown()
        os._exit(OUT_OF_MEMORY_EXIT)

    def reset_votes(self) -> None:
        self._aborted = False

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        """Use the gradients' group, so the value may be on the device."""
        with self.collective():
            total = value.clone()
            dist.all_reduce(total)
        return total

    def all_reduce_max(self, *values: int) -> list[int]:
        self.check_peers()
        return _maximum(values, self._side_group)

    def all_gather_object(self, value: Any) -> list[Any]:
        by_rank: list[Any] = [None] * self.world_size
        with outside_dispatch_modes():
            dist.all_gather_object(by_rank, value, group=self._side_group)
        return by_rank

    def announced(self, signal_here: int) -> int:
        """Ask the store, which takes 30 microseconds on one machine, at most every 0.2 seconds."""
        now = time.monotonic()
        is_due = signal_here != 0 or now - self._store_read_at > STORE_INTERVAL
        if self._store is not None and not self._announced_signal and is_due:
            self._store_read_at = now
            with contextlib.suppress(RuntimeError):  # the store's host may have left
                self._announced_signal = self._exchange_signal(signal_here)
        return signal_here or self._announced_signal

    def _exchange_signal(self, signal_here: int) -> int:
        """Announce this rank's signal if it has one. Return it, or else the announced one, or 0."""
        assert self._store is not None, "no store to announce a signal in"
        if signal_here:
            self._store.set(STOP_KEY, str(signal_here))
            return signal_here
        if self._store.check([STOP_KEY]):
            return int(self._store.get(STOP_KEY))
        return 0

    def agree(self, read_signal: Callable[[], int]) -> int:
        with outside_dispatch_modes():
            number = torch.tensor(read_signal())
            work = dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self._side_group, async_op=True)
            # Not `work.wait()` at once: Python calls signal handlers only between its own instructions. After an error
            # the work is completed, too.
            while not work.is_completed():
                read_signal()
                time.sleep(0.002)
            work.wait()
            return int(number)

    def start_flag_exchange(self, read: Callable[[], Flags]) -> None:
        """Start it on a group of its own: the step hides its latency."""
        self.cancel_flag_exchange()
        with outside_dispatch_modes():
            self._flags = torch.tensor(read(), dtype=torch.int64)
            self._flag_work = dist.all_reduce(self._flags, op=dist.ReduceOp.MAX, group=self._flag_group, async_op=True)

    def finish_flag_exchange(self) -> Flags:
        self.cancel_flag_exchange()
        with outside_dispatch_modes():
            stop_signal, *switches = self._flags.tolist()
        return Flags(stop_signal, *map(bool, switches))

    def cancel_flag_exchange(self) -> None:
        """Wait for the exchange: every rank has started it with the step, so it ends by itself."""
        if self._flag_work is not None:
            self._flag_work.wait()
            self._flag_work = None

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        with outside_dispatch_modes(), torch.no_grad():
            for tensor in tensors:
                dist.broadcast(tensor, 0)


def _maximum(values: Sequence[int], group: dist.ProcessGroup | None) -> list[int]:
    """Return the maximum of each value over the ranks of the group."""
    with outside_dispatch_modes():
        maxima = torch.tensor(values)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        return maxima.tolist()


def answered_by_rank_zero(ranks: Ranks, ask: Callable[[], T]) -> T:
    """Return the result of `ask`, which only rank 0 calls. Collective.

    Its UserError is raised on all ranks, so none waits for another.
    """
    answer: T | None = None
    mistake: UserError | None = None
    if ranks.is_rank_zero:
        try:
            answer = ask()
        except UserError as error:
            mistake = error

    # The others wait here for rank 0's answer.
    answer, mistake = ranks.all_gather_object((answer, mistake))[0]
    if mistake is not None:
        raise mistake
    return cast(T, answer)


# gloo cannot sum booleans, nor every half precision: both are exact in a wider type.
_SUMMED_AS = {torch.bool: torch.uint8, torch.float16: torch.float32, torch.bfloat16: torch.float32}


def gather_rows(ranks: Ranks, tensors: list[Tensor], setting: str) -> tuple[list[Tensor], int, int]:
    """Gather the rows of each tensor on all ranks. Collective; no gradients.

    Each is summed with zeros for the other ranks' rows: exact, and all_reduce is the only collective that every backend
    and tracing support. Raises UserError if shapes or dtypes differ between ranks; PeerOutOfMemory as `check_peers`
    does.

    Args:
        ranks: this rank among the others.
        tensors: of shape [n, ...], all with the same n, which may differ between ranks.
        setting: names the tensors in messages.

    Returns:
        The tensors as [sum of n, ...] in the order of the ranks, and the start and the end of this rank's rows.
    """
    row_count = len(tensors[0])
    if ranks.world_size == 1:
        return tensors, 0, row_count

    # Agree on the shapes
    ranks.check_peers()
    row_forms = [(tuple(tensor.shape[1:]), str(tensor.dtype)) for tensor in tensors]
    by_rank = ranks.all_gather_object((row_count, row_forms))
    for _, forms_of_rank in by_rank:
        if forms_of_rank != by_rank[0][1]:
            raise UserError(f"{setting}: the embeddings of different ranks have different shapes; make them equal")

    # This rank's rows follow those of the ranks before it
    row_counts = [count for count, _ in by_rank]
    total = sum(row_counts)
    start = sum(row_counts[: ranks.rank])
    end = start + row_count

    gathered = []
    for tensor in tensors:
        dtype = _SUMMED_AS.get(tensor.dtype, tensor.dtype)
        rows = torch.zeros((total, *tensor.shape[1:]), dtype=dtype, device=tensor.device)
        rows[start:end] = tensor
        gathered.append(ranks.all_reduce_sum(rows).to(tensor.dtype))
    return gathered, start, end
