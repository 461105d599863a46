"""The start of a step, to return to: random generators and module buffers."""

import torch
from torch import nn

from trainapp.rng import Generators
from trainapp.torch_private import buffers_of, foreach_copy_, non_persistent_buffers, version_of


class RestorePoint:
    """The start of a step: random generators and module buffers (BatchNorm's statistics and the like).

    Parameters and optimizer state are not in it: nothing before the commit touches them.
    """

    def __init__(self, model: nn.Module, device: torch.device):
        self.device = device
        found = [(m, name) for m in model.modules() for name, b in buffers_of(m).items() if b is not None]
        self._places = [(buffers_of(m), name) for m, name in found]
        # BatchNorm's kernels write its statistics without counting up their version: only what is no part of the
        # state (rotary tables, masks) may be judged by it.
        self._constant = [name in non_persistent_buffers(m) for m, name in found]
        self._buffers: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._generators = Generators(device)

    def take(self) -> None:
        """Remember this moment. Buffers outside the state dict are copied again only where their version has moved."""
        self._generators.take()
        buffers = [owner[name] for owner, name in self._places]
        same = len(self._buffers) == len(buffers) and all(a is b for a, b in zip(self._buffers, buffers, strict=True))
        if not same:
            self._copies = [b.detach().clone() for b in buffers]
        else:
            known = zip(buffers, self._copies, self._versions, self._constant, strict=True)
            moved = [
                (copy, buffer)
                for buffer, copy, version, constant in known
                if not constant or version_of(buffer) != version
            ]
            if moved:
                with torch.no_grad():
                    foreach_copy_(*map(list, zip(*moved, strict=True)))
        self._buffers, self._versions = buffers, list(map(version_of, buffers))

    @torch.no_grad()
    def restore(self) -> None:
        """Back to the moment of the last `take`."""
        self._generators.restore()
        self.restore_buffers()

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """The buffers alone, for a step that is left out for good."""
        for (owner, name), buffer, copy in zip(self._places, self._buffers, self._copies, strict=True):
            owner[name] = buffer
            buffer.copy_(copy)
