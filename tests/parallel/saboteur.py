"""Data and models that tests name in a configuration (`user_packages=[parallel]`).

Importing it in a worker of the real launcher arms the faults planned in $TRAINAPP_TEST_FAULTS.
"""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trainapp.data.sets.synthetic import SyntheticTokens

from . import faults


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


class FragileTokens(SyntheticTokens):
    """Rank 1's loader worker dies at its third batch, once: the marker file records it."""

    in_memory = False

    def __init__(self, split: str, seed: int = 0, marker: str = "", **options: Any):
        super().__init__(split, seed, **options)
        self.marker, self.batches = Path(marker), 0

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        self.batches += 1
        info = torch.utils.data.get_worker_info()
        if info is not None and self.batches == 3 and os.environ.get("RANK") == "1" and not self.marker.exists():
            self.marker.write_text("fired")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitems__(indices)


def _planned() -> list[faults.Fault]:
    return [faults.Fault(**fault) for fault in json.loads(os.environ[faults.ENVIRONMENT])["faults"]]


if faults.ENVIRONMENT in os.environ and "TORCHELASTIC_RUN_ID" in os.environ:
    ARMED = faults.injected(_planned(), Path(json.loads(os.environ[faults.ENVIRONMENT])["folder"]))
    ARMED.__enter__()  # until this process ends
