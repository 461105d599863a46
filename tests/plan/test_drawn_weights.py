"""A model whose constructor draws until its values fit, as `nn.init.trunc_normal_` does, can be planned."""

import torch
from torch import nn

from trainapp.config.schema import Precision
from trainapp.optim import precision
from trainapp.plan import models
from trainapp.plan.values import MadeUpValues
from trainapp.torch_private import fake_tensor_mode
from trainapp.train.components import Components

CPU = torch.device("cpu")


class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        for self.draws in range(5):  # for ever, in torch's function
            if not (self.weight > 2).any():
                break


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
