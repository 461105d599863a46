from functools import partial

import numpy as np
import pytest
import torch

from trainapp.data.sets.synthetic import SyntheticImages, SyntheticTokens


def test_images_have_the_configured_shape_and_unit_variance():
    data = SyntheticImages("train", image_shape=[1, 24, 20], num_classes=7, size=500, val_size=70, noise=0.5)
    assert (len(data), len(SyntheticImages("val", val_size=70))) == (500, 70)
    assert data.spec == {"image_shape": (1, 24, 20), "num_classes": 7}
    batch = data.__getitems__(range(500))
    assert batch["inputs"].shape == (500, 1, 24, 20)
    assert batch["inputs"].dtype == torch.float32
    assert torch.bincount(batch["targets"]).tolist() == [72, 72, 72, 71, 71, 71, 71]
    assert 0.7 < batch["inputs"].var().item() < 1.3
    means = torch.stack([batch["inputs"][batch["targets"] == c].mean(0) for c in range(7)])
    noise = batch["inputs"] - means[batch["targets"]]
    assert abs(noise.std().item() - 0.5 / 1.25**0.5) < 0.01


def test_images_can_be_learned_and_carry_over_to_validation():
    """Classify the other split by the nearest class mean of the training split, a linear classifier."""
    train, val = SyntheticImages("train"), SyntheticImages("val")
    seen, unseen = train.__getitems__(range(1024)), val.__getitems__(range(256))
    means = torch.stack([seen["inputs"][seen["targets"] == c].mean(0) for c in range(10)]).flatten(1)
    predicted = torch.cdist(unseen["inputs"].flatten(1), means).argmin(1)
    assert (predicted == unseen["targets"]).float().mean() > 0.99
    # Negative control: another seed has other prototypes.
    foreign = SyntheticImages("val", seed=1).__getitems__(range(256))
    predicted = torch.cdist(foreign["inputs"].flatten(1), means).argmin(1)
    assert (predicted == foreign["targets"]).float().mean() < 0.5


KINDS = [partial(SyntheticImages, image_shape=[1, 8, 8]), partial(SyntheticTokens, context_length=16)]


@pytest.mark.parametrize("make", KINDS, ids=["images", "tokens"])
def test_a_sample_is_a_function_of_seed_split_and_index(make):
    data = make("train")
    whole = data.__getitems__(range(1024))
    for batch in ([3], [1023, 3, 0], list(range(100, 200))):
        assert torch.equal(data.__getitems__(batch)["inputs"], whole["inputs"][batch])
        assert torch.equal(data.__getitems__(batch)["targets"], whole["targets"][batch])
    assert torch.equal(make("train").__getitems__(range(1024))["inputs"], whole["inputs"])
    others = [make("train", seed=1), make("val")]
    same = [
        torch.equal(other.__getitems__([i])["inputs"][0], whole["inputs"][i]) for other in others for i in range(20)
    ]
    assert not any(same)
    assert len(torch.unique(whole["inputs"].flatten(1), dim=0)) == 1024


def test_tokens_follow_the_chain_with_the_documented_entropy():
    data = SyntheticTokens("train", vocab_size=50, context_length=200, size=400)
    assert data.spec == {"vocab_size": 50, "context_length": 200}
    assert data.task == "next_token"
    batch = data.__getitems__(range(400))
    inputs, targets = batch["inputs"], batch["targets"]
    assert inputs.shape == targets.shape == (400, 200)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    counts = torch.zeros(50, 50)
    counts.index_put_((inputs.flatten(), targets.flatten()), torch.tensor(1.0), accumulate=True)
    assert (counts > 0).sum(1).tolist() == [3] * 50
    conditional = counts / counts.sum(1, keepdim=True)
    entropy = -(counts / counts.sum() * conditional.clamp_min(1e-12).log()).sum().item()
    assert entropy == pytest.approx(0.8018, abs=0.01)
    assert torch.bincount(inputs.flatten()).min() > 1000  # of 1600 each: all tokens are used
    unseen = SyntheticTokens("val", vocab_size=50, context_length=200).__getitems__(range(50))
    assert (conditional[unseen["inputs"], unseen["targets"]] > 0).all()  # the same chain
    foreign = SyntheticTokens("val", seed=1, vocab_size=50, context_length=200).__getitems__(range(50))
    assert (conditional[foreign["inputs"], foreign["targets"]] > 0).float().mean() < 0.2


def test_lengths_vary_and_padding_predicts_nothing():
    data = SyntheticTokens("train", context_length=16, min_length=5, size=600)
    lengths = [len(data[i]["inputs"]) for i in range(600)]
    assert set(lengths) == set(range(5, 17))
    assert min(np.bincount(lengths)[5:]) > 25  # of 50 each
    chosen = [i for i in range(600) if lengths[i] < 12][:8]
    batch = data.__getitems__(chosen)
    longest = max(lengths[i] for i in chosen)
    assert batch["inputs"].shape == batch["targets"].shape == (8, longest)
    assert (batch["targets"] == -100).sum(1).tolist() == [longest - lengths[i] for i in chosen]
    for row, i in enumerate(chosen):
        sample, length = data[i], lengths[i]
        assert torch.equal(batch["inputs"][row, :length], sample["inputs"])
        assert torch.equal(batch["targets"][row, :length], sample["targets"])
        assert (batch["inputs"][row, length:] == 0).all()
        assert (batch["targets"][row, length:] == -100).all()
