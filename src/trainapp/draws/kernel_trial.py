"""Whether a kernel in Triton runs on a device: found out by a trial, and said once if it does not."""

import logging
from collections.abc import Callable

import torch

from trainapp.errors import summary_of
from trainapp.torch_private import outside_dispatch_modes

log = logging.getLogger(__name__)


def passes_trial(try_kernel: Callable[[torch.device], None], device: torch.device, consequence: str) -> bool:
    """Return whether a kernel runs on the device. If not, log why.

    Args:
        try_kernel: runs it, and raises an error if it cannot be built or is wrong.
        device: the device.
        consequence: what happens without it, with a `%s` for the reason.
    """
    try:
        with outside_dispatch_modes():
            try_kernel(device)
    except Exception as error:
        if "out of memory" in str(error):  # tells nothing of Triton, and may be recovered from
            raise
        log.warning(consequence, summary_of(error))
        return False
    return True
