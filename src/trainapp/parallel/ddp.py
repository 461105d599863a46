"""DDP: a full copy of the model on every rank, gradients summed in buckets."""

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import TensorWeakRef

from trainapp.config.schema import Ddp
from trainapp.parallel.ranks import Ranks
from trainapp.parallel.strategy import Strategy, Task, TaskModule, compute_within, requires_grad_only
from trainapp.torch_private import DispatchMode, rebuild_buckets, storage_id


@dataclass
class Exchange:
    """The state of DDP's communication hook.

    Holds no reference to DDP: C++ holds the hook, and such a cycle would never be collected.
    """

    ranks: Ranks
    due: bool = True  # False in all but the last micro-batch
    has_reduced: bool = False  # since the buckets were last rebuilt

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """The sum of a bucket over ranks; the bucket itself if no exchange is due or the step is aborted."""
        self.has_reduced = True
        if not self.due or (self.ranks.votes_enabled and self.ranks.vote(False)):
            unchanged: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            unchanged.set_result(bucket.buffer())
            return unchanged
        buffer = bucket.buffer()

        def summed(done: Any) -> torch.Tensor:
            done.value()  # raises the exchange's error, if it had one
            return buffer

        return dist.all_reduce(buffer, async_op=True).get_future().then(summed)


class Buckets(DispatchMode):
    """While active, records the tensors that DDP allocates: its buckets belong to C++, which does not expose them."""

    def __init__(self) -> None:
        super().__init__()
        self._noted: dict[int, TensorWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self._noted.setdefault(storage_id(result.untyped_storage()), TensorWeakRef(result))
        return result

    def existing(self) -> Iterator[torch.Tensor]:
        """The buckets that still exist. One at a time: the caller must not keep them alive."""
        self._noted = {key: ref for key, ref in self._noted.items() if ref() is not None}
        for ref in self._noted.values():
            yield ref()


class DDP(Strategy):
    """torch's DistributedDataParallel, with a vote before each of its reductions.

    DDP cannot abandon a backward. After a vote to abort, the backward runs to its end with reductions that do nothing;
    then gradients are dropped and the model is rewrapped on every rank.

    updates: the parameters of each update, if a step has several. DDP waits for the gradients of all parameters that
    required them when it wrapped the model, so each update has its own wrapper and buckets.
    """

    forward: nn.parallel.DistributedDataParallel  # of the current update, as are `_buckets` and `_exchange`
    _buckets: Buckets

    def __init__(self, model: nn.Module, ranks: Ranks, settings: Ddp, updates: Sequence[list[nn.Parameter]] = ()):
        super().__init__(model, ranks)
        self.settings, self._updates, self.groups = settings, updates, (dist.group.WORLD,)
        self._task_module = TaskModule(model)
        self._trained = [p for p in model.parameters() if p.requires_grad]
        ranks.broadcast([*model.parameters(), *model.buffers()])
        self._of_update: dict[int, tuple[nn.parallel.DistributedDataParallel, Buckets, Exchange]] = {}
        for number in reversed(range(len(updates) or 1)):
            self._update, self._exchange = number, Exchange(ranks)
            self._wrap()

    def select_update(self, update: int) -> None:
        self._update = update
        self.forward, self._buckets, self._exchange = self._of_update[update]

    def _wrap(self) -> None:
        device = self.ranks.device
        self._buckets, self._exchange.has_reduced = Buckets(), False
        own = (
            requires_grad_only(self._updates[self._update], self._trained)
            if self._updates
            else contextlib.nullcontext()
        )
        with own, self._buckets:
            self.forward = nn.parallel.DistributedDataParallel(
                self._task_module,
                device_ids=[device.index] if device.type == "cuda" else None,
                bucket_cap_mb=self.settings.bucket_mb,
                static_graph=self.settings.static_graph,
                find_unused_parameters=self.settings.find_unused_parameters,
                gradient_as_bucket_view=True,
                init_sync=False,
            )
        # The strategy does it when it matters; DDP would in every forward. (torch 2.13 has renamed the parameter.)
        self.forward.broadcast_buffers = False
        self.forward.register_comm_hook(self._exchange, Exchange.reduce)
        self.forward.register_forward_pre_hook(lambda *_: self._before_forward())
        self._of_update[self._update] = self.forward, self._buckets, self._exchange

    def _before_forward(self) -> None:
        """Rebuild DDP's buckets, as its forward does after the first backward. A collective: vote before it.

        Done here rather than by DDP, so that the new buckets are recorded. Does nothing in later steps.
        """
        self.ranks.check_peers()
        if self._exchange.has_reduced and torch.is_grad_enabled():
            self._exchange.has_reduced = False
            with self.ranks.exchange_in_library(), self._buckets:
                rebuild_buckets(self.forward)

    def compute(self, task: Task, batch: Any) -> tuple[Any, ...]:
        return compute_within(self.forward, task, batch)

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        self._exchange.due = last
        # A static graph needs DDP's bookkeeping in every backward: only the hook skips the exchange then.
        with contextlib.nullcontext() if last or self.settings.static_graph else self.forward.no_sync():
            yield

    def abort_step(self) -> None:
        """Rewraps the model: about 3 ms for a toy model, once per failure."""
        super().abort_step()
        self.model.zero_grad(set_to_none=True)
        # The new wrapper's buckets are as large as the gradients: first free the old ones and the failed step's
        # reference cycles. Costs about 0.03 s.
        del self.forward, self._of_update[self._update]
        gc.collect()
        self._wrap()

    def communication_buffers(self) -> Iterator[torch.Tensor]:
        """The buckets of all updates. After a backward the gradients are views of them."""
        for _, buckets, _ in self._of_update.values():
            yield from buckets.existing()
