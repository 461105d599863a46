"""What an operation costs, from shapes alone."""

import pytest
import torch

from trainapp.planning.operation import operation_of
from trainapp.techniques.costs import OPERATION, cost_of, flops_of, is_attention

ATEN = torch.ops.aten
Q = torch.ones(2, 4, 256, 32)
ATTENTION = ATEN._scaled_dot_product_flash_attention_for_cpu.default
CALLS = {
    "product": (ATEN.mm.default, (torch.ones(64, 128), torch.ones(128, 32)), 2 * 64 * 128 * 32),
    "attention": (ATTENTION, (Q, Q, Q), 2 * (2 * 2 * 4 * 256 * 256 * 32)),
    "sum": (ATEN.add.Tensor, (Q, Q), 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_floating_point_operations(name):
    func, args, flops = CALLS[name]
    result = func(*args)
    assert flops_of(func, args, {}, result) == flops == operation_of(func, args, {}, result).work
    assert is_attention(func) == (name == "attention")


def test_attention_costs_more_than_its_bytes():
    """torch 2.13 has no formula for the CPU's kernel, whose results a budget would otherwise hold for cheap."""
    result = ATTENTION(Q, Q, Q)
    moved = sum(t.nbytes for t in (Q, Q, Q, *result) if isinstance(t, torch.Tensor))
    assert cost_of(ATTENTION, (Q, Q, Q), {}, result) > OPERATION + 4 * moved


def test_a_view_costs_its_call():
    assert cost_of(ATEN.t.default, (torch.ones(512, 512),), {}, torch.ones(512, 512)) == OPERATION
