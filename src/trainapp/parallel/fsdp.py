"""FSDP2: parameters, gradients and optimizer state sharded over the ranks."""

import collections
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainapp.config.schema import Fsdp
from trainapp.errors import UserError
from trainapp.parallel.ranks import Ranks
from trainapp.parallel.strategy import Strategy, Task, TaskModule, compute_within
from trainapp.torch_private import (
    clear_gathered_gradients,
    fsdp_collectives,
    is_shard,
    prepare_fsdp,
    tree_map,
)


class FSDP(Strategy):
    """`fully_shard` on the blocks and on the task around the model, with a vote before each gather and reduction.

    All parameters outside the blocks are gathered while the task runs.

    Build it before the optimizer. compute_dtype: dtype of gathered parameters. Raises UserError if the number of ranks
    does not fit the settings, and for a weight that two blocks share.
    """

    forward_is_collective = True  # gathers parameters

    def __init__(
        self,
        model: nn.Module,
        blocks: list[nn.Module],
        ranks: Ranks,
        settings: Fsdp,
        compute_dtype: torch.dtype,
    ):
        # Late: it is slow to import.
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        super().__init__(model, ranks)
        self.settings = settings
        if ranks.world_size % settings.replicas:
            raise UserError(
                f"parallel.fsdp.replicas={settings.replicas}: must divide the number of ranks, {ranks.world_size}; "
                "each replica is sharded over the same number of ranks"
            )
        _require_ties_within_units(model, blocks)
        replicate_mesh, shard_mesh = ranks.meshes(settings.replicas)
        replicas = replicate_mesh.get_group() if settings.replicas > 1 else None
        self._shard_group = shard_mesh.get_group()
        options: dict[str, Any] = {"mesh": shard_mesh, "reshard_after_forward": settings.reshard_after_forward}
        if compute_dtype != torch.float32:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        if settings.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
        task_module = TaskModule(model)
        sharded = [fully_shard(block, **options) for block in blocks]
        self._root: Any = fully_shard(task_module, **options)  # an FSDPModule, mixed into the TaskModule
        self._sharded = [self._root, *sharded]
        self.recovers_in_place = hasattr(self._root, "reset_iter_state")  # from torch 2.13 on
        self.groups = (dist.group.WORLD, self._shard_group, replicas)
        _gate_collectives(task_module, ranks, replicas)
        depth = settings.prefetch  # FSDP2 itself gathers one block ahead; more overlap with compute, and cost memory
        for position, block in enumerate(sharded if depth > 1 else ()):
            block.set_modules_to_forward_prefetch(sharded[position + 1 : position + 1 + depth])
            block.set_modules_to_backward_prefetch(sharded[max(0, position - depth) : position][::-1])
        if compute_dtype != torch.float32:
            model.register_forward_hook(_as_fp32)  # the loss is summed in fp32

    def select_update(self, update: int) -> None:
        """Call while the parameters of all updates require gradients: FSDP2 reads that once, in its first forward."""
        prepare_fsdp(self._root)

    def compute(self, task: Task, batch: Any) -> tuple[Any, ...]:
        """Runs the task in the root's forward. Raises UserError if a block's parameter is read outside the block."""
        result: tuple[Any, ...] = ()
        try:
            result = compute_within(self._root, task, batch)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
        if result and not is_shard(result[0]):  # numbers mix with shards without an error
            return result
        raise UserError(
            "parallel=fsdp: the task or the model reads a parameter of one of the blocks outside the block's forward, "
            "where only a shard of it exists; use it in the block, keep the block out of blocks(), or use parallel=ddp"
        )

    def to_empty(self, device: torch.device) -> None:
        """Allocate the shards of a model that was built on the meta device."""
        self._root.to_empty(device=device)

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Reduces gradients into the shards in every micro-batch, or in the last (`sync_every_micro_batch=false`)."""
        if not self.settings.sync_every_micro_batch:
            self._root.set_requires_gradient_sync(last)
        self._root.set_is_last_backward(last)
        yield

    def finish_accumulation(self) -> None:
        """Also frees what an evaluation gathered and, with `reshard_after_forward=false`, kept: the next step would
        compute with it, even if it was the average of the weights.
        """
        super().finish_accumulation()
        for module in self._sharded:
            module.reshard()

    def abort_step(self) -> None:
        """Resets a half-done backward, and clears the gradients of sharded and of gathered parameters."""
        super().abort_step()
        prepare_fsdp(self._root)  # an error may precede the first forward, which creates what the reset needs
        self._root.reset_iter_state()
        clear_gathered_gradients(self._root)
        self.model.zero_grad(set_to_none=True)

    def grad_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """The norm over the ranks that share one copy of the model."""
        self.ranks.check_peers()
        squared = norm.square().to(self.ranks.device)  # shards may be on the host
        dist.all_reduce(squared, group=self._shard_group)
        return squared.sqrt().to(norm.device)

    def all_reduce_found_inf(self, found: list[torch.Tensor]) -> None:
        """Each rank has checked only its own shards."""
        self.ranks.check_peers()
        for flag in found:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)


def _require_ties_within_units(model: nn.Module, blocks: list[nn.Module]) -> None:
    """Raises UserError for a weight in two blocks, or in one and outside: each unit would shard its own copy."""
    units = []
    for unit in (model, *blocks):
        modules = set(unit.modules())
        others = {module for block in blocks if block in modules - {unit} for module in block.modules()}
        units.append({parameter for module in modules - others for parameter in module.parameters(recurse=False)})
    for parameter, count in collections.Counter(parameter for unit in units for parameter in unit).items():
        if count > 1:
            names = [name for name, own in model.named_parameters(remove_duplicate=False) if own is parameter]
            raise UserError(
                f"parallel=fsdp: {' and '.join(names)} are one weight, in a block and outside, or in several blocks, "
                "which are sharded one by one; leave such modules out of blocks(), untie them, or use parallel=ddp"
            )


def _as_fp32(model: nn.Module, inputs: Any, output: Any) -> Any:
    return tree_map(lambda t: t.float() if torch.is_tensor(t) and t.is_floating_point() else t, output)


def _gate_collectives(root: nn.Module, ranks: Ranks, replicas: dist.ProcessGroup | None) -> None:
    """Vote before every gather and reduction, and sum gradients instead of averaging them.

    replicas: the group of ranks that hold the same shard, if there is more than one copy of the model.
    """
    from torch.distributed.fsdp import FSDPModule

    def sum_over_replicas(gradients: torch.Tensor) -> None:
        # FSDP2's own reduction for a two-dimensional mesh cannot be gated.
        ranks.check_peers()
        dist.all_reduce(gradients, group=replicas)

    all_gather, reduce_scatter = fsdp_collectives()
    for module in root.modules():
        if isinstance(module, FSDPModule):  # these methods are not recursive
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_custom_all_gather(_gated(all_gather, ranks))
            module.set_custom_reduce_scatter(_gated(reduce_scatter, ranks))
            if replicas is not None:
                module.set_all_reduce_hook(sum_over_replicas)


def _gated(kind: type, ranks: Ranks) -> Any:
    """A collective of FSDP2 with a vote first; this also covers the buffer, which FSDP2 allocates before the call."""

    class Gated(kind):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with ranks.collective():
                return super().__call__(*args, **kwargs)

    return Gated()
