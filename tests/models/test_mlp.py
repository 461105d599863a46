import torch
from torch import nn

from trainapp.models.mlp import MLP


def test_digits_default_has_three_layers_of_256():
    model = MLP((1, 8, 8), 10)
    shapes = [tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Linear)]
    assert shapes == [(256, 64), (256, 256), (10, 256)]
    assert sum(p.numel() for p in model.parameters()) == 64 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10
    assert len(model.blocks()) == 2


def test_forward_is_linear_relu_linear():
    torch.manual_seed(0)
    model = MLP([3, 4, 4], 5, width=7, depth=2)
    x = torch.randn(6, 3, 4, 4)
    hidden = model.layers[0][0]
    expected = (x.reshape(6, 48) @ hidden.weight.T + hidden.bias).clamp(min=0) @ model.head.weight.T
    torch.testing.assert_close(model(x), expected + model.head.bias)


def test_depth_1_is_linear():
    model = MLP((1, 2, 2), 3, depth=1)
    x = torch.randn(4, 1, 2, 2)
    torch.testing.assert_close(model(2 * x) - model(x), model(x) - model(0 * x))
    assert model.blocks() == []
