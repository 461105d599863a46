"""What code asks of a device other than tensors: generators, and streams for copies to and from the host.

A plan for a device that is not here has a stand-in: `plan.cuda.place.NotHere`.
"""

import torch


class Accelerator:
    """A device of this machine. It is handed to what is assembled, so that nothing makes its own."""

    def generator(self, device: torch.device) -> torch.Generator:
        """A new random generator, for numbers on this device."""
        return torch.Generator(device)

    def has_streams(self, device_type: str) -> bool:
        """Whether copies overlap with the computation: on streams, from and to pinned memory."""
        return device_type == "cuda"


HERE = Accelerator()
