"""Weighted and class-balanced sampling: how often a sample is drawn, and that only its position decides."""

from collections import Counter

import numpy as np
import pytest
import runs
import torch

from trainapp.data.progress import Progress
from trainapp.data.sampler import Sampler, Weighted
from trainapp.data.train_batches import TrainBatches
from trainapp.errors import UserError
from trainapp.training import loop

CPU = torch.device("cpu")


def weighted_order(seed, data, weights):
    return Sampler(data, seed=seed, rank=0, world_size=1, weights=weights).order


class Rare:
    """600 samples in three classes, of which one has 6 and one has 54."""

    task = "classification"
    in_memory = True

    def __init__(self, labels=None):
        self.targets = [0] * 540 + [1] * 54 + [2] * 6
        self.quality = torch.arange(600) % 4
        if labels is not None:
            self.targets = [labels[target] for target in self.targets]

    def __len__(self):
        return 600

    def __getitem__(self, index):
        return {"inputs": torch.tensor([float(index)]), "targets": index}


def drawn(order, draws=30_000):
    return np.bincount(order.indices(0, 0, draws), minlength=order.samples)


@pytest.mark.parametrize("samples", [1, 5, 257, 1283])
def test_samples_are_drawn_in_proportion_to_their_weights(samples):
    weights = 0.5 + np.random.default_rng(0).random(samples)
    weights[: samples // 3] = 0
    counts = drawn(Weighted(1, weights))
    expected = 30_000 * weights / weights.sum()
    assert counts.sum() == 30_000
    assert (counts[weights == 0] == 0).all()
    deviation = ((counts - expected)[weights > 0] ** 2 / expected[weights > 0]).sum()
    freedom = (weights > 0).sum() - 1
    assert deviation < freedom + 4 * np.sqrt(2 * freedom) + 1e-9


@pytest.mark.parametrize("labels", [None, {0: "cat", 1: "dog", 2: "emu"}, {0: -5, 1: 0, 2: 10**12}])
def test_balanced_classes_are_equally_frequent(labels):
    data = Rare(labels)
    classes = Counter(data.targets[index] for index in weighted_order(0, data, "balanced").indices(0, 0, 30_000))
    assert len(classes) == 3
    assert all(abs(count - 10_000) < 400 for count in classes.values())
    assert drawn(weighted_order(0, data, "balanced")).min() > 0  # within a class all samples come
    plain = TrainBatches(data, global_size=600, seed=0, device=CPU).share(Progress()).numbers
    assert sorted(plain) == list(range(600))  # negative control: without the setting


def test_weights_from_a_file_and_from_an_attribute(tmp_path):
    data = Rare()
    np.save(tmp_path / "weights.npy", (np.arange(600) % 4).astype(np.float16))
    by_file = weighted_order(0, data, str(tmp_path / "weights.npy"))
    by_name = weighted_order(0, data, "quality")
    assert by_file.indices(2, 0, 600) == by_name.indices(2, 0, 600)
    assert by_file.name == by_name.name  # other weights are another order, also those of the same sum
    assert by_file.name != Weighted(0, (np.arange(600) + 1.0) % 4).name
    assert {index % 4 for index in by_name.indices(0, 0, 600)} == {1, 2, 3}


class Noisy(Rare):
    """Every sample of the rare class, with noise."""

    def __getitem__(self, index):
        return torch.stack([torch.tensor(float(index)), torch.rand(())])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_drawn_twice_has_other_noise(workers):
    """The same again in another cut, and after a resume."""
    arguments = {"global_size": 300, "seed": 0, "device": CPU, "workers": workers}
    batches = TrainBatches(Noisy(), weights="balanced", **arguments)
    (whole,) = (micro.data for micro in batches.micro_batches(Progress(), [300]))
    rare = whole[whole[:, 0] >= 594]
    assert len(rare) > 60
    assert len(rare[:, 0].unique()) == 6
    assert len(rare[:, 1].unique()) == len(rare)
    again = torch.cat([micro.data for micro in batches.micro_batches(Progress(), [70])])
    assert torch.equal(again, whole)
    assert torch.equal(next(batches.micro_batches(Progress(), [300])).slice_samples(5, 9), whole[5:9])
    batches.close()


@pytest.mark.parametrize("weights", [None, "balanced"])
@pytest.mark.parametrize("world", [2, 3])
def test_neither_ranks_nor_batches_change_the_order(world, weights):
    order = weighted_order(5, Rare(), weights)
    whole = order.indices(1, 0, 600)
    for size in (64, 100):
        found = []
        parts = [Sampler(Rare(), seed=5, rank=rank, world_size=world, weights=weights) for rank in range(world)]
        for consumed in range(0, 600, size):
            shares = [part.share(1, consumed, size).numbers for part in parts]
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
            found += [index for share in shares for index in share]
        assert found == whole
    assert order.indices(0, 0, 600) != whole


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("qualty", "must be balanced .* each of the 600 samples; there are none"),
        ("missing.npy", "cannot be read as weights, .*No such file"),
        ("short", "each of the 600 samples; their shape is \\[599\\]"),
        ("negative", "weights must be finite, not negative and not all 0"),
        ("nothing", "weights must be finite, not negative and not all 0"),
        ("words", "cannot be read as weights, an array of numbers: could not convert"),
    ],
)
def test_weights_that_are_none(weights, message):
    data = Rare()
    data.negative, data.nothing = [-1] + [1] * 599, [0] * 600
    data.short, data.words = [1] * 599, ["x"] * 600
    with pytest.raises(UserError, match=rf"^data\.sampling\.weights={weights}: .*{message}"):
        weighted_order(0, data, weights)


def test_a_run_draws_by_class_and_resumes(tmp_path):
    """Resumed in the middle of an epoch it is the run that was never interrupted."""
    overrides = (*runs.MODELS["mlp"], "data.sampling.weights=balanced", "train.max_steps=6")
    whole, parts = runs.resumed(tmp_path, 3, *overrides)
    assert runs.differences(whole, parts) == []
    assert whole["sampler"]["order"].startswith("weighted-")


def test_other_weights_in_the_middle_of_an_epoch_are_refused(tmp_path, caplog):
    runs.run_until(tmp_path, 3, *runs.MODELS["mlp"], "train.max_steps=6")
    balanced = (*runs.MODELS["mlp"], "train.max_steps=6", "data.sampling.weights=balanced")
    with pytest.raises(UserError, match=r"data\.on_change=refuse: .*data\.sampling has changed"):
        runs.prepare(tmp_path, *balanced)
    run = runs.prepare(tmp_path, *balanced, "data.on_change=next_epoch")
    assert (run.state.progress.epoch, run.state.progress.consumed) == (1, 0)
    assert "training continues with epoch 1" in caplog.text
    loop.train_step(run)
    run.close()
