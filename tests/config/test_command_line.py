"""Overrides that the program writes are read back by Hydra as they were meant; a `_target_` begins an empty group."""

import pytest
import runs
from helpers import run_cli
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from trainapp.config import command_line, compose

NAMES = ["/runs/a", "runs", "1", "null", "1e3", "/größe/日本", "/a b,c", "/a=[{(:", "/it's", "/a\\\\'", "/a\\", '/"']
NAMES += ["/${oc.env:HOME}", "/\\${x}", "/a\\\\${x}\\\\"]


@pytest.fixture(scope="module")
def read_back(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conf")
    (folder / "own.yaml").write_text("place: null\n")
    with initialize_config_dir(str(folder), **compose.VERSION_BASE):
        yield lambda text: OmegaConf.to_container(hydra_compose("own", [text]), resolve=True)["place"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_read_back(read_back, name):
    assert read_back(command_line.override("place", name)) == name


def test_a_plain_path_stays_as_it_is():
    assert command_line.override("hydra.run.dir", "/runs/a-1_b.c") == "hydra.run.dir=/runs/a-1_b.c"


# What users need not write

OF_A_RUN = ["mode=predict", "checkpointing.resume=x"]
RMSPROP = "optimizer._target_=torch.optim.RMSprop"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["--config-dir", "data.x", "-m", "optimizer.lr=1"], ["--config-dir", "data.x", "-m", "optimizer.lr=1"]),
        # Overrides on both sides of a flag, which Hydra's parser refuses.
        (
            ["model=mlp", "--config-dir", "a=b", "optimizer=sgd", "-m", "seed=1,2", "--cfg=job", "-p", "x", "~data"],
            ["--config-dir", "a=b", "-m", "--cfg=job", "-p", "x", "model=mlp", "optimizer=sgd", "seed=1,2", "~data"],
        ),
        # Settings of a run's data, unless other data is chosen.
        ([*OF_A_RUN, "data.path=x", "model.width=1"], [*OF_A_RUN, "++data.path=x", "model.width=1"]),
        ([*OF_A_RUN, "data=digits", "data.seed=1"], [*OF_A_RUN, "data=digits", "data.seed=1"]),
        ([*OF_A_RUN, "experiment=mine", "data.seed=1"], [*OF_A_RUN, "experiment=mine", "data.seed=1"]),
        (["checkpointing.resume=x", "data.seed=1"], ["checkpointing.resume=x", "data.seed=1"]),
    ],
)
def test_what_stands_for_hydras_overrides(given, meant):
    assert command_line.for_hydra(given) == meant


# A class in place of an option. test_replaced_options.py tests classes that YAML files name.


@pytest.mark.parametrize("mark", ["", "+", "++"])
def test_it_has_the_defaults_of_its_class_and_common_settings_stay(mark):
    """Neither betas nor a rate nor a decay of AdamW's."""
    optimizer = compose.from_command_line([f"{mark}{RMSPROP}", "optimizer.alpha=0.9", "~optimizer.betas"]).optimizer
    assert (optimizer.lr, optimizer.weight_decay, optimizer.arguments) == (None, None, {"alpha": 0.9})
    model = compose.from_command_line(["model._target_=mine.Net", "model.freeze=[head]", "model.depth=2"]).model
    assert (model.target, model.arguments, model.freeze) == ("mine.Net", {"depth": 2}, ["head"])
    given = ("model={_target_: torch.nn.Linear, in_features: 64, out_features: 5}", "model.out_features=10")
    assert compose.from_command_line(given).model.arguments == {"in_features": 64, "out_features": 10}
    schedule = compose.from_command_line(["schedule._target_=torch.optim.lr_scheduler.StepLR", "schedule.step_size=2"])
    assert schedule.schedule.arguments == {"step_size": 2}


def test_the_settings_of_an_option_that_is_chosen_stay():
    own = compose.from_command_line(["optimizer=sgd", "optimizer._target_=mine.SGD"]).optimizer
    assert (own.target, own.lr, own.arguments) == ("mine.SGD", 0.1, {"momentum": 0.9, "nesterov": True})


def test_settings_without_a_class_change_the_option():
    assert compose.from_command_line(["model={width: 5}", "task={_target_: a.b}"]).model.arguments["width"] == 5


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


def test_changes_take_the_place_and_the_mark_of_what_they_change():
    given = ["-m", "++model.width=8", "+model.note=a,b", "~data.drop_last", "model=mlp"]
    changed = command_line.with_changes(given, ["model.width=16", "model.note=a,b,c", "seed=1"])
    assert changed == ["-m", "++model.width=16", "+model.note=a,b,c", "~data.drop_last", "model=mlp", "seed=1"]
    assert command_line.with_changes(given, ["model=resnet"]) == [*given[:-1], "model=resnet"]


@pytest.mark.parametrize(
    "given",
    [
        ["model._target_=mine.Net", "model.width=8"],
        ["+model={_target_: mine.Net}", "model.width=8"],
        ["~model", "++model._target_=mine.Net", "++model.width=8"],  # as earlier versions recorded it
    ],
)
def test_where_an_option_is_chosen_a_class_goes_with_its_settings(given):
    assert command_line.with_changes([*given, "seed=1"], ["seed=2", "model=mlp"]) == ["seed=2", "model=mlp"]
    changes = ["model._target_=mine.Other", "model=mlp"]
    assert command_line.with_changes(given, changes) == changes


def test_overrides_on_both_sides_of_a_flag(tmp_path):
    """On the old code the parser called the second an unrecognized argument."""
    done = run_cli("model=mlp", "--config-dir", str(tmp_path), "optimizer=sgd", "--cfg", "job", cwd=tmp_path)
    assert "_target_: torch.optim.SGD" in done.stdout
    assert "_target_: trainapp.models.mlp.MLP" in done.stdout
