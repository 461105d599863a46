"""How the model is spread over the ranks: not at all, replicated (DDP), or in shards (FSDP2).

A strategy sums gradients over the ranks (it never averages them: the step divides by the true global count), and can
abort a step on all ranks without a trace of it.
"""

import contextlib

import torch
from torch import nn

from trainapp.parallel.ranks import Ranks


class SingleDevice:
    """One process. `forward` is what a task calls; `model` holds the parameters and their names."""

    forward_is_collective = False  # whether every rank must evaluate the same number of batches

    def __init__(self, model: nn.Module, ranks: Ranks):
        self.model, self.ranks = model, ranks
        self.forward: nn.Module = model
        self.evaluate: nn.Module = model

    @property
    def recovers_in_place(self) -> bool:
        """Whether `abort_step` works. Where it does not, all workers restart after an out-of-memory error."""
        return True

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Use around the forward and backward of a micro-batch. Gradients are exchanged in the last one."""
        return contextlib.nullcontext()

    def finish_accumulation(self) -> None:
        """Call after the last micro-batch. Raises PeerOutOfMemory if another rank aborted the step."""
        self.ranks.check_peers()

    def abort_step(self) -> None:
        """Leave no trace of a step that some rank could not finish. Call on every rank."""
        self.ranks.reset_votes()

    def broadcast_buffers(self) -> None:
        """Give every rank the buffers of rank 0, before evaluating and saving. Collective: call on every rank."""

    def grad_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """The norm of all gradients, from the norm of this rank's part of them. Collective."""
        return norm

    def all_reduce_found_inf(self, found: list[torch.Tensor]) -> None:
        """Turn an fp16 overflow on one rank into an overflow on all: the loss scaler's flags, in place. Collective."""
