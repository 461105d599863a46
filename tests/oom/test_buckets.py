"""Inputs of several shapes: a size too large for one shape does not shrink the others."""

import logging
import textwrap

import pytest
import torch
from runs import weights

from trainapp.data.batch import bucket_of, elements_in

from .conftest import tiny
from .inject import Recorded

pytestmark = pytest.mark.usefixtures("without_pictures")


TEXT = (
    "model=gpt",
    "model.depth=1",
    "model.width=16",
    "model.heads=2",
    "model.context_length=64",
    "data=synthetic_tokens",
    "data.vocab_size=32",
    "data.size=256",
    "data.val_size=40",
    "data.min_length=8",
    "batch.global_size=16",
    "train.max_steps=32",
    "train.ema=null",
    "every.log=null",
)


def numbers(length: int) -> int:
    """The bucket of a text of this length, inputs and targets."""
    return bucket_of(1, elements_in({"inputs": torch.zeros(1, length), "targets": torch.zeros(1, length)}))


@pytest.mark.slow
def test_one_long_batch_does_not_shrink_the_others(tmp_path):
    calls = {"n": 0}

    def short_but_one(batch):
        calls["n"] += 1
        return batch if calls["n"] in (6, 7, 8) else {name: t[:, :16].contiguous() for name, t in batch.items()}

    # Slightly more than 16 short texts need; a long text needs four times as much as a short one.
    changes = {"batch.micro_size": "auto"}
    peak = Recorded(
        tiny(tmp_path / "a", *TEXT, changes={**changes, "train.max_steps": 4}),
        changed=lambda b: {name: t[:, :16].contiguous() for name, t in b.items()},
    ).run.memory.peak
    recorded = Recorded(
        tiny(tmp_path / "b", *TEXT, changes={**changes, "memory.limit": int(1.1 * peak)}), changed=short_but_one
    )
    micro = recorded.run.sizes.train
    assert recorded.failures
    assert [bucket for bucket, search in micro.searches.items() if search.fails] == [numbers(64)]
    assert micro.searches[numbers(16)].size == 16
    assert micro.searches[numbers(64)].size < 16
    assert micro.size == 16  # the fetch size
    assert recorded.run.memory.peak <= int(1.1 * peak)


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
