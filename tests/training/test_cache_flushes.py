"""A size for which the device's allocator has to free its cache in every step, without an error, counts as too large.

Played on the CPU: its memory counts a flush whenever more than SAMPLES_THAT_FIT samples run at once.
"""

import json

import helpers
import pytest
import runs
from torch import nn

from trainapp.memory.cpu import CpuMemory

SAMPLES_THAT_FIT = 9


class Net(nn.Module):
    """A linear classifier that notes the largest batch that it has seen in the current watched block."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, images):
        if self.training and len(images) > SAMPLES_THAT_FIT:
            FLUSHES.append(len(images))
        return self.head(images.flatten(1))


FLUSHES = []  # the samples of each micro-batch that was too large
NET = (*runs.own_model("test_cache_flushes.Net"), "user_packages=[test_cache_flushes]", "data=digits")
SETTINGS = (*NET, "batch.global_size=32", "oom.clean_steps=1", "train.max_steps=20", "every.eval=null")


@pytest.fixture
def flushes(monkeypatch):
    FLUSHES.clear()
    monkeypatch.setattr(CpuMemory, "cache_flushes", lambda self: len(FLUSHES))
    return FLUSHES


@pytest.mark.slow
def test_the_search_ends_below_it(tmp_path, flushes, monkeypatch):
    result = runs.run(tmp_path / "a", *SETTINGS)
    schedule = json.loads((tmp_path / "a/result.json").read_text())["micro_schedule"]
    sizes = list(schedule.values())
    assert sizes[0] == 32
    assert sizes[-1] == SAMPLES_THAT_FIT
    assert result.oom_restarts == 0
    assert flushes.count(32) == 2  # once may be chance

    # The schedule makes another run the same, without any flush.
    flushes_of_the_search = len(flushes)
    monkeypatch.setattr(CpuMemory, "cache_flushes", lambda self: flushes_of_the_search)
    replayed = {int(step): size for step, size in schedule.items()}
    runs.run(tmp_path / "b", *SETTINGS, f"batch.micro_schedule={replayed}")
    losses = [[line["loss"] for line in helpers.metrics(tmp_path / name)] for name in "ab"]
    assert losses[0] == losses[1]
