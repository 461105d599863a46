"""Models whose constructors do more than make parameters: draw until values fit, as `nn.init.trunc_normal_` does, or
convert themselves, as `self.half()` and peft do.
"""

import weakref
from typing import ClassVar

import pytest
import torch
from torch import nn

from trainapp.assembly.components import Components
from trainapp.config.schema import Precision
from trainapp.optim import precision
from trainapp.planning import models
from trainapp.planning.values import MadeUpValues
from trainapp.torch_private import fake_tensor_mode, is_fake, is_tracing

CPU = torch.device("cpu")


class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        for self.draws in range(5):  # for ever, in torch's function
            if not (self.weight > 2).any():
                break


class Converts(nn.Module):
    """`built`: whether on the meta device."""

    built: ClassVar[list[bool]] = []

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.twin = self.layer
        self.register_buffer("seen", torch.zeros(()))
        self.layer.weight.rate = 2.0
        self.refers = weakref.ref(self.layer.weight)  # so that torch cannot swap it under a fake mode
        self.half()
        self.built.append(self.layer.weight.is_meta)


class HoldsATensor(Converts):
    """Which is neither a parameter nor a buffer."""

    def __init__(self):
        super().__init__()
        self.table = {"positions": torch.arange(4)}


@pytest.mark.parametrize(("kind", "on_meta"), [(Converts, [True]), (HoldsATensor, [True, False])])
def test_what_converts_itself_takes_no_memory_if_nothing_else_is_left_without_values(kind, on_meta):
    components = Components(kind, task=None, train_data=None, eval_data={}, spec={})
    Converts.built.clear()
    values = MadeUpValues()
    with fake_tensor_mode() as mode, values:
        numerics = precision.build(Precision(), CPU)
        model = models.built_somehow(components, mode.from_tensor, None, CPU, numerics, values)()
    assert Converts.built == on_meta
    assert all(is_fake(tensor) and tensor.device == CPU for tensor in (*model.parameters(), *model.buffers()))
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.half}
    assert model.twin.weight is model.layer.weight
    assert model.layer.weight.rate == 2.0
    if kind is HoldsATensor:
        assert model.table["positions"].tolist() == [0, 1, 2, 3]
    assert not is_tracing()


def test_a_model_draws_once_also_where_the_optimizer_has_no_state_yet():
    components = Components(Draws, task=None, train_data=None, eval_data={}, spec={})
    values = MadeUpValues()
    with fake_tensor_mode() as mode, values:
        values.state_is_late = True
        numerics = precision.build(Precision(), CPU)
        build = models.built_somehow(components, mode.from_tensor, None, CPU, numerics, values)
        assert build().draws == 0
        assert Draws().draws == 4  # what the optimizer's questions are answered with
        assert values.state_is_late
