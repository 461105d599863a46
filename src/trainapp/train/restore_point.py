"""The start of a step, to return to: random generators and module buffers."""

import torch
from torch import Tensor, nn

from trainapp.rng import Generators
from trainapp.torch_private import buffers_of, foreach_copy_, non_persistent_buffers, version_of


class RestorePoint:
    """Random generators and module buffers (BatchNorm's statistics and the like) at the start of a step.

    Parameters and optimizer state are not in it: nothing before the commit touches them.
    """

    def __init__(self, model: nn.Module, device: torch.device):
        self.device = device
        found = [(m, name) for m in model.modules() for name, b in buffers_of(m).items() if b is not None]
        self._places = [(buffers_of(m), name) for m, name in found]
        # BatchNorm's kernels write its statistics without increasing their version: it tells only of buffers that are
        # not in the state dict (rotary tables, masks).
        self._constant = [name in non_persistent_buffers(m) for m, name in found]
        self._buffers: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._versions: list[int] = []
        self._generators = Generators(device)

    def take(self) -> None:
        """Record the current state. Buffers outside the state dict are copied again only if their version has moved."""
        self._generators.take()
        buffers: list[Tensor] = [owner[name] for owner, name in self._places]  # type: ignore[misc]  # none is None
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
                    foreach_copy_([copy for copy, _ in moved], [buffer for _, buffer in moved])
        self._buffers, self._versions = buffers, list(map(version_of, buffers))

    @torch.no_grad()
    def restore(self) -> None:
        """Return to the last `take`."""
        self._generators.restore()
        self.restore_buffers()

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """The buffers alone, for a step that is skipped for good."""
        for (owner, name), buffer, copy in zip(self._places, self._buffers, self._copies, strict=True):
            owner[name] = buffer
            buffer.copy_(copy)
