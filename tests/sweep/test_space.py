"""The search space: what Hydra's grammar means, and what it would accept in silence."""

import math

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from trainapp.config import compose
from trainapp.errors import UserError
from trainapp.files import CONF
from trainapp.sweep.space import Dimension, parse


@pytest.fixture
def loader():
    with initialize_config_dir(str(CONF), **compose.VERSION_BASE):
        yield GlobalHydra.instance().config_loader()


def test_what_is_swept_and_what_is_fixed(loader):
    space = parse(
        [
            *("model=glob(*t, exclude=[v*])", "+a.b=range(1,4)", "optimizer.lr=tag(log,interval(1e-4,1e-1))"),
            *("model.width=int(interval(4,8))", "train.seed=3", "~debug", "sweep.trials=20", "c=[1,2],[3]"),
        ],
        loader,
    )
    assert space.fixed == ("train.seed=3", "~debug")  # and nothing of the sweep itself
    assert space.dimensions == (
        Dimension("model", ("gpt", "resnet")),
        Dimension("+a.b", ("1", "2", "3")),
        Dimension("optimizer.lr", (), 1e-4, 1e-1, is_log=True),
        Dimension("model.width", (), 4, 8, is_whole=True),
        Dimension("c", ("[1,2]", "[3]")),
    )
    assert space.intervals == ["optimizer.lr", "model.width"]
    assert space.swept_overrides(("gpt", "2", "0.01", "5", "[3]"))[:2] == ["model=gpt", "+a.b=2"]


def test_each_choice_and_both_ends_are_checked(loader):
    space = parse(["a=1,2,3", "b=interval(0,1)"], loader)
    assert space.size == math.inf
    assert list(space.covering()) == [("1", "0.0"), ("2", "0.0"), ("3", "0.0"), ("1", "1.0")]


def test_a_grid_has_every_configuration_in_order(loader):
    space = parse(["a=1,2", "b=x,y"], loader)
    assert list(space.grid()) == [("1", "x"), ("1", "y"), ("2", "x"), ("2", "y")]
    assert space.size == 4


def test_the_later_of_two_overrides_counts(loader):
    space = parse(["a=1,2", "b=1", "a=5", "b=3,4"], loader)
    assert space.fixed == ("a=5",)
    assert space.dimensions == (Dimension("b", ("3", "4")),)
    assert [of.key for of in parse(["a=1", "b=1,2", "a=3,4"], loader).dimensions] == ["a", "b"]  # as `continue` has it


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model=glob(nothing*)", "no value at all"),
        ("train.seed=range(3,3)", "no value at all"),
        ("train.seed=1,2,1", "1 is given twice"),
        ("optimizer.lr=interval(1,0.1)", r"start must be less than its end: interval\(0.1,1\)"),
        ("optimizer.lr=tag(log,interval(0,1))", "must start above 0"),
        ("optimizer.lr=tag(uniform,interval(0,1))", "the tag uniform has no meaning"),
        ("sweep.trials=1,2", "a setting of the sweep itself has one value"),
    ],
)
def test_what_would_pass_in_silence(loader, override, message):
    with pytest.raises(UserError, match=message):
        parse([override], loader)


def test_a_value_of_an_interval_is_short_and_inside():
    assert Dimension("lr", (), 1e-4, 1e-1).text(0.0123456789) == "0.0123457"
    assert Dimension("lr", (), 1e-4, 0.123456789).text(0.1234567890) == "0.123456789"  # its end, unrounded
    assert Dimension("width", (), 4, 8, is_whole=True).text(5.0) == "5"
