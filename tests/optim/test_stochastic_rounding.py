import pytest
import torch

from trainapp.optim.low_precision import copy_rounded


def rounded(values, seed=0, dtype=torch.bfloat16):
    target = torch.empty(values.shape, dtype=dtype)
    copy_rounded(target, values.clone(), torch.Generator().manual_seed(seed))
    return target


@pytest.mark.parametrize("value", [1.001, -3.14159, 1e-30, 0.9999, 255.3])
def test_the_mean_is_the_value(value):
    values = torch.full((200_000,), value)
    found = rounded(values).double()
    neighbours = found.unique()
    assert len(neighbours) == 2
    assert neighbours[0] < value < neighbours[1]
    assert found.mean().item() == pytest.approx(value, rel=2e-5)
    # Negative control: to nearest, all are one neighbour.
    nearest = values.to(torch.bfloat16).double()
    assert abs(nearest.mean().item() - value) > abs(found.mean().item() - value)


def test_what_bf16_can_hold_is_unchanged():
    values = torch.randn(1000).to(torch.bfloat16).float()
    special = torch.tensor([0.0, float("inf"), -float("inf")])
    exact = torch.cat([values, special])
    assert torch.equal(rounded(exact).float(), exact)
    assert rounded(torch.full((1000,), float("nan"))).isnan().all()


def test_the_generator_decides():
    values = torch.randn(1000)
    assert torch.equal(rounded(values), rounded(values))
    assert not torch.equal(rounded(values), rounded(values, seed=1))


def test_fp32_is_copied():
    values = torch.randn(1000)
    assert torch.equal(rounded(values, dtype=torch.float32), values)
