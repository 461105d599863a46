"""What the program reads from a model of any class."""

import pytest
from torch import nn

from trainapp.errors import UserError
from trainapp.models.inspect import blocks_of


class WithMethod(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))

    def blocks(self):
        return self.layers


class WithModule(nn.Module):
    """As many image models have it. A module can be called, too."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))


def test_blocks_come_from_a_method_of_that_name():
    model = WithMethod()
    assert blocks_of(model, "some.setting=x") == list(model.layers)
    with pytest.raises(UserError, match=r"some\.setting=x: WithModule does not declare its blocks"):
        blocks_of(WithModule(), "some.setting=x")


class Wrapped(nn.Module):
    """The model with an attribute `blocks`, as the message advises."""

    def __init__(self):
        super().__init__()
        self.model = WithModule()

    def blocks(self):
        return list(self.model.blocks)


def test_the_advice_for_an_attribute_of_that_name_can_be_followed():
    """On the old code it was to add a method of the same name, which would hide the attribute from the forward."""
    with pytest.raises(UserError, match=r"its attribute `blocks`, a Sequential, .* wrap the model in a module"):
        blocks_of(WithModule(), "some.setting=x")
    wrapped = Wrapped()
    assert blocks_of(wrapped, "some.setting=x") == list(wrapped.model.blocks)
