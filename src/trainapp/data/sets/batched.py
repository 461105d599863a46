"""The base of the built-in data sets: it fetches whole batches, and a single sample as a batch of one."""

from collections.abc import Sequence

import numpy as np
import torch


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
    """Windows of tokens: inputs int64 [B, T], targets the same shifted by one. Derived classes set `_windows`, integers
    [N, T + 1].
    """

    _windows: np.ndarray

    def __len__(self) -> int:
        return len(self._windows)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """The batch of these windows, collated. Raises IndexError for an index outside the data."""
        windows = self._windows[self._positions(indices)].astype(np.int64)
        return {
            "inputs": torch.from_numpy(windows[:, :-1].copy()),
            "targets": torch.from_numpy(windows[:, 1:].copy()),
        }
