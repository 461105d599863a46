"""How the model is spread over the ranks: not at all, replicated (DDP), or in shards (FSDP2).

Each strategy sums gradients over the ranks (it never averages: the loop divides by the true global count), lets a
step be given up on all ranks, and knows how to leave no trace of it.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from trainapp import config
from trainapp.errors import UserError
from trainapp.parallel.ranks import Alone, Ranks, undisturbed


class Single:
    """One process. `forward` is what a task calls; `model` keeps the parameters and their names."""

    equal_batches = False  # whether evaluation needs as many forwards on every rank

    def __init__(self, model: nn.Module, ranks: Alone):
        self.model, self.ranks = model, ranks
        self.forward: nn.Module = model
        self.evaluate: nn.Module = model

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager:
        """Around forward and backward of a micro-batch; gradients are exchanged in the last one."""
        return contextlib.nullcontext()

    def give_up(self) -> None:
        """After a step that some rank could not finish, on every rank: nothing of it is left."""
        self.ranks.begin_again()

    def gradients_ready(self) -> None:
        """After the last micro-batch. Raises PeerOutOfMemory when another rank did not get there."""
        self.ranks.gate()

    def share_buffers(self) -> None:
        """Before evaluating and saving: every rank has the same statistics."""

    def norm(self, norm: torch.Tensor) -> torch.Tensor:
        """The norm of all gradients, from that of this rank's part of them."""
        return norm

    def agree_on_overflow(self, found: list[torch.Tensor]) -> None:
        """fp16: an overflow on one rank is one on all."""


@dataclass
class Exchange:
    """What DDP's hook works with. It does not know DDP: C++ holds the hook, a circle that nobody collects."""

    ranks: Ranks
    due: bool = True

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The sum of a bucket over ranks, or the bucket as it is where no exchange is due or the step is given up."""
        if not self.due or (self.ranks.armed and self.ranks.vote(False)):
            nothing: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            nothing.set_result(bucket.buffer())
            return nothing
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


class Replicated(Single):
    """torch's DistributedDataParallel, its reductions gated by votes.

    On a vote the backward is finished with reductions that do nothing, and the model is wrapped again on every rank:
    DDP has no way to abandon a backward. Gradients are then dropped.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, settings: config.Ddp):
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
            **_no_buffer_sync(),  # a collective in every forward; `share_buffers` does it when it matters
            bucket_cap_mb=self.settings.bucket_mb,
            static_graph=self.settings.static_graph,
            find_unused_parameters=self.settings.find_unused_parameters,
            gradient_as_bucket_view=True,
            init_sync=False,
        )
        self.forward.register_comm_hook(self._exchange, Exchange.reduce)
        # DDP rearranges its buckets in the forward after the first backward, which is a collective. Also free of charge
        # once the size is proven.
        self.forward.register_forward_pre_hook(lambda *_: self.ranks.gate())

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """No exchange in all but the last micro-batch."""
        self._exchange.due = last
        # A static graph wants its bookkeeping in every backward: there the hook alone leaves the exchange out.
        with contextlib.nullcontext() if last or self.settings.static_graph else self.forward.no_sync():
            yield

    def gradients_ready(self) -> None:
        """A hook cannot raise what the caller would know: the vote that it consumed raises here."""
        self.ranks.gate()

    def give_up(self) -> None:
        """Wrap again: about 3 ms for a toy model, once for each failure."""
        super().give_up()
        self.model.zero_grad(set_to_none=True)
        self.forward = None
        self._wrap()

    def share_buffers(self) -> None:
        """Rank 0's statistics are everybody's."""
        with undisturbed():
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0)


class Sharded(Single):
    """FSDP2: parameters, gradients and optimizer state in shards; every gather and reduction gated by a vote.

    The votes sit in `__call__` of custom collectives: `allocate` runs before it, so that a buffer that does not fit is
    covered, too.
    """

    equal_batches = True

    def __init__(self, model: nn.Module, ranks: Ranks, shards: dist.ProcessGroup):
        super().__init__(model, ranks)
        self.shards = shards
        # Before torch 2.13 nothing resets a half-done backward: all workers start again instead.
        if not hasattr(model, "reset_iter_state"):
            ranks.policy = "never"
        self._ran = False
        model.register_forward_pre_hook(self._note_forward, prepend=True)

    def _note_forward(self, *_: object) -> None:
        self._ran = True

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Every micro-batch reduces its gradients into the shards, or only the last (`sync_every_micro_batch`)."""
        if not self.model.trainapp_syncs_every:
            self.model.set_requires_gradient_sync(last)
        self.model.set_is_last_backward(last)
        yield

    def give_up(self) -> None:
        """Both times needed: gradients of gathered parameters leak into the retry without the first (torch 2.13)."""
        super().give_up()
        self.model.zero_grad(set_to_none=True)
        if self._ran:  # FSDP2 makes what it resets in its first forward
            self.model.reset_iter_state()
        self.model.zero_grad(set_to_none=True)

    def share_buffers(self) -> None:
        """Buffers are replicated: rank 0's are everybody's."""
        with undisturbed():
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0)

    def norm(self, norm: torch.Tensor) -> torch.Tensor:
        """Over the ranks among which one copy of the model is sharded."""
        self.ranks.gate()
        squared = norm.square().to(self.ranks.device)  # shards may be kept on the host
        dist.all_reduce(squared, group=self.shards)
        return squared.sqrt().to(norm.device)

    def agree_on_overflow(self, found: list[torch.Tensor]) -> None:
        """Each rank has seen its own shards only."""
        self.ranks.gate()
        for flag in found:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)


def shard(
    model: nn.Module, blocks: list[nn.Module], ranks: Ranks, settings: config.Fsdp, compute: torch.dtype
) -> Sharded:
    """`fully_shard` on the blocks and the root, in place. To be called before the optimizer is made.

    compute: the dtype of gathered parameters. Raises UserError for settings that the ranks do not fit.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    replicas = settings.replicas
    if ranks.world % replicas:
        raise UserError(
            f"parallel.fsdp.replicas={replicas}: must divide the number of ranks, {ranks.world}; each replica is "
            "sharded over the same number of ranks"
        )
    kind = ranks.device.type
    mesh = init_device_mesh(kind, (replicas, ranks.world // replicas), mesh_dim_names=("replicate", "shard"))
    offload = CPUOffloadPolicy(pin_memory=kind == "cuda") if settings.cpu_offload else OffloadPolicy()
    reduced = torch.float32 if compute != torch.float32 else None
    policy = MixedPrecisionPolicy(param_dtype=compute if reduced else None, reduce_dtype=reduced)
    root = MixedPrecisionPolicy(
        param_dtype=policy.param_dtype, reduce_dtype=reduced, output_dtype=torch.float32 if reduced else None
    )
    options = {
        "mesh": mesh["shard"],
        "reshard_after_forward": settings.reshard_after_forward,
        "offload_policy": offload,
    }
    for block in blocks:
        fully_shard(block, mp_policy=policy, **options)
    fully_shard(model, mp_policy=root, **options)
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):  # not recursive: every module for itself
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            gather, reduce = _gated_collectives(ranks.gate)
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(reduce)
            if replicas > 1:
                module.set_all_reduce_hook(_gated_all_reduce(ranks.gate, mesh.get_group("replicate")))
    _prefetch(blocks, settings.prefetch)
    model.trainapp_syncs_every = settings.sync_every_micro_batch
    return Sharded(model, ranks, mesh.get_group("shard"))


def _gated_collectives(gate: Callable[[], None]):
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    class GatedAllGather(DefaultAllGather):
        def __call__(self, *args, **kwargs):
            gate()
            return super().__call__(*args, **kwargs)

    class GatedReduceScatter(DefaultReduceScatter):
        def __call__(self, *args, **kwargs):
            gate()
            return super().__call__(*args, **kwargs)

    return GatedAllGather(), GatedReduceScatter()


def _gated_all_reduce(gate: Callable[[], None], replicas: dist.ProcessGroup) -> Callable[[torch.Tensor], None]:
    """Between the copies of a model. FSDP2's own, for a mesh of two dimensions, cannot be gated."""

    def reduce(gradients: torch.Tensor) -> None:
        gate()
        dist.all_reduce(gradients, group=replicas)

    return reduce


def _prefetch(blocks: list[nn.Module], depth: int) -> None:
    """Gather `depth` blocks ahead: overlaps with computing, costs their memory. 1 is what FSDP2 does by itself."""
    if depth > 1:
        for position, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[position + 1 : position + 1 + depth])
            block.set_modules_to_backward_prefetch(blocks[max(0, position - depth) : position][::-1])


def _no_buffer_sync() -> dict[str, bool]:
    """The parameter has another name from torch 2.13 on."""
    takes = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in takes else "broadcast_buffers": False}
