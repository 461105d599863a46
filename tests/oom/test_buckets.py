"""Inputs of several shapes: a size too large for one shape does not shrink the others. Texts: test_replay.py."""

import logging
import textwrap

import pytest
import torch
from runs import weights

from .conftest import tiny
from .inject import Recorded

pytestmark = pytest.mark.usefixtures("without_pictures")


IMAGES = textwrap.dedent('''
    """Images of several sizes, and a network that takes any."""

    import torch
    from torch import nn


    class Images:
        """Each batch has one size: `sizes` in turn, by the first sample's index."""

        task = "classification"
        in_memory = True
        spec = {"num_classes": 4}

        def __init__(self, split, size: int = 64, seed: int = 0):
            self.size = size

        def __len__(self):
            return self.size

        def __getitems__(self, indices):
            side = 32 if 0 in indices else 8
            generator = torch.Generator().manual_seed(indices[0])
            images = torch.randn(len(indices), 1, side, side, generator=generator)
            return {"inputs": images, "targets": torch.tensor(indices) % 4}

        def split(self, batch, start, end):
            """Other images would be drawn for the samples on their own: the size is that of the whole batch."""
            return {name: tensor[start:end] for name, tensor in batch.items()}


    class Network(nn.Module):
        def __init__(self, num_classes: int):
            super().__init__()
            self.first, self.last = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(8, num_classes)

        def forward(self, inputs):
            return self.last(self.first(inputs).relu().mean((2, 3)))
''')


LIMIT = 400_000
OVERRIDES = (
    "model=mlp",
    "~model.width",
    "~model.depth",
    "~model.dropout",
    "model._target_=several_sizes.Network",
    "data=digits",
    "~data.augment",
    "data._target_=several_sizes.Images",
    "user_packages=[several_sizes]",
    "train.ema=null",
    "train.max_steps=16",
    "every.log=null",
)
AUTO = {"batch.micro_size": "auto"}


@pytest.fixture
def several_sizes(tmp_path, monkeypatch):
    (tmp_path / "several_sizes.py").write_text(IMAGES)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.slow
@pytest.mark.usefixtures("several_sizes")
def test_each_shape_has_its_size_and_a_schedule_replays_them(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    changes = {**AUTO, "memory.limit": LIMIT, "oom.grow": True, "train.max_steps": 40}
    recorded = Recorded(tiny(tmp_path / "a", *OVERRIDES, changes=changes))
    assert recorded.failures
    assert recorded.run.memory.peak <= LIMIT
    for epoch in range(10):
        assert sorted(i for _, e, indices in recorded.fetched if e == epoch for i in indices) == list(range(64))
    searches = recorded.run.sizes.train.searches
    assert set(searches) == {128, 2048}  # 64 and 1024 pixels plus a target, rounded up to a power of two
    assert (searches[128].size, searches[128].fails) == (16, None)
    size = searches[2048].size
    assert size < 16
    tried = [text for text in caplog.messages if "tries a larger" in text]
    assert tried
    assert all(text.endswith(" for up to 2048 elements per sample") for text in tried)
    ended = [text.partition(" with ")[2] for text in caplog.messages if "the search ended" in text]
    assert ended == [f"micro-batch 16 for up to 128 elements per sample, {size} for up to 2048 elements per sample"]

    plan, steps = recorded.run.sizes.micro_schedule(), {**AUTO, "train.max_steps": 40}
    assert any(isinstance(sizes, dict) for sizes in plan.values())
    again = Recorded(tiny(tmp_path / "b", *OVERRIDES, schedule=plan, changes=steps))
    assert again.failures == []
    assert again.run.sizes.micro_schedule() == plan
    assert torch.equal(weights(recorded.run.state.model), weights(again.run.state.model))
    one_size = {step: sizes if isinstance(sizes, int) else min(sizes.values()) for step, sizes in plan.items()}
    other = Recorded(tiny(tmp_path / "c", *OVERRIDES, schedule=one_size, changes=steps))
    assert not torch.equal(weights(recorded.run.state.model), weights(other.run.state.model))
