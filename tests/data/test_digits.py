import hashlib
import pickle

import numpy as np
import pytest
import torch

from trainapp.data.sets.digits import DigitPairs, Digits, load, split_indices


def test_shipped_arrays_equal_the_source():
    """The digests were taken from the 1797 x 65 table in the source file, read as uint8."""
    images, labels = load()
    assert images.shape == (1797, 8, 8)
    assert images.dtype == labels.dtype == np.uint8
    digest = "8f26b2bd9d135c256808f68f14fdabddde6d9c7f869ae419704b051f0f14b3b3"
    assert hashlib.sha256(images.tobytes()).hexdigest() == digest
    digest = "8ba4f891220f5e4c9c819638d1602d74b83618f167043c6da52a2a247841ddf0"
    assert hashlib.sha256(labels.tobytes()).hexdigest() == digest


def test_split_is_stratified_and_the_same_for_every_seed():
    labels = load()[1]
    train, val = split_indices(labels, "train"), split_indices(labels, "val")
    assert (len(train), len(val)) == (1437, 360)
    assert sorted([*train, *val]) == list(range(1797))
    assert np.bincount(labels[val]).tolist() == [36, 36, 36, 36, 37, 36, 36, 36, 35, 36]
    for split, size in (("train", 1437), ("val", 360)):
        first, second = (Digits(split, seed=seed).__getitems__(range(size)) for seed in (0, 1))
        assert torch.equal(first["inputs"], second["inputs"])


def test_batch_has_the_promised_types_and_scale():
    data = Digits("train")
    batch = data.__getitems__(range(len(data)))
    assert batch["inputs"].dtype == torch.float32
    assert abs(batch["inputs"].mean().item()) < 1e-3
    assert abs(batch["inputs"].std().item() - 1) < 1e-3
    assert data.spec == {"image_shape": (1, 8, 8), "num_classes": 10}
    assert (data.task, data.in_memory) == ("classification", True)
    images, labels = load()
    position = split_indices(labels, "train")[700]
    np.testing.assert_allclose(batch["inputs"][700, 0], (images[position] - 4.892) / 6.019, atol=1e-5)
    assert batch["targets"][700] == labels[position]


def test_augmentation_is_a_function_of_seed_epoch_and_index():
    data = Digits("train", seed=7, augment=True)
    data.set_epoch(3)
    whole = data.__getitems__(range(1437))["inputs"]
    data.set_epoch(4)
    other_epoch = data.__getitems__(range(1437))["inputs"]
    data.set_epoch(3)
    shuffled = torch.randperm(1437, generator=torch.Generator().manual_seed(0))
    for batch in shuffled.split(100):
        assert torch.equal(data.__getitems__(batch.tolist())["inputs"], whole[batch])
    copy = pickle.loads(pickle.dumps(data))
    assert torch.equal(copy.__getitems__([9])["inputs"], whole[[9]])
    # Negative control: another epoch or seed transforms nearly every image differently.
    other_seed = Digits("train", seed=8, augment=True)
    other_seed.set_epoch(3)
    for other in (other_epoch, other_seed.__getitems__(range(1437))["inputs"]):
        assert (other == whole).flatten(1).all(1).float().mean() < 0.01


def test_augmentation_shifts_by_up_to_a_pixel_and_scales_by_a_tenth():
    """The image is a shifted, scaled copy and nothing else; every shift occurs about as often."""
    everything = range(1437)
    original, changed = (Digits("train", augment=a).__getitems__(everything)["inputs"][:, 0] for a in (False, True))
    original, changed = original * 6.019 + 4.892, changed * 6.019 + 4.892
    windows = torch.nn.functional.pad(original, (1, 1, 1, 1)).unfold(1, 8, 1).unfold(2, 8, 1).flatten(1, 2)
    factors = (windows * changed[:, None]).sum((2, 3)) / (windows**2).sum((2, 3))
    errors = (factors[..., None, None] * windows - changed[:, None]).abs().amax((2, 3))
    error, shift = errors.min(1)
    assert error.max() < 1e-3
    assert torch.bincount(shift, minlength=9).min() > 120  # of 1437 / 9 = 160 each
    factor = factors.gather(1, shift[:, None])
    assert 0.899 < factor.min() < 0.91
    assert 1.09 < factor.max() < 1.101


@pytest.mark.parametrize("split", ["train", "val"])
def test_pairs_are_two_augmentations(split):
    pixels = DigitPairs(split, seed=7).__getitems__([3, 5, 8])["inputs"]
    assert pixels.shape == (3, 2, 1, 8, 8)
    assert all(not torch.equal(first, second) for first, second in pixels)
    assert torch.equal(pixels[1:2], DigitPairs(split, seed=7).__getitems__([5])["inputs"])
    if split == "train":
        assert torch.equal(pixels[:, 0], Digits(split, seed=7, augment=True).__getitems__([3, 5, 8])["inputs"])
