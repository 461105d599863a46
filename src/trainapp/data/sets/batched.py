"""The base of the built-in data sets: it fetches whole batches, and a single sample as a batch of one."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view


class BatchedDataset(torch.utils.data.Dataset):
    """Derived classes write `__len__` and `__getitems__`, which returns a batch that is already collated."""

    # Fetching is so cheap that loader workers would only add overhead.
    in_memory = True

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One sample, without the batch dimension. Raises IndexError beyond the data."""
        return {key: value[0] for key, value in self.__getitems__([index]).items()}

    def _positions(self, indices: Sequence[int]) -> np.ndarray:
        """`indices` as int64 [B]. Raises IndexError for one that is not in [0, len(self)).

        Negative indices are refused: a sample's random numbers depend on its index, so it must have only one.
        """
        positions = np.asarray(indices, dtype=np.int64)
        # Viewed as unsigned, a negative index is huge: one comparison catches both kinds.
        if positions.size and positions.view(np.uint64).max() >= len(self):
            raise IndexError(f"sample indices must lie in [0, {len(self)}), got {list(indices)}")
        return positions


class Windows(BatchedDataset):
    """Windows of tokens: inputs int64 [B, context_length], targets the same shifted by one.

    tokens: integers [N], of which nothing is copied: the last target of a window is the first input of the next. Those
    that fill no window of `context_length` + 1 are left out.
    """

    task = "next_token"

    def __init__(self, tokens: np.ndarray, context_length: int, vocab_size: int):
        self.spec: dict[str, Any] = {"vocab_size": vocab_size, "context_length": context_length}
        needed = context_length + 1
        if len(tokens) < needed:
            self._windows = np.empty((0, needed), tokens.dtype)
        else:
            self._windows = sliding_window_view(tokens, needed)[::context_length]

    def __len__(self) -> int:
        return len(self._windows)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """The batch of these windows, collated. Raises IndexError for an index outside the data."""
        windows = torch.from_numpy(self._windows[self._positions(indices)].astype(np.int64))
        return {"inputs": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}
