"""FSDP2: parameters, gradients and optimizer state sharded over the ranks."""

import collections
import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from trainapp.config.schema import Fsdp
from trainapp.errors import UserError
from trainapp.parallel.ranks import Ranks
from trainapp.parallel.strategy import CALLS_BACKWARD, Strategy, Task, TaskModule, compute_within
from trainapp.torch_private import (
    SET_DATA,
    clear_gathered_gradients,
    fsdp_collectives,
    has_gathered_gradients,
    is_in_forward,
    is_shard,
    prepare_fsdp,
    tree_map,
    written_gathered_parameters,
)
from trainapp.units import listed


class FSDP(Strategy):
    """`fully_shard` on the blocks and on the task around the model, with a vote before each gather and reduction.

    All parameters outside the blocks are gathered while the task runs. Build it before the optimizer.

    Args:
        model: built, on the device or on the meta device.
        blocks: those of its modules that are gathered one at a time.
        ranks: those that train it.
        settings: `parallel.fsdp`.
        compute_dtype: dtype of gathered parameters.

    Raises UserError if the number of ranks does not fit the settings, and for a weight that two blocks share.
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
        from torch.distributed.fsdp import fully_shard

        super().__init__(model, ranks)
        self.settings = settings
        if ranks.world_size % settings.replicas:
            raise UserError(
                f"parallel.fsdp.replicas={settings.replicas}: must divide the number of ranks, {ranks.world_size}; "
                "each replica is sharded over the same number of ranks"
            )
        _require_ties_within_units(model, blocks)

        # Groups: one shards a copy of the model, the other sums the gradients of the copies.
        replicate_mesh, shard_mesh = ranks.meshes(settings.replicas)
        replica_group = None
        if settings.replicas > 1:
            replica_group = replicate_mesh.get_group()
        self._shard_group = shard_mesh.get_group()
        self.groups = (dist.group.WORLD, self._shard_group, replica_group)

        # Units: each block, then the task around the model with all other parameters
        options = _shard_options(shard_mesh, settings, compute_dtype, ranks.device)
        sharded_blocks = [fully_shard(block, **options) for block in blocks]
        task_module = TaskModule(model)
        self._root: Any = fully_shard(task_module, **options)  # an FSDPModule, mixed into the TaskModule
        self._units = [self._root, *sharded_blocks]

        # The current micro-batch
        self._has_inner_backward = False  # whether its task has called autograd
        self._reduces = True  # whether its backward reduces gradients
        self._holds_sums = False  # whether gathered parameters hold unreduced gradients of earlier ones

        self.recovers_in_place = hasattr(self._root, "reset_iter_state")  # from torch 2.13 on

        # What happens around each unit's forward and backward
        _gate_collectives(task_module, ranks, replica_group)
        if settings.prefetch > 1:
            _prefetch(sharded_blocks, settings.prefetch)
        if compute_dtype != torch.float32:
            model.register_forward_hook(_as_fp32)  # the loss is summed in fp32

    def select_update(self, update: int) -> None:
        """Call while the parameters of all updates require gradients: FSDP2 reads that once, in its first forward."""
        prepare_fsdp(self._root)

    def compute(self, task: Task, batch: Any) -> tuple[Any, ...]:
        """Run the task in the root's forward. Raises UserError if a block's parameter is read outside the block.

        A backward inside the task, as of a gradient penalty, neither shards parameters nor sums gradients over ranks.
        The loss's backward then shards none either: it needs the weights of a block before it has reached the block,
        and after it has passed it.
        """
        self._has_inner_backward = False
        self._set_backward(reshards=False, reduces=False)
        try:
            result = compute_within(self._root, functools.partial(self._run_task, task), batch)
            reads_shards = is_shard(result[0])  # numbers mix with shards without an error
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            reads_shards = True
        finally:
            self._set_backward(reshards=not self._has_inner_backward, reduces=self._reduces)
        if self._has_inner_backward and not torch.is_grad_enabled():
            self._reshard()
        if not reads_shards:
            return result
        raise UserError(
            "parallel=fsdp: the task or the model reads a parameter of one of the blocks outside the block's forward, "
            "where only a shard of it exists; use it in the block, keep the block out of blocks(), or use parallel=ddp"
        )

    def _run_task(self, task: Task, model: nn.Module, batch: Any) -> tuple[Any, ...]:
        """Run the task, which may call autograd. Raises UserError if it gives parameters gradients in training."""
        result = task(model, batch)
        if is_in_forward(self._root):
            return result

        self._has_inner_backward = True
        if not torch.is_grad_enabled():
            clear_gathered_gradients(self._root)
        elif not self._holds_sums and has_gathered_gradients(self._root):
            raise UserError(CALLS_BACKWARD)
        else:
            for unit in self._units:
                unit.unshard()
        return result

    def _set_backward(self, reshards: bool, reduces: bool) -> None:
        """Set whether a backward frees the parameters of the units that it has passed, and reduces their gradients."""
        for unit in self._units:
            unit.set_reshard_after_backward(reshards, recurse=False)
            unit.set_requires_gradient_sync(reduces, recurse=False)

    def to_empty(self, device: torch.device) -> None:
        """Allocate the shards of a model that was built on the meta device."""
        self._root.to_empty(device=device)

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Reduce gradients into the shards in every micro-batch, or in the last (`sync_every_micro_batch=false`).

        Raises UserError if some have come too late, because of a backward inside the task.
        """
        self._reduces = last or self.settings.sync_every_micro_batch
        self._root.set_is_last_backward(last)
        yield
        self._holds_sums = not self._reduces
        if self._has_inner_backward and self._reduces and has_gathered_gradients(self._root):
            raise UserError(
                "parallel=fsdp: the task or the model calls autograd itself, and gradients have reached a block after "
                "those of the block were summed over the ranks; call the model for the inner gradients last, use its "
                "output in the loss, or use parallel=ddp"
            )

    def finish_accumulation(self) -> None:
        """Also free what an evaluation gathered and, with `reshard_after_forward=false`, kept: the next step would
        compute with it, even if it was the average of the weights.

        Raises UserError for a forward that writes parameters outside a unit of their own: it has written their gathered
        copies, which are dropped.
        """
        super().finish_accumulation()
        written = written_gathered_parameters(self._root)
        if written:
            names = listed([name.removeprefix("model.") for name in written])
            raise UserError(
                f"parallel=fsdp: the forward writes {names}, of which it has gathered copies, so that the writes are "
                "lost; return their module from the model's blocks(), write them before training or in a callback, or "
                "use parallel=ddp"
            )
        self._reshard()

    def _reshard(self) -> None:
        """Free all gathered parameters."""
        for unit in self._units:
            unit.reshard()

    def checked_update(self) -> contextlib.AbstractContextManager[Any]:
        return _RefusedAssignment()

    def abort_step(self) -> None:
        """Reset a half-done backward, and clear the gradients of sharded and of gathered parameters."""
        super().abort_step()
        prepare_fsdp(self._root)  # an error may precede the first forward, which creates what the reset needs
        self._root.reset_iter_state()
        self._reduces = True
        self._holds_sums = False
        clear_gathered_gradients(self._root)
        self.model.zero_grad(set_to_none=True)

    def grad_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """Return the norm over the ranks that share one copy of the model."""
        self.ranks.check_peers()
        sum_of_squares = norm.square().to(self.ranks.device)  # shards may be on the host
        dist.all_reduce(sum_of_squares, group=self._shard_group)
        return sum_of_squares.sqrt().to(norm.device)

    def all_reduce_found_inf(self, flags: list[torch.Tensor]) -> None:
        """Take the maximum of each flag: every rank has checked only its own shards."""
        self.ranks.check_peers()
        for flag in flags:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)


class _RefusedAssignment(TorchFunctionMode):
    """Raises UserError where an optimizer assigns to the `data` of a shard: FSDP2 keeps the memory that it had, so that
    the next forward computes with the old values.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == SET_DATA and is_shard(args[0]):
            raise UserError(
                "parallel=fsdp: the optimizer's step assigns to a parameter's `data`, which does not change the shard "
                "that the forward gathers, so that the update would be lost; write in place (parameter.copy_(value) "
                "under torch.no_grad()), or use parallel=ddp"
            )
        return func(*args, **(kwargs or {}))


def _require_ties_within_units(model: nn.Module, blocks: list[nn.Module]) -> None:
    """Raise UserError for a weight in two blocks, or in one and outside: each unit would shard its own copy."""
    unit_count: collections.Counter[nn.Parameter] = collections.Counter()
    for unit in (model, *blocks):
        unit_count.update(_parameters_of_unit(unit, blocks))

    for shared, count in unit_count.items():
        if count > 1:
            parameters = model.named_parameters(remove_duplicate=False)
            names = [name for name, parameter in parameters if parameter is shared]
            raise UserError(
                f"parallel=fsdp: {' and '.join(names)} are one weight, in a block and outside, or in several blocks, "
                "which are sharded one by one; leave such modules out of blocks(), untie them, or use parallel=ddp"
            )


def _parameters_of_unit(unit: nn.Module, blocks: list[nn.Module]) -> set[nn.Parameter]:
    """Return the parameters below a block or the model, without those of blocks inside it."""
    modules = set(unit.modules())
    modules_of_inner_blocks: set[nn.Module] = set()
    for block in blocks:
        if block is not unit and block in modules:
            modules_of_inner_blocks.update(block.modules())
    parameters: set[nn.Parameter] = set()
    for module in modules - modules_of_inner_blocks:
        parameters.update(module.parameters(recurse=False))
    return parameters


def _shard_options(
    mesh: DeviceMesh, settings: Fsdp, compute_dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Return the arguments of `fully_shard` for every unit."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": settings.reshard_after_forward}
    if compute_dtype != torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    if settings.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    return options


def _prefetch(blocks: list[Any], depth: int) -> None:
    """Gather `depth` blocks ahead. FSDP2 itself gathers one; more overlap with compute, and cost memory."""
    for position, block in enumerate(blocks):
        # In the forward, the blocks after it.
        following = position + 1
        next_blocks = blocks[following : following + depth]
        block.set_modules_to_forward_prefetch(next_blocks)

        # In the backward those before it, the nearest first.
        first = max(0, position - depth)
        previous_blocks = blocks[first:position]
        previous_blocks.reverse()
        block.set_modules_to_backward_prefetch(previous_blocks)


def _as_fp32(model: nn.Module, inputs: Any, output: Any) -> Any:
    """A forward hook: return the output with its floating-point tensors in fp32."""

    def convert(value: Any) -> Any:
        if torch.is_tensor(value) and value.is_floating_point():
            return value.float()
        return value

    return tree_map(convert, output)


def _gate_collectives(root: nn.Module, ranks: Ranks, replica_group: dist.ProcessGroup | None) -> None:
    """Vote before every gather and reduction, and sum gradients instead of averaging them.

    Args:
        root: with all units below it.
        ranks: those that vote.
        replica_group: the ranks that hold the same shard, if there is more than one copy of the model.
    """
    from torch.distributed.fsdp import FSDPModule

    def sum_over_replicas(gradients: torch.Tensor) -> None:
        # FSDP2's own reduction for a two-dimensional mesh cannot be gated.
        ranks.check_peers()
        dist.all_reduce(gradients, group=replica_group)

    all_gather, reduce_scatter = fsdp_collectives()
    for module in root.modules():
        if isinstance(module, FSDPModule):  # these methods are not recursive
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_custom_all_gather(_gated(all_gather, ranks))
            module.set_custom_reduce_scatter(_gated(reduce_scatter, ranks))
            if replica_group is not None:
                module.set_all_reduce_hook(sum_over_replicas)


def _gated(kind: type, ranks: Ranks) -> Any:
    """Return a collective of FSDP2 with a vote first.

    The vote also covers the buffer, which FSDP2 allocates before the call.

    Args:
        kind: the class of the collective.
        ranks: those that vote.
    """

    class Gated(kind):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with ranks.collective():
                return super().__call__(*args, **kwargs)

    return Gated()
