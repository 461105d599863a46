"""How the model is spread over the ranks: not at all, replicated (DDP), or sharded (FSDP2).

A strategy sums gradients over the ranks (it never averages them: the step divides by the true global count), and can
abort a step on all ranks without leaving a trace.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainapp.parallel.ranks import Ranks
from trainapp.torch_private import is_shard

WARM_UP_BYTES = (64, 32 * 2**20)  # of a whole buffer: small and large messages take different algorithms
CALLS_BACKWARD = (  # the message of an error
    "the task changes the gradients of the model's parameters, by calling backward() or zero_grad() itself: they hold "
    "the sum over the micro-batches so far; use torch.autograd.grad for gradients inside a task"
)
Task = Callable[[nn.Module, Any], tuple[Any, ...]]  # see `losses.losses`


class Strategy:
    """How one model trains on all ranks. `model` holds the parameters and their names, and is passed to the task."""

    forward_is_collective = False  # whether every rank must evaluate the same number of batches
    recovers_in_place = True  # whether `abort_step` works; if not, all workers restart after an out-of-memory error
    groups: Sequence[dist.ProcessGroup | None] = ()  # those in use

    def __init__(self, model: nn.Module, ranks: Ranks):
        self.model = model
        self.ranks = ranks

    def select_update(self, update: int) -> None:
        """Select an update, if a step has several: only its parameters get gradients from now on."""

    def compute(self, task: Task, batch: Any) -> tuple[Any, ...]:
        """Return the task's result for a training batch, ready for backward."""
        return task(self.model, batch)

    def evaluate(self, task: Task, batch: Any) -> tuple[Any, ...]:
        """Return the task's result for an evaluation batch."""
        if self.forward_is_collective:
            return self.compute(task, batch)
        return task(self.model, batch)

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context for the forward and backward of a micro-batch. Gradients are exchanged in the last one."""
        return contextlib.nullcontext()

    def finish_accumulation(self) -> None:
        """Finish the exchange of gradients, after the last micro-batch. Raises PeerOutOfMemory if another rank aborted
        the step.
        """
        self.ranks.check_peers()

    def checked_update(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for an optimizer's step, which raises UserError for one whose writes would be lost."""
        return contextlib.nullcontext()

    def abort_step(self) -> None:
        """Leave no trace of a step that some rank could not finish. Call on every rank."""
        self.ranks.reset_votes()

    def warm_up(self) -> None:
        """Use every collective of a run once before training, while memory is plentiful.

        NCCL creates a group's communicator in its first collective, and since 2.22 connects the peers of an algorithm,
        with buffers for each channel, when that algorithm is first chosen (NCCL_RUNTIME_CONNECT). It allocates outside
        torch's allocator, so the first step that fills the device could fail there; and an error in NCCL cannot be
        recovered in place, since the other ranks have queued the same collective.

        Collective; waits for the device. Takes at most twice the larger of WARM_UP_BYTES, which stays in the
        allocator's cache.
        """
        device = self.ranks.device
        for group in self._distinct_groups():
            for size in WARM_UP_BYTES:
                _use_collectives(group, size, device)
            totals = torch.zeros(2, dtype=torch.float64, device=device)  # loss and count, as in a step
            dist.all_reduce(totals, group=group)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # an error shows here rather than in the first step

    def _distinct_groups(self) -> list[dist.ProcessGroup]:
        """Return the groups in use, each once: that of the shards may be the default group."""
        by_name = {group.group_name: group for group in self.groups if group is not None}
        return list(by_name.values())

    def communication_buffers(self) -> Iterator[torch.Tensor]:
        """Yield the tensors for exchanging gradients that persist between steps, in addition to those of `model`."""
        return iter(())

    def broadcast_buffers(self, except_for: Collection[str] = ()) -> None:
        """Give every rank the buffers of rank 0, before evaluating and saving: until then each has its own BatchNorm
        statistics. Collective: call on every rank.

        Args:
            except_for: names of buffers that each rank keeps.
        """
        self.ranks.broadcast(buffer for name, buffer in self.model.named_buffers() if name not in except_for)

    def grad_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """Return the norm of all gradients, from the norm of this rank's gradients or shards. Collective."""
        return norm

    def all_reduce_found_inf(self, flags: list[torch.Tensor]) -> None:
        """Spread an fp16 overflow on one rank to all ranks, in place. Collective.

        Args:
            flags: the loss scaler's; positive after an overflow.
        """


class SingleDevice(Strategy):
    """One process, which has the whole model and exchanges nothing."""


def _use_collectives(group: dist.ProcessGroup, size: int, device: torch.device) -> None:
    """Use each collective of a run once, in buffers of `size` bytes."""
    # A whole buffer in fp32, and this rank's part of it.
    ranks = group.size()
    elements_per_rank = max(1, size // 4 // ranks)
    shard = torch.zeros(elements_per_rank, device=device)
    whole = torch.zeros(elements_per_rank * ranks, device=device)

    # Gathers and reductions of FSDP2, broadcasts of buffers, sums and maxima.
    dist.all_gather_into_tensor(whole, shard, group=group)
    dist.reduce_scatter_tensor(shard, whole, group=group)
    dist.broadcast(whole, group_src=0, group=group)
    dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group)
    dist.all_reduce(whole, group=group)


class TaskModule(nn.Module):
    """A model whose forward is a whole task.

    A wrapper (DDP, FSDP2) around it therefore covers everything the task does with the model: reading attributes and
    parameters, calling methods, or calling the model several times, as on one device.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, call: Callable[[nn.Module], torch.Tensor]) -> torch.Tensor:
        return call(self.model)


def compute_within(wrapper: nn.Module, task: Task, batch: Any) -> tuple[Any, ...]:
    """Return the task's result, computed in the forward of `wrapper`, a TaskModule or a module around one.

    The wrapper sees neither the batch, which it might cast or copy, nor any result except the loss, the only one
    through which gradients flow.
    """
    count_and_metrics: list[Any] = []

    def compute_loss(model: nn.Module) -> torch.Tensor:
        loss, *other_results = task(model, batch)
        count_and_metrics.extend(other_results)
        return loss

    loss = wrapper(compute_loss)
    return (loss, *count_and_metrics)


@torch.no_grad()
def copy_into(target: Any, source: torch.Tensor) -> None:
    """Copy a whole tensor into one that may be a shard. No communication: every rank has the whole source."""
    if not is_shard(target):
        target.copy_(source)
        return
    from torch.distributed.tensor import distribute_tensor

    whole = source.to(target.device)
    shard = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
    target.to_local().copy_(shard.to_local())


@contextlib.contextmanager
def requires_grad_only(chosen: Iterable[Tensor], among: Sequence[Tensor]) -> Iterator[None]:
    """Let only the `chosen` of the parameters `among` require gradients inside the block; after it, all do.

    The others get no gradients, which saves their memory and their part of the backward.
    """
    ids = {id(parameter) for parameter in chosen}
    for parameter in among:
        parameter.requires_grad_(id(parameter) in ids)
    try:
        yield
    finally:
        for parameter in among:
            parameter.requires_grad_(True)
