"""Overrides that the program writes are read back by Hydra as they were meant; a `_target_` begins an empty group."""

import random

import pytest
import runs
from helpers import run_cli
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from trainapp.config import command_line, compose

NAMES = [
    *("/runs/a", "runs", "1", "null", "true", "1e3", "/größe/é/日本", "/a b", "/a,b", "/a=[{(:", "/\t\n"),
    *(
        "/it's",
        "/a\\'b",
        "/a\\\\'",
        "/a\\",
        "/a\\\\",
        '/"',
        "/${oc.env:HOME}",
        "/\\${x}",
        "/${",
        "/$",
        "/a\\\\${x}\\\\",
    ),
]


@pytest.fixture(scope="module")
def read_back(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conf")
    (folder / "own.yaml").write_text("place: null\n")
    with initialize_config_dir(str(folder), version_base="1.3"):
        yield lambda text: OmegaConf.to_container(hydra_compose("own", [text]), resolve=True)["place"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_read_back(read_back, name):
    assert read_back(command_line.override("place", name)) == name


@pytest.mark.slow
def test_any_name_is_read_back(read_back):
    drawn = random.Random(0)
    parts = ["\\", "'", '"', "$", "{", "}", "${", "a", " ", ",", "[", "=", ":", "ü", "("]
    for _ in range(100):
        name = "/" + "".join(drawn.choices(parts, k=drawn.randrange(8)))
        assert read_back(command_line.override("place", name)) == name


def test_a_plain_path_stays_as_it_is():
    assert command_line.override("hydra.run.dir", "/runs/a-1_b.c") == "hydra.run.dir=/runs/a-1_b.c"


# A class in place of an option

RMSPROP = "optimizer._target_=torch.optim.RMSprop"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["optimizer.lr=1"], ["optimizer.lr=1"]),
        ([f"+{RMSPROP}", "optimizer.alpha=0.9"], ["~optimizer", f"++{RMSPROP}", "++optimizer.alpha=0.9"]),
        # What is removed from the default's settings is not there; what an earlier call has expanded stays as it is.
        (["~optimizer.betas", RMSPROP], ["~optimizer", f"++{RMSPROP}"]),
        (["~optimizer", f"++{RMSPROP}"], ["~optimizer", f"++{RMSPROP}"]),
        # The settings of an option that is chosen stay.
        (["optimizer=sgd", "optimizer._target_=mine.SGD"], ["optimizer=sgd", "optimizer._target_=mine.SGD"]),
        # Flags and their values stay where they are.
        (
            ["--config-dir", "model", "-m", "train.seed=4", "model._target_=mine.Net", "model.width=1,2"],
            ["--config-dir", "model", "-m", "train.seed=4", "~model", "++model._target_=mine.Net", "++model.width=1,2"],
        ),
        (["model={_target_: a.B, width: 5}"], ["~model", "++model={_target_: a.B, width: 5}"]),
        (["model={width: 5}", "task={_target_: a.b}"], ["model={width: 5}", "task={_target_: a.b}"]),
    ],
)
def test_what_a_class_in_place_of_an_option_stands_for(given, meant):
    assert command_line.with_own_classes(given) == meant


def test_it_has_the_defaults_of_its_class_and_common_settings_stay():
    """Neither betas nor a rate nor a decay of AdamW's."""
    optimizer = compose.from_command_line([RMSPROP, "optimizer.alpha=0.9"]).optimizer
    assert (optimizer.lr, optimizer.weight_decay, optimizer.arguments) == (None, 0.0, {"alpha": 0.9})
    model = compose.from_command_line(["model._target_=mine.Net", "model.freeze=[head]", "model.depth=2"]).model
    assert (model.target, model.arguments, model.freeze) == ("mine.Net", {"depth": 2}, ["head"])
    given = ("model={_target_: torch.nn.Linear, in_features: 64, out_features: 5}", "model.out_features=10")
    assert compose.from_command_line(given).model.arguments == {"in_features": 64, "out_features": 10}
    schedule = compose.from_command_line(["schedule._target_=torch.optim.lr_scheduler.StepLR", "schedule.step_size=2"])
    assert schedule.schedule.arguments == {"step_size": 2}


def test_with_an_experiment_that_chooses_an_option(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text("# @package _global_\ndefaults:\n  - override /optimizer: sgd\n")
    config = compose.from_command_line(["experiment=mine", RMSPROP], config_dir=tmp_path)
    assert (config.optimizer.target, config.optimizer.arguments) == ("torch.optim.RMSprop", {})


@pytest.mark.slow
def test_in_a_sweep(tmp_path):
    given = ("-m", "optimizer._target_=torch.optim.RMSprop,torch.optim.SGD", "optimizer.momentum=0.5")
    done = run_cli(*given, *runs.TINY, *runs.MODELS["mlp"], f"hydra.sweep.dir={tmp_path / 'sweep'}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for number in (0, 1):
        text = (tmp_path / f"sweep/{number}/.hydra/config.yaml").read_text()
        assert "betas" not in text
        assert "momentum: 0.5" in text
