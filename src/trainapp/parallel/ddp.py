"""DDP: a full copy of the model on every rank, gradients summed in buckets."""

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import TensorWeakRef

from trainapp.config.schema import Ddp
from trainapp.errors import UserError
from trainapp.parallel.ranks import Ranks
from trainapp.parallel.strategy import Strategy, Task, TaskModule, compute_within, requires_grad_only
from trainapp.torch_private import DispatchMode, rebuild_buckets, storage_id
from trainapp.units import listed


@dataclass
class Exchange:
    """The state of DDP's communication hook.

    Holds no reference to DDP: C++ holds the hook, and such a cycle would never be collected.
    """

    ranks: Ranks
    due: bool = True  # False in all but the last micro-batch
    has_reduced: bool = False  # since the buckets were last rebuilt
    is_complete: bool = False  # whether this backward has handed over all buckets

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """Return the sum of a bucket over ranks; the bucket itself if no exchange is due or the step is aborted."""
        self.has_reduced = True
        self.is_complete = bucket.is_last()  # they come in order
        buffer = bucket.buffer()

        # Not now, or not any more: DDP takes the bucket as its own sum.
        is_aborted = self.due and self.ranks.votes_enabled and self.ranks.vote(False)
        if not self.due or is_aborted:
            unchanged: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            unchanged.set_result(buffer)
            return unchanged

        def take_sum(exchange: Any) -> torch.Tensor:
            exchange.value()  # raises its error, if it had one
            return buffer

        work = dist.all_reduce(buffer, async_op=True)
        return work.get_future().then(take_sum)


class Buckets(DispatchMode):
    """The tensors that DDP allocates while this mode is active.

    These are its buckets, which belong to C++; it does not expose them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._by_storage: dict[int, TensorWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            key = storage_id(result.untyped_storage())
            self._by_storage.setdefault(key, TensorWeakRef(result))
        return result

    def existing(self) -> Iterator[torch.Tensor]:
        """Yield the buckets that still exist. One at a time: the caller must not keep them alive."""
        self._by_storage = {key: reference for key, reference in self._by_storage.items() if reference() is not None}
        for reference in self._by_storage.values():
            yield reference()


@dataclass
class Wrapper:
    """The model as DDP trains one update of it."""

    module: nn.parallel.DistributedDataParallel
    buckets: Buckets
    exchange: Exchange


class DDP(Strategy):
    """torch's DistributedDataParallel, with a vote before each of its reductions.

    DDP cannot abandon a backward. After a vote to abort, the backward runs to its end with reductions that do nothing;
    then gradients are dropped and the model is rewrapped on every rank.

    DDP waits for the gradients of all parameters that required them when it wrapped the model, so each update has its
    own wrapper and buckets.

    Args:
        model: built and initialised.
        ranks: those that train it.
        settings: `parallel.ddp`.
        updates: the parameters of each update, if a step has several.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, settings: Ddp, updates: Sequence[list[nn.Parameter]] = ()):
        super().__init__(model, ranks)
        self.settings = settings
        self.groups = (dist.group.WORLD,)
        self._parameters_by_update = updates
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._task_module = TaskModule(model)

        # All ranks begin with the model of rank 0; `init_sync` of the wrappers would repeat this for each.
        ranks.broadcast([*model.parameters(), *model.buffers()])

        self._update = 0  # the current one
        self._wrappers: dict[int, Wrapper] = {}  # by update
        for update in range(len(updates) or 1):
            self._wrappers[update] = self._wrap(update)

    @property
    def _wrapper(self) -> Wrapper:
        """The wrapper of the current update."""
        return self._wrappers[self._update]

    def select_update(self, update: int) -> None:
        self._update = update

    def _wrap(self, update: int) -> Wrapper:
        """Wrap the model for one update, in new buckets."""
        device = self.ranks.device
        buckets = Buckets()
        exchange = Exchange(self.ranks)

        # DDP allocates its buckets as it is built.
        with self._only_parameters_of(update), buckets:
            module = nn.parallel.DistributedDataParallel(
                self._task_module,
                device_ids=[device.index] if device.type == "cuda" else None,
                bucket_cap_mb=self.settings.bucket_mb,
                static_graph=self.settings.static_graph,
                find_unused_parameters=self.settings.find_unused_parameters,
                gradient_as_bucket_view=True,
                init_sync=False,
            )

        # The strategy does it when it matters; DDP would in every forward. (torch 2.13 has renamed the parameter.)
        module.broadcast_buffers = False
        module.register_comm_hook(exchange, Exchange.reduce)
        module.register_forward_pre_hook(lambda *_: self._before_forward())
        return Wrapper(module, buckets, exchange)

    def _only_parameters_of(self, update: int) -> contextlib.AbstractContextManager[None]:
        """Let DDP wait for the gradients of this update's parameters only."""
        if not self._parameters_by_update:
            return contextlib.nullcontext()
        return requires_grad_only(self._parameters_by_update[update], self._trained)

    def _before_forward(self) -> None:
        """Rebuild DDP's buckets, as its forward does after the first backward. A collective: vote before it.

        Done here rather than by DDP, so that the new buckets are recorded. Does nothing in later steps.
        """
        self.ranks.check_peers()
        wrapper = self._wrapper
        if wrapper.exchange.has_reduced and torch.is_grad_enabled():
            wrapper.exchange.has_reduced = False
            with self.ranks.exchange_in_library(), wrapper.buckets:
                rebuild_buckets(wrapper.module)

    def compute(self, task: Task, batch: Any) -> tuple[Any, ...]:
        return compute_within(self._wrapper.module, task, batch)

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        wrapper = self._wrapper
        wrapper.exchange.due = last
        wrapper.exchange.is_complete = False
        # A static graph needs DDP's bookkeeping in every backward: only the hook skips the exchange then.
        if last or self.settings.static_graph:
            yield
        else:
            with wrapper.module.no_sync():
                yield
        if last and not wrapper.exchange.is_complete:
            self._refuse_unused_parameters()

    def _refuse_unused_parameters(self) -> NoReturn:
        """Raise UserError: the backward has ended, and DDP still waits for the gradients of some parameters. Those that
        share a bucket with them are not summed. DDP itself would say so in the next forward, after the update.
        """
        trained = set(self._trained)
        if self._parameters_by_update:
            trained &= set(self._parameters_by_update[self._update])
        unused = [name for name, p in self.model.named_parameters() if p in trained and p.grad is None]
        names = listed(unused) if unused else "some parameters, in a step's last micro-batch"
        raise UserError(
            f"parallel.ddp.find_unused_parameters=false: the loss does not depend on {names}, so that DDP waits for "
            "their gradients; set parallel.ddp.find_unused_parameters=true, or exclude them from training by "
            "model.freeze"
        )

    def abort_step(self) -> None:
        """Rewrap the model: about 3 ms for a toy model, once per failure."""
        super().abort_step()
        self.model.zero_grad(set_to_none=True)

        # The new wrapper's buckets are as large as the gradients: first free the old ones and the failed step's
        # reference cycles. Costs about 0.03 s.
        del self._wrappers[self._update]
        gc.collect()
        self._wrappers[self._update] = self._wrap(self._update)

    def communication_buffers(self) -> Iterator[torch.Tensor]:
        """Yield the buckets of all updates. After a backward the gradients are views of them."""
        for wrapper in self._wrappers.values():
            yield from wrapper.buckets.existing()
