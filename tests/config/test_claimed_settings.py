"""A value whose name is a setting's, and also a parameter of the user's class, is the class's argument. On the old code
it was the setting's, and the class kept its default; one that cannot be a setting was refused.
"""

import logging

import pytest
import runs
import torch
from torch import nn

from trainapp.assembly.resolved_targets import locate_targets
from trainapp.config import compose, resume_rules
from trainapp.config.claimed_settings import with_claimed_settings
from trainapp.data.sets.digits import Digits
from trainapp.errors import UserError


class Set(Digits):
    def __init__(self, split, seed: int = 0, drop_last: bool = True, num_workers=None, sampling: str = "none"):
        super().__init__(split, seed)
        self.received = drop_last, num_workers, sampling


class Net(nn.Module):
    def __init__(self, freeze: bool = False, init_from: str = "nothing"):
        super().__init__()
        self.received = freeze, init_from
        self.body = nn.Linear(64, 16)
        self.head = nn.Linear(16, 10)
        self.body.requires_grad_(not freeze)

    def forward(self, images):
        return self.head(self.body(images.flatten(1)))


class Sgd(torch.optim.SGD):
    def __init__(self, params, lr: float = 0.1, decay: float = 0.0, weight_decay: float = 0.0):
        super().__init__(params, lr, weight_decay=weight_decay)
        self.received = decay


OWN = (
    "user_packages=[test_claimed_settings]",
    "data._target_=test_claimed_settings.Set",
    "model._target_=test_claimed_settings.Net",
    "optimizer._target_=test_claimed_settings.Sgd",
)


def composed(*overrides):
    return compose.from_command_line([*runs.TINY, *OWN, *overrides])


def test_the_class_gets_them_and_the_settings_keep_their_defaults(tmp_path, caplog):
    values = ("data.drop_last=true", "data.num_workers=2", "data.sampling=rare", "model.freeze=true")
    given = (*OWN, *values, "model.init_from=imagenet", "optimizer.decay=0.5", "optimizer.weight_decay=0.25")
    with caplog.at_level(logging.INFO):
        session = runs.prepare(tmp_path, *given)
    assert session.batches.dataset.received == (True, 2, "rare")
    assert session.state.model.received == (True, "imagenet")
    assert session.state.optimizers[0].received == 0.5
    assert session.config.data.drop_last is False
    assert session.config.data.num_workers == "auto"
    assert (session.config.model.freeze, session.config.model.init_from) == ([], None)
    assert {group["weight_decay"] for group in session.state.optimizers[0].param_groups} == {0.0, 0.25}
    assert "model.freeze=true is an argument of test_claimed_settings.Net, which has a parameter" in caplog.text
    assert "to use the setting of trainapp, rename the parameter" in caplog.text


def test_unwritten_ones_keep_the_defaults_of_the_class(tmp_path):
    session = runs.prepare(tmp_path, *OWN)
    assert session.batches.dataset.received == (True, None, "none")
    assert session.state.model.received == (False, "nothing")


def test_a_default_of_the_setting_is_passed_from_the_command_line():
    """With a default of its own, the class would not get it otherwise. Twice is as once."""
    config = with_claimed_settings(composed("data.drop_last=false", "model.freeze=[body]"))
    assert config.data.arguments == {"drop_last": False}
    assert config.model.arguments == {"freeze": ["body"]}
    again = with_claimed_settings(config)
    assert again == config
    config = with_claimed_settings(composed("data.drop_last=true"))
    assert with_claimed_settings(config) == config
    assert config.data.arguments == {"drop_last": True}


@pytest.mark.parametrize("chosen", ["+experiment=mine", "data={_target_: test_claimed_settings.Set, drop_last: false}"])
def test_a_default_of_the_setting_is_passed_where_a_file_or_a_section_writes_it(tmp_path, chosen):
    """On the old code it was taken for one that was not written, and the class had its own default, true."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(
        "# @package _global_\n"
        "user_packages: [test_claimed_settings]\n"
        "data: {_target_: test_claimed_settings.Set, drop_last: false, num_workers: auto, on_change: refuse}\n"
    )
    packages = "user_packages=[test_claimed_settings]"
    config = compose.from_command_line([*runs.TINY, packages, chosen.lstrip("+")], config_dir=tmp_path)
    claimed = with_claimed_settings(config)
    assert claimed.data.arguments["drop_last"] is False
    assert "on_change" not in claimed.data.arguments  # the class has no such parameter
    assert claimed.data.on_change == "refuse"
    assert claimed.data.arguments.get("num_workers") == ("auto" if "experiment" in chosen else None)
    assert with_claimed_settings(claimed) == claimed
    locate_targets(claimed)


def needy(split, drop_last):
    """A data set that requires it."""


def test_a_required_parameter_gets_it():
    config = with_claimed_settings(composed("data._target_=test_claimed_settings.needy"))
    assert config.data.arguments == {"drop_last": False}
    locate_targets(config)


def test_it_is_no_change_of_the_experiment():
    """A checkpoint has the arguments; `mode` and directory are judged before the class is imported."""
    config = composed("data.drop_last=true", "model.freeze=[body]")
    assert resume_rules.changes(with_claimed_settings(config).to_dict(), config.to_dict()) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.init_strict=maybe", r"^model\.init_strict=maybe: must be a valid boolean$"),
        ("data.on_change=ask", r"^data\.on_change=ask: must be 'refuse' or 'next_epoch'$"),
        ("model.freeze=[body]", r"^model\.freeze=\['body'\]: .*boolean"),
    ],
)
def test_what_is_neither_is_refused(override, message):
    with pytest.raises(UserError, match=message):
        locate_targets(with_claimed_settings(composed(override)))


def test_a_class_of_trainapp_has_no_such_parameters():
    with pytest.raises(UserError, match=r"model\.freeze=true: must be a valid list"):
        compose.from_command_line(["model.freeze=true"])
