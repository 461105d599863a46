"""DDP: a whole copy of the model on every rank, gradients summed in buckets."""

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from trainapp.config import schema
from trainapp.parallel.ranks import DistributedRanks, undisturbed
from trainapp.parallel.strategy import SingleDevice


@dataclass
class Exchange:
    """What DDP's hook works with. It does not know DDP: C++ holds the hook, a circle that nobody collects."""

    ranks: DistributedRanks
    due: bool = True

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The sum of a bucket over ranks, or the bucket as it is where no exchange is due or the step is given up."""
        if not self.due or (self.ranks.votes_enabled and self.ranks.vote(False)):
            nothing: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            nothing.set_result(bucket.buffer())
            return nothing
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


class DDP(SingleDevice):
    """torch's DistributedDataParallel, its reductions gated by votes.

    On a vote the backward is finished with reductions that do nothing, and the model is wrapped again on every rank:
    DDP has no way to abandon a backward. Gradients are then dropped.
    """

    def __init__(self, model: nn.Module, ranks: DistributedRanks, settings: schema.Ddp):
        super().__init__(model, ranks)
        self.settings = settings
        self._exchange = Exchange(ranks)
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor, 0)
        self._wrap()

    def _wrap(self) -> None:
        device = self.ranks.device
        self.forward = nn.parallel.DistributedDataParallel(
            self.model,
            device_ids=[device.index] if device.type == "cuda" else None,
            **_no_buffer_sync(),  # a collective in every forward; `broadcast_buffers` does it when it matters
            bucket_cap_mb=self.settings.bucket_mb,
            static_graph=self.settings.static_graph,
            find_unused_parameters=self.settings.find_unused_parameters,
            gradient_as_bucket_view=True,
            init_sync=False,
        )
        self.forward.register_comm_hook(self._exchange, Exchange.reduce)
        # DDP rearranges its buckets in the forward after the first backward, which is a collective. Also free of charge
        # once the size is proven.
        self.forward.register_forward_pre_hook(lambda *_: self.ranks.check_peers())

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """No exchange in all but the last micro-batch."""
        self._exchange.due = last
        # A static graph wants its bookkeeping in every backward: there the hook alone leaves the exchange out.
        with contextlib.nullcontext() if last or self.settings.static_graph else self.forward.no_sync():
            yield

    def finish_accumulation(self) -> None:
        """A hook cannot raise what the caller would know: the vote that it consumed raises here."""
        self.ranks.check_peers()

    def abort_step(self) -> None:
        """Wrap again: about 3 ms for a toy model, once for each failure."""
        super().abort_step()
        self.model.zero_grad(set_to_none=True)
        self.forward = None
        self._wrap()

    def broadcast_buffers(self) -> None:
        """Rank 0's statistics are everybody's."""
        with undisturbed():
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0)


def _no_buffer_sync() -> dict[str, bool]:
    """The parameter has another name from torch 2.13 on."""
    takes = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in takes else "broadcast_buffers": False}
