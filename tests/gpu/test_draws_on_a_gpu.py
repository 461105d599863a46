"""Random numbers by sample on CUDA: the same kernels under its key, dropout's fused one, and what attention draws."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainapp.draws.random_operations import install
from trainapp.draws.record import DrawRecord
from trainapp.draws.sample_draws import SampleDraws

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

KINDS = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "in bf16": lambda x: F.dropout(x.bfloat16(), 0.3),
    "randn": lambda x: torch.randn(len(x), 3, device="cuda"),
    "longer than a block": lambda x: torch.randn(len(x), 2**20 + 9, device="cuda"),
    "randint": lambda x: torch.randint(0, 1000, (len(x),), device="cuda"),
    "poisson": lambda x: torch.poisson(x * 9),
    "multinomial": lambda x: torch.multinomial(x[:, 0], 3),
    "on the CPU": lambda x: torch.rand(len(x), 3),
}


def drawn(kind, cut, draw_record):
    inputs, found = torch.ones(12, 6, 8, device="cuda"), []
    for positions in torch.arange(12).split(cut):
        with SampleDraws((0, 1), positions.tolist(), draw_record, "train"):
            found.append(kind(inputs[positions.cuda()]).float())
    return torch.cat(found)


@pytest.mark.parametrize("name", KINDS)
def test_a_draw_is_the_samples_own(name):
    """Torch's own, in another micro-batch, is another one."""
    install("cpu")
    install("cuda")
    whole = drawn(KINDS[name], 12, DrawRecord())
    assert all(torch.equal(drawn(KINDS[name], size, DrawRecord()), whole) for size in (5, 1))
    torch.manual_seed(0)
    inputs = torch.ones(12, 6, 8, device="cuda")
    torchs = torch.cat([KINDS[name](part).float() for part in inputs.split(5)])
    torch.manual_seed(0)
    assert not torch.equal(KINDS[name](inputs).float(), torchs)


def test_a_recomputation_in_autograds_thread():
    """Gradients of a checkpointed block are those of the plain one; also of a backward that draws."""
    install("cuda")
    layer, gradients = nn.Linear(8, 8).cuda(), []
    for checkpointed in (False, True):
        layer.zero_grad()
        with SampleDraws((0, 1), range(12), DrawRecord(), "train"):
            block = lambda x: F.dropout(layer(x), 0.3)  # noqa: E731
            x = torch.ones(12, 8, device="cuda", requires_grad=True)
            y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
            y.square().sum().backward()
        gradients.append(layer.weight.grad.clone())
    assert torch.equal(*gradients)


def test_the_dropout_of_fused_attention_is_noted():
    install("cuda")
    heads = torch.randn(4, 2, 64, 64, device="cuda", dtype=torch.bfloat16)
    for backend, is_noted in ((SDPBackend.FLASH_ATTENTION, True), (SDPBackend.MATH, False)):
        draw_record = DrawRecord()
        with sdpa_kernel(backend), SampleDraws((0, 1), range(4), draw_record, "train"):
            F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)
        assert bool(draw_record.depends) == is_noted
