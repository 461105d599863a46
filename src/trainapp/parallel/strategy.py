"""How the model is spread over the ranks: not at all, replicated (DDP), or in shards (FSDP2).

Each strategy sums gradients over the ranks (it never averages: the loop divides by the true global count), lets a
step be given up on all ranks, and knows how to leave no trace of it.
"""

import contextlib

import torch
from torch import nn

from trainapp.parallel.ranks import SingleRank


class SingleDevice:
    """One process. `forward` is what a task calls; `model` keeps the parameters and their names."""

    forward_is_collective = False  # whether evaluation needs as many forwards on every rank

    def __init__(self, model: nn.Module, ranks: SingleRank):
        self.model, self.ranks = model, ranks
        self.forward: nn.Module = model
        self.evaluate: nn.Module = model

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager:
        """Around forward and backward of a micro-batch; gradients are exchanged in the last one."""
        return contextlib.nullcontext()

    def abort_step(self) -> None:
        """After a step that some rank could not finish, on every rank: nothing of it is left."""
        self.ranks.reset_votes()

    def finish_accumulation(self) -> None:
        """After the last micro-batch. Raises PeerOutOfMemory when another rank did not get there."""
        self.ranks.check_peers()

    def broadcast_buffers(self) -> None:
        """Before evaluating and saving: every rank has the same statistics."""

    def grad_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """The norm of all gradients, from that of this rank's part of them."""
        return norm

    def all_reduce_found_inf(self, found: list[torch.Tensor]) -> None:
        """fp16: an overflow on one rank is one on all."""
