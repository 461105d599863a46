"""Shapes of several sizes: what is too large for one shape does not shrink the others."""

import textwrap

import pytest
import torch
from runs import weights

from trainapp.data.batch import bucket_of, measure
from trainapp.data.micro_batch import MicroBatch
from trainapp.data.micro_batch_sizes import MicroBatchSizes
from trainapp.data.size_agreement import failed_buckets
from trainapp.data.size_search import Failure
from trainapp.parallel.ranks import SingleRank

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
    """The bucket of a text of this length: inputs and targets."""
    return bucket_of(*measure({"inputs": torch.zeros(1, length), "targets": torch.zeros(1, length)}))


def test_one_long_batch_does_not_shrink_the_others(tmp_path):
    calls = {"n": 0}

    def short_but_one(batch):
        calls["n"] += 1
        return batch if calls["n"] in (6, 7, 8) else {name: t[:, :16].contiguous() for name, t in batch.items()}

    # What 16 short texts need, and a bit: a long one needs four times as much.
    changes = {"batch.micro_size": "auto"}
    peak = Recorded(
        tiny(tmp_path / "a", *TEXT, changes={**changes, "train.max_steps": 4}),
        changed=lambda b: {name: t[:, :16].contiguous() for name, t in b.items()},
    ).run.memory.peak
    recorded = Recorded(
        tiny(tmp_path / "b", *TEXT, changes={**changes, "memory.limit": int(1.1 * peak)}), changed=short_but_one
    )
    micro = recorded.run.state.micro
    assert recorded.failures
    assert {f.bucket for f in recorded.failures} == {numbers(64)}
    assert micro.searches[numbers(16)].size == 16
    assert micro.searches[numbers(64)].size < 16
    assert micro.size == 16  # what is fetched at a time
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


@pytest.mark.usefixtures("several_sizes")
def test_images_of_several_sizes(tmp_path):
    recorded = Recorded(tiny(tmp_path / "run", *OVERRIDES, changes={**AUTO, "memory.limit": LIMIT}))
    small, large = 128, 2048  # 64 and 1024 pixels and a target, up to the next power of two
    assert set(recorded.run.state.micro.searches) == {small, large}
    assert recorded.run.state.micro.searches[small].size == 16
    assert recorded.run.state.micro.searches[large].size < 16
    assert {f.bucket for f in recorded.failures} == {large}
    assert recorded.run.memory.peak <= LIMIT
    for epoch in range(4):
        assert sorted(i for _, e, indices in recorded.fetched if e == epoch for i in indices) == list(range(64))


@pytest.mark.usefixtures("several_sizes")
def test_a_schedule_replays_the_sizes_of_each_shape(tmp_path):
    recorded = Recorded(tiny(tmp_path / "a", *OVERRIDES, changes={**AUTO, "memory.limit": LIMIT, "oom.grow": True}))
    plan = recorded.run.sizes_used
    assert recorded.failures
    assert any(isinstance(sizes, dict) for sizes in plan.values())
    again = Recorded(tiny(tmp_path / "b", *OVERRIDES, schedule=plan, changes=AUTO))
    assert again.failures == []
    assert again.run.sizes_used == plan
    assert torch.equal(weights(recorded.run.state.model), weights(again.run.state.model))
    one_size = {step: sizes if isinstance(sizes, int) else min(sizes.values()) for step, sizes in plan.items()}
    other = Recorded(tiny(tmp_path / "c", *OVERRIDES, schedule=one_size, changes=AUTO))
    assert not torch.equal(weights(recorded.run.state.model), weights(other.run.state.model))


def batch_of(samples: int, features: int) -> torch.Tensor:
    return torch.zeros(samples, features)


def pieces(sizes: MicroBatchSizes, batch: torch.Tensor) -> list[int]:
    return [len(piece.data) for piece in sizes.cut(MicroBatch(batch, last=True, real=True), SingleRank())]


def test_a_new_long_shape_begins_where_the_others_experience_puts_it():
    sizes = MicroBatchSizes(64)
    assert pieces(sizes, batch_of(64, 128)) == [64]
    assert sizes.failed(SingleRank()) == (64, 32)
    # Four times the numbers in a sample: a quarter of the samples.
    assert pieces(sizes, batch_of(64, 512)) == [8] * 8
    # A shorter one is not made larger than the start.
    assert pieces(sizes, batch_of(64, 16)) == [64]


def test_a_shape_that_is_cut_unevenly_proves_its_size():
    sizes = MicroBatchSizes(64, grow=False)
    pieces(sizes, batch_of(64, 16))
    sizes.succeeded(SingleRank())
    sizes.follow({16: 64, 1024: 24})
    for _ in range(3):
        assert pieces(sizes, batch_of(64, 1024)) == [24, 24, 16]
        sizes.succeeded(SingleRank())
    assert sizes.searches[1024].is_proven
    assert pieces(sizes, batch_of(49, 1024)) == [24, 23, 2]  # BatchNorm cannot normalise a single sample


def test_only_the_bucket_at_work_fails():
    sizes = MicroBatchSizes(64)
    assert pieces(sizes, batch_of(64, 16)) == [64]
    assert pieces(sizes, batch_of(64, 1024)) == [64]
    sizes.succeeded(SingleRank())
    pieces(sizes, batch_of(64, 1024))
    assert sizes.failed(SingleRank()) == (64, 32)
    assert {bucket: search.size for bucket, search in sizes.searches.items()} == {16: 64, 1024: 32}


def test_the_largest_micro_batch_of_the_attempt_is_what_failed():
    sizes = MicroBatchSizes(64)
    assert pieces(sizes, batch_of(40, 16)) == [40]
    sizes.succeeded(SingleRank())
    assert pieces(sizes, batch_of(20, 16)) == [20]
    assert pieces(sizes, batch_of(10, 16)) == [10]
    assert sizes.failed(SingleRank()) == (20, 10)
    assert sizes.searches[16].fails == 20


class ThreeRanks(SingleRank):
    """The second of three ranks, with what the others say."""

    rank, world = 1, 3

    def __init__(self, first, third):
        self.first, self.third = first, third

    def all_gather_object(self, value):
        return [self.first, value, self.third]


def test_ranks_agree_on_what_ran_and_on_who_failed():
    first_failure, third_failure = Failure(10, 20, 30), Failure(11, 20, 30)
    first, third = ({16: 30}, 16, first_failure), ({16: 31, 1024: 7}, 1024, third_failure)
    largest, failures = failed_buckets(ThreeRanks(first, third), {16: 32}, None, None)
    assert largest == {16: 32, 1024: 7}
    assert failures == {16: first_failure, 1024: third_failure}
    sizes = MicroBatchSizes(64)
    sizes.attempt_samples = {16: 32}
    assert sizes.failed(ThreeRanks(first, third), culprit=False) == (32, 16)
    assert {bucket: (s.size, s.fails) for bucket, s in sizes.searches.items()} == {16: (16, 32), 1024: (3, 7)}


def test_what_is_proven_for_a_larger_shape_is_proven_for_a_smaller():
    sizes = MicroBatchSizes(64)
    for _ in range(3):
        assert sizes.is_unproven
        pieces(sizes, batch_of(64, 1024))
        sizes.succeeded(SingleRank())
    pieces(sizes, batch_of(64, 16))
    sizes.succeeded(SingleRank())
    assert sizes.all_proven
    assert not sizes.is_unproven
    pieces(sizes, batch_of(64, 4096))
    assert sizes.needs_watching
    sizes.succeeded(SingleRank())
    assert sizes.is_unproven


def test_a_rare_long_shape_leaves_the_others_in_peace():
    sizes = MicroBatchSizes(64)
    for features in (16, 16, 16, 1024, 16):
        pieces(sizes, batch_of(64, features))
        sizes.succeeded(SingleRank())
    assert not sizes.all_proven  # the long one ran once
    assert not sizes.is_unproven  # but is not at work


def test_sizes_survive_a_checkpoint():
    sizes = MicroBatchSizes(64)
    pieces(sizes, batch_of(64, 16))
    sizes.succeeded(SingleRank())
    pieces(sizes, batch_of(64, 1024))
    sizes.failed(SingleRank())
    loaded = MicroBatchSizes(64)
    loaded.load_state_dict(sizes.state_dict())
    assert {bucket: search.size for bucket, search in loaded.searches.items()} == {16: 64, 1024: 32}
    assert loaded.searches[1024].fails == 64
    assert not loaded.all_proven  # a hint: it still has to prove itself


def test_what_is_cut_again_loses_nothing():
    sizes = MicroBatchSizes(64)
    batch = {"inputs": torch.arange(30).reshape(10, 3), "targets": torch.arange(10), "scale": torch.tensor(2.0)}
    micro = MicroBatch(batch, last=True, real=True)
    list(sizes.cut(micro, SingleRank()))
    sizes.follow(4)
    cut = [piece.data for piece in sizes.cut(micro, SingleRank())]
    assert [len(piece["targets"]) for piece in cut] == [4, 4, 2]
    assert torch.equal(torch.cat([piece["inputs"] for piece in cut]), batch["inputs"])
    assert all(piece["scale"] == 2.0 for piece in cut)
