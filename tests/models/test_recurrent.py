"""Recurrent layers with dropout train without cuDNN. The switch exists without a GPU; its effect is in tests/gpu."""

import pytest
import torch
from torch import nn

from trainapp.models.recurrent import layers_with_dropout, train_without_cudnn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.dropped = nn.LSTM(4, 4, num_layers=2, dropout=0.5)
        self.single = nn.GRU(4, 4)  # nothing is dropped after the last layer
        self.whole = nn.RNN(4, 4, num_layers=2)


@pytest.fixture
def switches():
    """`switches(net, name)`: cuDNN's switch inside and after a forward of this layer."""
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = True

    def of_forward(net, name, inputs):
        layer = getattr(net, name)
        found = []
        layer.register_forward_pre_hook(lambda *_: found.append(torch.backends.cudnn.enabled))
        try:
            layer(inputs)
        finally:
            found.append(torch.backends.cudnn.enabled)
        return found

    yield of_forward
    torch.backends.cudnn.enabled = before


def test_which_layers_they_are():
    assert list(layers_with_dropout(Net())) == ["dropped"]


def test_only_those_in_training(switches):
    net = Net()
    train_without_cudnn(net)
    inputs = torch.zeros(3, 2, 4)
    assert switches(net, "dropped", inputs) == [False, True]
    assert switches(net, "single", inputs) == switches(net, "whole", inputs) == [True, True]
    net.eval()
    assert switches(net, "dropped", inputs)[-2:] == [True, True]


def test_the_switch_comes_back_after_an_error(switches):
    net = Net()
    train_without_cudnn(net)
    with pytest.raises(RuntimeError):
        switches(net, "dropped", torch.zeros(3, 2, 5))
    assert torch.backends.cudnn.enabled
