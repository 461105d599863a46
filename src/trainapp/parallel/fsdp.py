"""FSDP2: parameters, gradients and optimizer state in shards over the ranks."""

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from trainapp.config import schema
from trainapp.errors import UserError
from trainapp.parallel.ranks import DistributedRanks, undisturbed
from trainapp.parallel.strategy import SingleDevice


class FSDP(SingleDevice):
    """FSDP2: parameters, gradients and optimizer state in shards; every gather and reduction gated by a vote.

    The votes sit in `__call__` of custom collectives: `allocate` runs before it, so that a buffer that does not fit is
    covered, too.
    """

    forward_is_collective = True

    def __init__(self, model: nn.Module, ranks: DistributedRanks, shards: dist.ProcessGroup):
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

    def abort_step(self) -> None:
        """Both times needed: gradients of gathered parameters leak into the retry without the first (torch 2.13)."""
        super().abort_step()
        self.model.zero_grad(set_to_none=True)
        if self._ran:  # FSDP2 makes what it resets in its first forward
            self.model.reset_iter_state()
        self.model.zero_grad(set_to_none=True)

    def broadcast_buffers(self) -> None:
        """Buffers are replicated: rank 0's are everybody's."""
        with undisturbed():
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0)

    def grad_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """Over the ranks among which one copy of the model is sharded."""
        self.ranks.check_peers()
        squared = norm.square().to(self.ranks.device)  # shards may be kept on the host
        dist.all_reduce(squared, group=self.shards)
        return squared.sqrt().to(norm.device)

    def all_reduce_found_inf(self, found: list[torch.Tensor]) -> None:
        """Each rank has seen its own shards only."""
        self.ranks.check_peers()
        for flag in found:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)


def shard(
    model: nn.Module, blocks: list[nn.Module], ranks: DistributedRanks, settings: schema.Fsdp, compute: torch.dtype
) -> FSDP:
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
            gather, reduce = _gated_collectives(ranks.check_peers)
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(reduce)
            if replicas > 1:
                module.set_all_reduce_hook(_gated_all_reduce(ranks.check_peers, mesh.get_group("replicate")))
    _prefetch(blocks, settings.prefetch)
    model.trainapp_syncs_every = settings.sync_every_micro_batch
    return FSDP(model, ranks, mesh.get_group("shard"))


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
