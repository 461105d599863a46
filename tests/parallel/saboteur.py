"""Data and models that tests name in a configuration (`user_packages=[parallel]`).

Importing it in a worker of the real launcher arms the faults planned in $TRAINAPP_TEST_FAULTS.
"""

import os
from collections.abc import Sequence
from typing import Any

import faults
import torch

from trainapp.data.sets.synthetic import SyntheticTokens


class MaskedTokens(SyntheticTokens):
    """Every `every`-th sequence has no targets at all."""

    def __init__(self, split: str, seed: int = 0, every: int = 3, **options: Any):
        super().__init__(split, seed, **options)
        self.every = every

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        batch = super().__getitems__(indices)
        nothing = torch.tensor([index % self.every == 0 for index in indices])
        batch["targets"] = batch["targets"].masked_fill(nothing[:, None], -100)
        return batch


if "TORCHELASTIC_RUN_ID" in os.environ:
    faults.arm()
