"""Copies share memory exactly where the tensors do."""

import torch
from torch import nn

from trainapp.optim.updated_memory import bytes_of
from trainapp.techniques.tensor_copies import copies_of
from trainapp.torch_private import storage_id


def storages(tensors):
    return {name: storage_id(tensor.untyped_storage()) for name, tensor in tensors.items()}


def test_views_stay_views_of_one_memory():
    base = torch.arange(24, dtype=torch.float32).view(4, 6)
    tensors = {
        "base": base,
        "row": base[1],
        "column": base[:, 2],
        "transposed": base.T,
        "bits": base[2:].view(torch.int16),
        "double": base[1:3].view(torch.float64),
    }
    copies = copies_of(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(copies[name], tensor), name
        assert copies[name].stride() == tensor.stride()
    assert len(set(storages(copies).values())) == 1
    assert storages(copies)["base"] != storages(tensors)["base"]
    copies["row"].fill_(7)
    assert copies["column"][1] == copies["transposed"][0, 1] == 7
    assert base[1, 2] == 8


def test_slices_without_a_common_byte_are_copied_one_by_one():
    """Parameters that lie in one flat tensor would otherwise bring all of it along."""
    flat = torch.arange(1000.0)
    copies = copies_of({"a": flat[:10], "b": flat[10:20], "last": flat[-3:]})
    assert len(set(storages(copies).values())) == 3
    assert [copy.untyped_storage().nbytes() for copy in copies.values()] == [40, 40, 12]


def test_only_the_bytes_of_a_group_are_copied():
    flat = torch.arange(1000.0)
    copies = copies_of({"a": flat[501:520], "b": flat[510:530]})
    assert copies["a"].untyped_storage().nbytes() <= 29 * 4 + 15
    assert torch.equal(copies["a"], flat[501:520])
    assert torch.equal(copies["b"], flat[510:530])


def test_a_tensor_with_two_names_is_copied_once():
    weight, other = nn.Parameter(torch.ones(3)), torch.ones(2).to_sparse()
    copies = copies_of({"a": weight, "b": weight, "sparse": other, "empty": torch.ones(0)})
    assert copies["a"] is copies["b"]
    assert copies["a"].requires_grad
    assert copies["sparse"].to_dense().tolist() == [1, 1]
    assert not copies["sparse"].requires_grad


def test_what_a_layout_does_not_say_is_kept():
    numbers = torch.ones(3, dtype=torch.complex64) * 1j
    copies = copies_of({"plain": numbers, "conjugate": numbers.conj()})
    assert torch.equal(copies["conjugate"], numbers.conj())


def test_bytes_of_a_view():
    base = torch.zeros(4, 6)
    assert bytes_of(base[1:3, 2]) == range(8 * 4, 15 * 4)
    assert bytes_of(base[:0]) == range(0)
