"""A `_target_` on the command line starts from an empty group."""

import pytest
import runs
from helpers import run_cli

from trainapp.config import compose
from trainapp.config.inline_targets import expanded
from trainapp.errors import UserError

RMSPROP = "optimizer._target_=torch.optim.RMSprop"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["train.seed=1"], ["train.seed=1"]),
        ([RMSPROP], ["~optimizer", f"++{RMSPROP}"]),
        ([f"+{RMSPROP}", "optimizer.alpha=0.9"], ["~optimizer", f"++{RMSPROP}", "++optimizer.alpha=0.9"]),
        # What is removed from the default's settings is not there; what an earlier call has expanded stays as it is.
        (["~optimizer.betas", RMSPROP], ["~optimizer", f"++{RMSPROP}"]),
        (["~optimizer", f"++{RMSPROP}"], ["~optimizer", f"++{RMSPROP}"]),
        ([f"++{RMSPROP}", "~optimizer.amsgrad"], [f"++{RMSPROP}", "~optimizer.amsgrad"]),  # of an experiment's file
        # What the command line itself has given can be removed by what is appended to it.
        (
            [RMSPROP, "optimizer.alpha=0.9", "~optimizer.alpha"],
            ["~optimizer", f"++{RMSPROP}", "++optimizer.alpha=0.9", "~optimizer.alpha"],
        ),
        (["~optimizer.eps", RMSPROP, "optimizer.eps=1"], ["~optimizer", f"++{RMSPROP}", "++optimizer.eps=1"]),
        # The settings of an option that is chosen stay.
        (["optimizer=sgd", "optimizer._target_=mine.SGD"], ["optimizer=sgd", "optimizer._target_=mine.SGD"]),
        # Of several groups, only those; flags and their values stay where they are.
        (
            [
                "--config-dir",
                "model",
                "-m",
                "train.seed=4",
                "model._target_=mine.Net",
                "model.width=1,2",
            ],
            ["--config-dir", "model", "-m", "train.seed=4", "~model", "++model._target_=mine.Net", "++model.width=1,2"],
        ),
        (
            ["model={_target_: a.B, width: 5}", "model.width=7"],
            ["~model", "++model={_target_: a.B, width: 5}", "model.width=7"],
        ),
        (["model={width: 5}", "task={_target_: a.b}"], ["model={width: 5}", "task={_target_: a.b}"]),
        (["optimizer.lr=1"], ["optimizer.lr=1"]),
        (["optimizer=adamw", "model._target_=a.B"], ["optimizer=adamw", "~model", "++model._target_=a.B"]),
        (["hydra.run.dir='a=b'", RMSPROP], ["hydra.run.dir='a=b'", "~optimizer", f"++{RMSPROP}"]),
    ],
)
def test_what_the_overrides_stand_for(given, meant):
    assert expanded(given) == meant


def test_a_mapping_takes_the_place_of_the_option(tmp_path):
    given = ("model={_target_: torch.nn.Linear, in_features: 64, out_features: 5}", "model.out_features=10")
    model = runs.configure(tmp_path, *given, "optimizer={_target_: torch.optim.SGD, lr: 0.5}")
    assert (model.model.target, model.model.arguments) == ("torch.nn.Linear", {"in_features": 64, "out_features": 10})
    assert (model.optimizer.lr, model.optimizer.arguments) == (0.5, {})


def test_an_optimizer_has_the_defaults_of_its_class(tmp_path):
    """Neither betas nor a rate nor a decay of AdamW's."""
    config = runs.configure(tmp_path, *runs.MODELS["mlp"], RMSPROP, "optimizer.alpha=0.9")
    assert config.optimizer.arguments == {"alpha": 0.9}
    assert (config.optimizer.lr, config.optimizer.weight_decay, config.optimizer.fused) == (None, 0.0, "auto")
    run = runs.prepare(tmp_path, *runs.MODELS["mlp"], RMSPROP, "optimizer.alpha=0.9")
    run.close()
    assert {group["lr"] for group in run.state.optimizer.param_groups} == {0.01}  # torch's own
    assert {group["alpha"] for group in run.state.optimizer.param_groups} == {0.9}


def test_common_settings_stay(tmp_path):
    config = runs.configure(tmp_path, "model._target_=mine.Net", "model.freeze=[head]", "model.depth=2")
    assert (config.model.target, config.model.arguments, config.model.freeze) == ("mine.Net", {"depth": 2}, ["head"])
    data = runs.configure(tmp_path, "data._target_=mine.Data", "data.num_workers=3", "data.path=x")
    assert (data.data.arguments, data.loader.num_workers) == ({"path": "x"}, 3)


def test_an_experiment_that_chooses_an_option(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text("# @package _global_\ndefaults:\n  - override /optimizer: sgd\n")
    config = compose.from_command_line(["experiment=mine", RMSPROP], config_dir=tmp_path)
    assert (config.optimizer.target, config.optimizer.arguments) == ("torch.optim.RMSprop", {})


def test_a_setting_of_another_class_is_no_setting(tmp_path):
    with pytest.raises(UserError, match=r"optimizer\.betas: no such setting"):
        runs.prepare(tmp_path, *runs.MODELS["mlp"], RMSPROP, "optimizer.betas=[0.9,0.99]")


@pytest.mark.parametrize("name", ["constant", "cosine"])
def test_an_option_without_a_class_is_to_be_left_out(name):
    target = "schedule._target_=torch.optim.lr_scheduler.StepLR"
    message = rf"schedule\._target_: the option schedule={name} names no class .*leave it out: schedule\._target_=CLASS"
    with pytest.raises(UserError, match=message):
        compose.from_command_line([f"schedule={name}", target, "schedule.step_size=2"])
    alone = compose.from_command_line([target, "schedule.step_size=2"])
    assert (alone.schedule.target, alone.schedule.arguments) == (
        "torch.optim.lr_scheduler.StepLR",
        {"step_size": 2},
    )


@pytest.mark.slow
def test_from_the_command_line_in_a_sweep(tmp_path):
    """Every job of it, and the command that resumes one."""
    given = ("-m", "optimizer._target_=torch.optim.RMSprop,torch.optim.SGD", "optimizer.momentum=0.5")
    done = run_cli(*given, *runs.TINY, *runs.MODELS["mlp"], f"hydra.sweep.dir={tmp_path / 'sweep'}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for number in (0, 1):
        text = (tmp_path / f"sweep/{number}/.hydra/config.yaml").read_text()
        assert "betas" not in text
        assert "momentum: 0.5" in text
