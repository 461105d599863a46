"""precision=int8 and fp8: products in 8 bits, the same however a batch is cut, and everything else as in bf16."""

import math

import pytest
import runs
import torch
from helpers import metrics
from torch import nn

from trainapp.errors import UserError
from trainapp.optim.matmuls import QuantizedLinear, quantizable, quantize, require_kernels

pytest.importorskip("torchao", reason="needs the extra trainapp[torchao]")
pytestmark = pytest.mark.usefixtures("one_thread")

GPT = (*runs.MODELS["gpt"], "model.width=32", "model.dropout=0")
ERRORS = {"int8": 0.015, "fp8": 0.05}  # of a product of normal numbers, relative, in the 2-norm
by_kind = pytest.mark.parametrize("kind", ["int8", "fp8"])


def layers(kind, bias=True):
    """A linear layer in `kind` and the same one as it was."""
    torch.manual_seed(0)
    plain = nn.Linear(64, 32, bias)
    quantized = nn.Linear(64, 32, bias)
    quantized.load_state_dict(plain.state_dict())
    quantize([quantized], kind)
    return quantized, plain


def gradients(layer, inputs, outputs):
    """Of the inputs, the weight and the bias."""
    inputs = inputs.detach().requires_grad_()
    layer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = layer(inputs)
    result.backward(outputs)
    return result.detach(), inputs.grad, *(p.grad for p in layer.parameters())


def error(value, reference):
    return float((value.float() - reference.float()).norm() / reference.float().norm())


@by_kind
def test_close_to_the_layer_in_bf16(kind):
    quantized, plain = layers(kind)
    inputs, outputs = torch.randn(3, 5, 64), torch.randn(3, 5, 32).bfloat16()
    found, wanted = gradients(quantized, inputs, outputs), gradients(plain, inputs, outputs)
    assert [(t.dtype, t.shape) for t in found] == [(t.dtype, t.shape) for t in wanted]
    for value, reference in zip(found[:2], wanted[:2], strict=True):
        assert 1e-4 < error(value, reference) < ERRORS[kind]  # it is rounded, but not much
    assert torch.equal(found[2], wanted[2])
    assert torch.equal(found[3], wanted[3])


@by_kind
def test_a_row_does_not_depend_on_the_others(kind):
    quantized, _ = layers(kind)
    inputs, outputs = torch.randn(8, 64) * torch.logspace(-2, 2, 8)[:, None], torch.randn(8, 32).bfloat16()
    whole = gradients(quantized, inputs, outputs)
    halves = [gradients(quantized, inputs[part], outputs[part]) for part in (slice(3), slice(3, 8))]
    assert torch.equal(whole[0], torch.cat([half[0] for half in halves]))
    assert torch.equal(whole[1], torch.cat([half[1] for half in halves]))
    # Negative control: with one scale for the whole batch, the largest row rounds away the others.
    scale = inputs.abs().amax() / 127
    assert error((inputs / scale).round()[:3] * scale, inputs[:3]) > 10 * ERRORS[kind]


@by_kind
def test_values_that_are_not_finite_stay_so(kind):
    quantized, _ = layers(kind)
    inputs = torch.randn(3, 64)
    inputs[0, 0], inputs[1, 0] = math.nan, math.inf
    result = quantized(inputs.bfloat16())
    assert not result[0].isfinite().any()
    assert not result[1].isfinite().any()
    assert result[2].isfinite().all()
    assert quantized(torch.zeros(1, 64).bfloat16()).equal(quantized.bias.bfloat16()[None])


@by_kind
def test_any_layout(kind):
    quantized, _ = layers(kind)
    inputs = torch.randn(64, 3, 5).permute(1, 2, 0)
    one = torch.ones((), dtype=torch.bfloat16)
    found = gradients(quantized, inputs, one.expand(3, 5, 32))
    wanted = gradients(quantized, inputs.contiguous(), torch.ones(3, 5, 32).bfloat16())
    assert all(map(torch.equal, found, wanted))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert quantized(inputs[:0]).shape == (0, 5, 32)


@by_kind
def test_the_output_may_be_changed_in_place(kind):
    """Without a bias it is the product itself. 3 rows are fewer than int8 kernels take, 40 are enough."""
    quantized, _ = layers(kind, bias=False)
    for rows in (3, 40):
        inputs = torch.randn(rows, 64, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            nn.functional.relu(quantized(inputs), inplace=True).sum().backward()
            wanted = nn.functional.relu(quantized(inputs.detach()))
            found = nn.functional.relu(quantized(inputs.detach()), inplace=True)
        assert torch.equal(found, wanted)
        assert inputs.grad.isfinite().all()


@by_kind
def test_what_backward_keeps(kind):
    """As nn.Linear: nothing for a frozen weight but the weight, and only the inputs where no gradient leaves."""

    def kept(weight, inputs):
        quantized, _ = layers(kind, bias=False)
        quantized.weight.requires_grad_(weight)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(tuple(t.shape)) or t, lambda t: t):
            quantized(torch.randn(7, 64).bfloat16().requires_grad_(inputs))
        return sizes

    assert kept(True, True) == [(7, 64), (32, 64)]
    assert kept(False, True) == [(32, 64)]
    assert kept(True, False) == [(7, 64)]


@by_kind
def test_a_gradient_of_a_gradient_is_refused(kind):
    quantized, _ = layers(kind)
    inputs = torch.randn(2, 64, requires_grad=True)
    with pytest.raises(UserError, match=rf"precision={kind}: second derivatives"):
        torch.autograd.grad(quantized(inputs).sum(), inputs, create_graph=True)


class Own(nn.Linear):
    pass


def test_which_layers():
    suited = nn.Linear(16, 32)
    others = [nn.Linear(16, 24), nn.Linear(8, 16), Own(16, 16), nn.Conv2d(16, 16, 1), nn.MultiheadAttention(16, 2)]
    assert quantizable([nn.Sequential(suited, *others), suited]) == [suited]


# Runs


@by_kind
def test_the_head_and_the_names_stay(tmp_path, kind):
    run = runs.prepare(tmp_path / "quantized", *GPT, f"precision={kind}")
    plain = runs.prepare(tmp_path / "plain", *GPT, "precision=bf16")
    model = run.state.model
    assert type(model.head) is nn.Linear
    assert {type(m) for block in model.blocks() for m in block.modules() if isinstance(m, nn.Linear)} == {
        QuantizedLinear
    }
    assert runs.differences(model.state_dict(), plain.state.model.state_dict()) == []
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    run.close()
    plain.close()


@pytest.mark.slow
@by_kind
def test_it_learns_as_bf16_does(tmp_path, kind):
    def last_loss(precision):
        learning = ("train.max_steps=300", "every.log=300", "schedule=constant", "optimizer.lr=3e-4")
        runs.run(tmp_path / precision, *GPT, *learning, f"precision={precision}")
        return metrics(tmp_path / precision)[-1]["loss"]

    assert last_loss(kind) == pytest.approx(last_loss("bf16"), rel=0.02)


# Refusals


@by_kind
def test_a_device_that_cannot(kind):
    """None is here whose kernels are missing: the message is that of a device that does not exist."""
    with pytest.raises(UserError, match=rf"^precision={kind}: xpu:9 cannot multiply.*use precision=bf16$"):
        require_kernels(kind, torch.device("xpu:9"))
