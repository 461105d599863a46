"""Whether a batch is its parts joined, also where it has lists with an element per sample."""

import pytest
import torch

from trainapp.data.joining import batch_dims, is_padded, join_parts

BOXES = [torch.rand(number, 4) for number in (2, 1, 3, 2)]
IMAGES = torch.rand(4, 3, 5)


def as_list(samples):
    return [BOXES[sample] for sample in samples]


def as_tuple(samples):
    return tuple(as_list(samples))


def as_dicts(samples):
    return [{"boxes": BOXES[sample], "name": f"{sample}.png", "area": float(sample)} for sample in samples]


def as_names(samples):
    return [f"{sample}.png" for sample in samples]


def as_arrays(samples):
    return [BOXES[sample].numpy() for sample in samples]


@pytest.mark.parametrize("targets", [as_list, as_tuple, as_dicts, as_names, as_arrays])
def test_a_list_with_an_element_per_sample_is_joined(targets):
    def batch(*samples):
        return IMAGES[list(samples)], targets(samples)

    def same(first, second):
        return bool(batch_dims(first, [second, second])) is False and repr(first) == repr(second)

    whole = batch(0, 1, 2, 3)
    for cut in (1, 2, 3):
        parts = [batch(*range(cut)), batch(*range(cut, 4))]
        assert batch_dims(whole, parts) == [0, 0]
        if cut == 2:
            assert same(join_parts(whole, parts[::-1], [0, 0]), batch(2, 3, 0, 1))
            assert same(join_parts(whole, [parts[0]] * 2, [0, 0]), batch(0, 1, 0, 1))
    assert not batch_dims(whole, [batch(0, 1), batch(3, 2)])
    assert not batch_dims(whole, [(IMAGES[:2], targets((1, 0))), (IMAGES[2:], targets((2, 3)))])
    assert not batch_dims(whole, [whole, whole])


def test_a_list_of_the_same_length_for_all_batches_has_no_samples():
    levels = [torch.rand(4, 2), torch.rand(4, 3)]
    parts = [[level[:2] for level in levels], [level[2:] for level in levels]]
    assert batch_dims(levels, parts) == [0, 0]
    assert join_parts(levels, parts[::-1], [0, 0])[1].tolist() == levels[1][[2, 3, 0, 1]].tolist()
    ragged = {"x": IMAGES, "ids": [1, 2, 3, 4, 5, 6, 7]}  # of no length that says anything
    assert batch_dims(ragged, [{"x": IMAGES[:2], "ids": [1]}, {"x": IMAGES[2:], "ids": [2, 3]}]) == [0]


def test_padded_images_with_lists_of_boxes():
    padded = torch.zeros(4, 3, 8)
    padded[..., :5] = IMAGES
    padded[2:, :, 5:] = 1
    whole = padded, as_list(range(4))
    parts = [(IMAGES[:2], as_list((0, 1))), (padded[2:], as_list((2, 3)))]
    assert not batch_dims(whole, parts)
    assert is_padded(whole, parts)
    assert not is_padded(whole, [parts[0], (padded[2:], as_list((3, 2)))])
