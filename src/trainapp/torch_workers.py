"""The private part of torch's data loader that the program uses: whether a process knows that it is a worker.

As `torch_private.py`: used on torch 2.11 and 2.13, and tested by `tests/test_torch_private.py`.
"""

from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker


def is_loader_worker() -> bool:
    """Whether `get_worker_info` says that this process is a loader's worker."""
    return get_worker_info() is not None


def become_main_process() -> None:
    """Let `get_worker_info` return None from now on, as in the main process.

    A stream that asks for its worker reads a part of what it is given; Hugging Face's also shuffles otherwise in one
    worker than in none. The program has divided the stream already, and its order must not depend on processes.
    """
    worker._worker_info = None
