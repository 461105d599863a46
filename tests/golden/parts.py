"""Parts of a user's own, beside the runs of `scenarios`: a loss, a metric, callbacks, a model that fails, a stream.

A run that uses one of them fails where the scenario says: see `faults.arm`.
"""

import os
import re
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import faults
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from trainapp.data.sets.digits import Digits
from trainapp.models.mlp import MLP

faults.arm()


# Losses


def smoothed(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int, dict[str, Any]]:
    """Cross-entropy with smoothed labels; the metrics get what they need by keyword."""
    logits, targets = model(batch["inputs"]), batch["targets"]
    loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=0.1)
    right = (logits.argmax(1) == targets).sum()
    return loss, len(targets), {"right": right, "*": {"logits": logits.detach(), "targets": targets}}


def mean(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int, dict[str, Any]]:
    """A mean instead of a sum, which is refused."""
    return F.cross_entropy(model(batch["inputs"]), batch["targets"]), len(batch["targets"]), {}


# A metric and callbacks


class Recall:
    """Of each of the first three digits: how many are found, and of how many."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.found, self.total = torch.zeros(3), torch.zeros(3)

    def update(self, logits: Tensor, targets: Tensor) -> None:
        for digit in range(3):
            of_digit = targets == digit
            self.total[digit] += of_digit.sum()
            self.found[digit] += (logits[of_digit].argmax(1) == digit).sum()

    def compute(self) -> dict[str, Tensor]:
        return {str(digit): self.found[digit] / self.total[digit] for digit in range(3)}

    def merge(self, other: "Recall") -> None:
        self.found += other.found
        self.total += other.total


class Norms:
    """The norm of all weights in every second step, and how many steps it has seen, which checkpoints hold."""

    def __init__(self) -> None:
        self.steps = 0

    def after_step(self, view: Any) -> None:
        self.steps += 1
        if view.step % 2 == 0:
            norm = torch.stack([p.norm() for p in view.model.parameters()]).norm()
            view.tracker.scalars({"norm": float(norm), "steps": self.steps}, view.step)

    def on_end(self, view: Any) -> None:
        view.tracker.note(f"{self.steps} steps seen, {view.samples} samples trained")

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class Stops:
    """Sends SIGTERM to the run with this name at this step, or to the sweep that has started it, once."""

    def __init__(self, step: int, run: str, is_for_sweep: bool = False):
        self.step, self.run, self.is_for_sweep = step, run, is_for_sweep

    def after_step(self, view: Any) -> None:
        marker = view.run_dir / "has_stopped"
        if view.step != self.step or view.run_dir.name != self.run or marker.exists():
            return
        marker.touch()
        os.kill(_sweep_of(view.run_dir) if self.is_for_sweep else os.getpid(), signal.SIGTERM)
        until = time.monotonic() + 60
        while not view.is_stopping():
            assert time.monotonic() < until, "the signal has not come"
            time.sleep(0.01)
        time.sleep(0.2)  # for the thread that says so


def _sweep_of(run_dir: Path) -> int:
    """Return the number of the sweep's process, which is the parent, unless that has ended: then it may be any."""
    holder = re.search(r"process (\d+) ", (run_dir.parent / "run.lock").read_text())
    assert holder is not None
    assert int(holder[1]) == os.getppid()
    return os.getppid()


# Models and data


class Fragile(MLP):
    """Fails with a width of 5."""

    def forward(self, images: Tensor) -> Tensor:
        if self.head.in_features == 5 and not Path("mended").exists():
            raise TypeError("five is too many")
        return super().forward(images)


class Numbered(IterableDataset):
    """A stream of digits that says where it is."""

    task = "classification"

    def __init__(self, split: str, samples: int = 50, val_samples: int = 20):
        self.digits = Digits(split)
        self.spec = self.digits.spec
        self.samples = samples if split == "train" else val_samples
        self.position = self.start = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.position, self.start = self.start, 0
        while self.position < self.samples:
            self.position += 1
            yield self.digits[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["position"]
