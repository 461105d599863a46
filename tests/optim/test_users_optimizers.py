"""Optimizers of users' that wrap others, want a closure, or keep attributes: as SAM and Lookahead are written."""

import pytest
import runs
import torch
from torch import nn

from trainapp.config import schema
from trainapp.errors import UserError
from trainapp.optim.optimizers import build_optimizer, step_without_effect

CPU = torch.device("cpu")
PACKAGES = ["test_users_optimizers"]


class Wrapper(torch.optim.Optimizer):
    """Passes all keywords that it does not know on to a base optimizer, as SAM does."""

    base = torch.optim.SGD

    def __init__(self, params, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.inner = self.base(self.param_groups, **kwargs)
        self.param_groups = self.inner.param_groups

    def step(self, closure=None):
        self.inner.step()


class Undecayed(Wrapper):
    base = torch.optim.Rprop


def built(name, **settings):
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    return build_optimizer(schema.Optimizer(target=f"{PACKAGES[0]}.{name}", **settings), model, CPU, PACKAGES)


def test_rate_and_decay_are_passed_on():
    optimizer = built("Wrapper", lr=0.5, weight_decay=0.1, arguments={"momentum": 0.9})
    decays = [(group["weight_decay"], [p.ndim for p in group["params"]]) for group in optimizer.inner.param_groups]
    assert decays == [(0.1, [2, 2]), (0.0, [1, 1])]
    assert optimizer.inner.defaults["weight_decay"] == 0.1
    assert {group["lr"] for group in optimizer.inner.param_groups} == {0.5}
    assert {group["momentum"] for group in optimizer.inner.param_groups} == {0.9}


def test_decay_of_all_parameters_is_passed_on():
    optimizer = built("Wrapper", weight_decay=0.1, decay="all")
    assert {group["weight_decay"] for group in optimizer.inner.param_groups} == {0.1}


def test_what_is_not_set_is_the_wrapped_ones_default():
    optimizer = built("Wrapper")
    (group,) = optimizer.inner.param_groups
    assert (group["lr"], group["weight_decay"]) == (1e-3, 0)


def test_a_wrapped_optimizer_without_decay_says_so():
    with pytest.raises(TypeError, match="weight_decay"):
        built("Undecayed", weight_decay=0.1)


# --- closures


class Asserting(torch.optim.SGD):
    def step(self, closure=None):
        assert closure is not None, "Sharpness Aware Minimization requires closure, but it was not provided"


class Bare(torch.optim.SGD):
    def step(self, closure=None):
        assert closure is not None


class Calling(torch.optim.SGD):
    def step(self, closure=None):
        return closure()


class Failing(torch.optim.SGD):
    def step(self, closure=None):
        assert self.defaults is None, "another reason"


@pytest.mark.parametrize("name", ["Asserting", "Bare", "Calling"])
def test_a_step_that_fails_without_a_closure_is_refused_by_name(tmp_path, name):
    target = f"test_users_optimizers.{name}"
    own = (*runs.MODELS["mlp"], f"optimizer._target_={target}", f"user_packages={PACKAGES}")
    with pytest.raises(UserError) as refusal:
        runs.run(tmp_path, *own)
    assert str(refusal.value).startswith(f"optimizer._target_={target}: its step requires a closure, ")


def test_another_error_of_a_step_stays_as_it_is(tmp_path):
    own = (*runs.MODELS["mlp"], "optimizer._target_=test_users_optimizers.Failing", f"user_packages={PACKAGES}")
    with pytest.raises(AssertionError, match="another reason"):
        runs.run(tmp_path, *own)


# --- attributes


class Counting(torch.optim.SGD):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr, momentum=0.9)
        self.steps = 0
        self.history = [0]

    def step(self, closure=None):
        super().step()
        self.steps += 1
        self.history.append(self.steps)
        self.last = "a step"


def test_a_step_without_effect_leaves_attributes_alone():
    optimizer = built("Counting")
    step_without_effect(optimizer)
    assert len(optimizer.state) == 4
    assert (optimizer.steps, optimizer.history) == (0, [0])
    assert not hasattr(optimizer, "last")
