"""A user's mistake that shows in a loader process: the main process raises it with its message alone.

Torch 2.13 would put the worker's traceback before the message (torch/_utils.py, ExceptionWrapper).
"""

from typing import Any

from torch.utils.data import Dataset

from trainapp.errors import UserError


class UserErrorsReturned(Dataset):
    """The data set, returning a UserError instead of raising it; for workers."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __getitem__(self, request: Any) -> Any:
        try:
            return self.dataset[request]
        except UserError as error:
            return error


def raise_if_error(batch: Any) -> Any:
    """The batch that a worker has returned. Raises the UserError that it has returned instead."""
    if isinstance(batch, UserError):
        raise batch
    return batch
