"""DDP: a full copy of the model on every rank, gradients summed in buckets."""

import contextlib
import gc
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainapp.config.schema import Ddp
from trainapp.parallel.ranks import DistributedRanks
from trainapp.parallel.strategy import SingleDevice, Task, TaskModule, compute_within
from trainapp.parallel.warm_up import warm_up_group
from trainapp.torch_private import outside_dispatch_modes


@dataclass
class Exchange:
    """The state of DDP's communication hook.

    It holds no reference to DDP: C++ holds the hook, and such a cycle would never be collected.
    """

    ranks: DistributedRanks
    due: bool = True  # False in all but the last micro-batch

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """The sum of a bucket over ranks; the bucket unchanged where no exchange is due or the step is aborted."""
        if not self.due or (self.ranks.votes_enabled and self.ranks.vote(False)):
            unchanged: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            unchanged.set_result(bucket.buffer())
            return unchanged
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


class DDP(SingleDevice):
    """torch's DistributedDataParallel, with a vote before each of its reductions.

    DDP cannot abandon a backward. After a vote to abort, the backward runs to its end with reductions that do nothing;
    then gradients are dropped and the model is rewrapped on every rank.
    """

    forward: nn.parallel.DistributedDataParallel

    def __init__(self, model: nn.Module, ranks: DistributedRanks, settings: Ddp):
        super().__init__(model, ranks)
        self.settings = settings
        self._exchange = Exchange(ranks)
        self._task_module = TaskModule(model)
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor, 0)
        self._wrap()

    def _wrap(self) -> None:
        device = self.ranks.device
        self.forward = nn.parallel.DistributedDataParallel(
            self._task_module,
            device_ids=[device.index] if device.type == "cuda" else None,
            **_no_buffer_sync(),  # `broadcast_buffers` does it when it matters; DDP would in every forward
            bucket_cap_mb=self.settings.bucket_mb,
            static_graph=self.settings.static_graph,
            find_unused_parameters=self.settings.find_unused_parameters,
            gradient_as_bucket_view=True,
            init_sync=False,
        )
        self.forward.register_comm_hook(self._exchange, Exchange.reduce)
        # In the forward after the first backward DDP rearranges its buckets, which is a collective: vote before it.
        # Costs nothing once the size is proven.
        self.forward.register_forward_pre_hook(lambda *_: self.ranks.check_peers())

    def compute(self, task: Task, batch: Any) -> tuple[Any, ...]:
        """Within DDP's forward."""
        return compute_within(self.forward, task, batch)

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Exchanges gradients in the last micro-batch only."""
        self._exchange.due = last
        # A static graph needs DDP's bookkeeping in every backward: there the hook alone skips the exchange.
        with contextlib.nullcontext() if last or self.settings.static_graph else self.forward.no_sync():
            yield

    def finish_accumulation(self) -> None:
        """A hook cannot raise through DDP, so the result of its last vote is raised here."""
        self.ranks.check_peers()

    def abort_step(self) -> None:
        """Rewraps the model: about 3 ms for a toy model, once per failure."""
        super().abort_step()
        self.model.zero_grad(set_to_none=True)
        # The new wrapper's buckets are as large as the gradients: before they are allocated, free the old ones and what
        # the failed step has left in reference cycles. Costs some 0.03 s.
        del self.forward
        gc.collect()
        self._wrap()

    def warm_up(self) -> None:
        """On the group of all ranks, the only one that it uses."""
        warm_up_group(None, self.ranks.device)

    def broadcast_buffers(self) -> None:
        """BatchNorm's statistics are each rank's own until here."""
        with outside_dispatch_modes():
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0)


def _no_buffer_sync() -> dict[str, Any]:
    """torch 2.13 renamed the parameter."""
    parameters = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers": False}
