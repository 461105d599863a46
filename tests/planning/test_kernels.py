"""Fake kernels, as corrected, against the CPU's own."""

import pytest
import torch

from trainapp.planning.values import MadeUpValues
from trainapp.torch_private import fake_tensor_mode, storage_id

aten = torch.ops.aten


def results(dtype, weights):
    """`{operation: dtypes and sizes of its results}`. On fake tensors inside a fake mode."""
    inputs = torch.ones(4, 8, 6, 6).to(dtype)
    rows = torch.ones(4, 8).to(dtype)
    w = None if weights is None else torch.ones(8, dtype=weights)
    running = torch.zeros(8), torch.ones(8)
    given = [True, w is not None, w is not None]
    statistics = torch.ones(4, 2, dtype=dtype if w is None else weights)
    found = {
        "batch norm": aten.native_batch_norm(inputs, w, w, *running, True, 0.1, 1e-5),
        "batch norm, evaluation": aten.native_batch_norm(inputs, w, w, *running, False, 0.1, 1e-5),
        "group norm": aten.native_group_norm(inputs, w, w, 4, 8, 36, 2, 1e-5),
        "layer norm": aten.native_layer_norm(rows, [8], w, w, 1e-5),
        "group norm, backward": aten.native_group_norm_backward(
            inputs, inputs, statistics, statistics, w, 4, 8, 36, 2, given
        ),
    }
    if weights is None:
        others = torch.zeros(4, 8, dtype=dtype)
        for name in ("mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy"):
            for reduction in ("mean", "sum", "none"):
                loss = getattr(torch.nn.functional, name)(rows, others, reduction=reduction)
                found[f"{name}, {reduction}"] = [loss]
    return {
        name: [None if t is None else (t.dtype, tuple(t.shape), t.untyped_storage().nbytes()) for t in tensors]
        for name, tensors in found.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [None, torch.float32])
def test_norms_return_what_the_cpu_returns(dtype, weights):
    real = results(dtype, weights)
    with fake_tensor_mode(), MadeUpValues():
        assert results(dtype, weights) == real


def test_the_biases_of_an_lstm_have_a_gradient_each():
    weights, states = [torch.zeros(16, 4)] * 2 + [torch.zeros(16)] * 2, [torch.zeros(2, 4)] * 2
    data, workspace = torch.zeros(3, 2, 4), torch.zeros(0, dtype=torch.uint8)
    rest = (data, None, None, False, 2, 4, 1, True, True, False, [], False, workspace)
    with fake_tensor_mode(), MadeUpValues():
        results = aten.mkldnn_rnn_layer_backward(data, *weights, *states, data, *states, *rest)
    assert len({storage_id(result.untyped_storage()) for result in results}) == 7
    with fake_tensor_mode():  # when this fails, torch has changed, and the correction may go
        results = aten.mkldnn_rnn_layer_backward(data, *weights, *states, data, *states, *rest)
    assert len({storage_id(result.untyped_storage()) for result in results}) == 6


def test_without_the_correction_they_do_not():
    """When this fails, torch has changed, and the correction may go."""
    real = results(torch.bfloat16, torch.float32)
    with fake_tensor_mode():
        fake = results(torch.bfloat16, torch.float32)
    assert {name for name in real if fake[name] != real[name]} == set(real)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.AdamW])
def test_fused_optimizers_are_not_run_for_real(kind):
    """On zeros of the size of the parameters, as torch does where it has no fake kernel: here 256 GiB each."""
    with fake_tensor_mode(), MadeUpValues():
        weights = torch.nn.Parameter(torch.empty(2**36))
        weights.grad = torch.empty_like(weights)
        kind([weights], lr=0.1, fused=True).step()
