"""A class that a YAML file or the command line names in place of a group's option begins with its own defaults; what
the user wrote, the settings common to the group, and an option chosen beside the class stay.
"""

import hydra
import pytest
import runs
import yaml
from helpers import lines, metrics, run_cli, train
from hydra import initialize_config_dir

from trainapp.config import compose
from trainapp.errors import UserError

NADAM = "optimizer: {_target_: torch.optim.NAdam, lr: 1e-3}\n"
SUBMITIT = "hydra/launcher=submitit_local hydra.launcher.timeout_min=2"
OWN_SGD = "optimizer: {_target_: mine.SGD}\n"
SGD_OPTION = {"momentum": 0.9, "nesterov": True}


def write(folder, path, text):
    """A configuration for the whole of it, such as an experiment."""
    file = folder / f"{path}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"# @package _global_\n{text}")


@pytest.fixture
def composed(tmp_path):
    """Composes `experiment=mine` of this text with these overrides; other files may lie in `tmp_path`."""

    def composed(text, *overrides):
        write(tmp_path, "experiment/mine", text)
        return compose.from_command_line(["experiment=mine", *overrides], config_dir=tmp_path)

    return composed


# The default option goes


@pytest.mark.parametrize("name", ["NAdam", "SGD", "AdamW"])
def test_an_optimizer(composed, name):
    """Neither a decay nor a rate nor betas of conf/optimizer/adamw.yaml, also for its own class."""
    text = f"optimizer: {{_target_: torch.optim.{name}, groups: [{{match: head, lr: 1}}]}}\n"
    optimizer = composed(text).optimizer
    assert (optimizer.lr, optimizer.weight_decay, optimizer.arguments) == (None, None, {})
    assert (optimizer.fused, optimizer.groups) == ("auto", [{"match": ["head"], "lr": 1}])


def test_a_schedule(composed):
    schedule = composed("schedule: {_target_: torch.optim.lr_scheduler.StepLR, step_size: 30}\n").schedule
    assert (schedule.arguments, schedule.warmup) == ({"step_size": 30}, 0)
    schedule = composed("schedule: {_target_: torch.optim.lr_scheduler.StepLR, warmup: 5 percent}\n").schedule
    assert (schedule.arguments, schedule.warmup) == ({"warmup": "5 percent"}, 0)


def test_a_model(composed):
    model = composed("model: {_target_: mine.Net, config: {width: 3}, freeze: [head]}\n", "model.config.depth=2").model
    assert (model.arguments, model.freeze, model.init_strict) == ({"config": {"width": 3, "depth": 2}}, ["head"], True)


def test_a_data_set(composed):
    data = composed("data: {_target_: mine.Data, num_workers: 0}\n", "data.size=3").data
    assert (data.arguments, data.num_workers, data.drop_last) == ({"size": 3}, 0, False)


# What stays


@pytest.mark.parametrize("value", ["[0.9, 0.999]", "[0.8, 0.9]"])
def test_what_is_written_beside_the_class(composed, value):
    """Also where it equals the default option's."""
    optimizer = composed(f"optimizer: {{_target_: torch.optim.NAdam, betas: {value}, weight_decay: 0.05}}\n").optimizer
    assert (optimizer.arguments, optimizer.weight_decay) == ({"betas": yaml.safe_load(value)}, 0.05)


def test_what_other_files_write(composed, tmp_path):
    write(tmp_path, "local/default", "optimizer: {eps: 1e-6}\n")
    write(tmp_path, "experiment/base", "optimizer: {lr: 0.5}\n")
    optimizer = composed("defaults: [base]\noptimizer: {_target_: torch.optim.NAdam}\n").optimizer
    assert (optimizer.lr, optimizer.arguments) == (0.5, {"eps": 1e-6})


def test_an_option_that_is_chosen_beside_it(composed):
    optimizer = composed(f"defaults:\n  - override /optimizer: sgd\n{OWN_SGD}").optimizer
    assert (optimizer.target, optimizer.lr, optimizer.arguments) == ("mine.SGD", 0.1, SGD_OPTION)


def test_an_option_that_the_command_line_chooses(composed):
    """Not in silence: the user may expect the option's own class."""
    with pytest.raises(UserError, match=r"optimizer=sgd: experiment/mine sets optimizer\._target_, whose class"):
        composed(OWN_SGD, "optimizer=sgd")
    chosen = composed(OWN_SGD, "optimizer=sgd", "optimizer._target_=mine.SGD").optimizer
    assert (chosen.target, chosen.arguments) == ("mine.SGD", SGD_OPTION)


def test_an_option_that_is_built_on_another(composed, tmp_path):
    """It names its class over its own choice."""
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer/own.yaml").write_text("defaults: [adamw]\n_target_: mine.AdamW\neps: 1.0\n")
    optimizer = composed("defaults:\n  - override /optimizer: own\n").optimizer
    assert (optimizer.target, optimizer.arguments) == ("mine.AdamW", {"betas": [0.9, 0.999], "eps": 1.0})
    assert composed("defaults:\n  - override /optimizer: own\n", "optimizer._target_=x.Y").optimizer.arguments == {}


def test_an_option_for_the_whole_configuration(composed, tmp_path):
    """It is like an experiment: not only of its group."""
    write(tmp_path, "model/own", "model: {_target_: mine.Net, width: 3}\nbatch: {global_size: 7}\n")
    config = composed("defaults:\n  - override /model: own\n")
    assert (config.model.arguments, config.batch.global_size) == ({"width": 3}, 7)


# An experiment that derives from another

STEP_LR = "schedule: {_target_: torch.optim.lr_scheduler.StepLR, step_size: 30, warmup: 5}\n"
MINE = "defaults: [base]\nschedule: {_target_: mine.rate, low: 0.1}\n"


@pytest.mark.parametrize(
    "base",
    [
        STEP_LR,
        "schedule: {warmup: 5, final: 0.1}\n",
        "defaults:\n  - override /schedule: wsd\nschedule: {decay: 10, low: 1}\n",
        "schedule: {_target_: mine.other, low: null, part: {_target_: a.B}}\n",
    ],
)
def test_settings_of_the_former_class_or_option_go(composed, tmp_path, base):
    """On the old code they became arguments of the new class: an error, or worse, values where it knows their names."""
    write(tmp_path, "experiment/base", base)
    schedule = composed(MINE, "~schedule.final", "schedule.warmup=7").schedule
    assert (schedule.target, schedule.arguments) == ("mine.rate", {"low": 0.1, "warmup": 7})
    assert composed(MINE).schedule.arguments == {"low": 0.1}


def test_what_is_written_for_the_same_class_stays(composed, tmp_path):
    write(tmp_path, "experiment/first", "schedule: {_target_: mine.other, high: 1}\n")
    write(tmp_path, "experiment/base", "defaults: [first]\nschedule: {_target_: mine.rate, high: 2}\n")
    write(tmp_path, "local/default", "schedule: {last: 3}\n")
    assert composed(MINE).schedule.arguments == {"high": 2, "low": 0.1, "last": 3}
    assert composed("defaults: [base]\nschedule: {low: 5}\n").schedule.arguments == {"high": 2, "low": 5, "last": 3}


def test_it_is_so_for_every_class(composed, tmp_path):
    """Settings of the program stay."""
    write(
        tmp_path,
        "experiment/base",
        "model: {_target_: a.B, width: 3, freeze: [head]}\n"
        "data: {_target_: a.B, path: x, num_workers: 2}\n"
        "optimizer: {_target_: a.B, lr: 0.5, betas: 1}\n"
        "task: {_target_: a.B, scale: 2}\n"
        "metrics: {f1: {_target_: a.B, classes: 2}}\n"
        "eval: {hard: {_target_: a.B, path: y}}\n",
    )
    config = composed(
        "defaults: [base]\n"
        "model: {_target_: c.D}\n"
        "data: {_target_: c.D}\n"
        "optimizer: {_target_: c.D}\n"
        "task: {_target_: c.D}\n"
        "metrics: {f1: {_target_: c.D}}\n"
        "eval: {hard: {_target_: c.D}}\n"
    )
    nodes = (config.model, config.data, config.optimizer, config.metrics["f1"], config.eval["hard"])
    assert [node.arguments for node in nodes] == [{}] * 5
    assert (config.model.freeze, config.data.num_workers, config.optimizer.lr) == (["head"], 2, 0.5)
    assert (config.task, config.task_arguments) == ("c.D", {})


def test_a_class_on_the_command_line_changes_the_class_alone(composed):
    """What the files write stays, also of the task: on the old code its arguments were dropped."""
    text = "task: {_target_: a.B, scale: 2}\nmodel: {_target_: a.B, scale: 2}\n" + STEP_LR
    given = ("task._target_=c.D", "model._target_=c.D", "schedule._target_=c.D", "task.shift=1")
    config = composed(text, *given)
    assert (config.task, config.task_arguments) == ("c.D", {"scale": 2, "shift": 1})
    assert (config.model.target, config.model.arguments) == ("c.D", {"scale": 2})
    assert (config.schedule.target, config.schedule.arguments) == ("c.D", {"step_size": 30, "warmup": 5})
    config = composed(text, "task=c.D")
    assert (config.task, config.task_arguments) == ("c.D", {})


# Which file decides


def test_the_last_file_that_names_a_class(composed, tmp_path):
    """It has not chosen the option that the experiment has."""
    write(tmp_path, "local/default", "optimizer: {_target_: mine.Local}\n")
    optimizer = composed(f"defaults:\n  - override /optimizer: sgd\n{OWN_SGD}").optimizer
    assert (optimizer.target, optimizer.arguments) == ("mine.Local", {})


def test_an_experiment_over_another(composed, tmp_path):
    write(tmp_path, "experiment/base", "defaults:\n  - override /optimizer: sgd\n")
    assert composed(f"defaults: [base]\n{OWN_SGD}").optimizer.arguments == {}
    assert composed("defaults: [base]\noptimizer: {momentum: 0.5}\n").optimizer.arguments == SGD_OPTION | {
        "momentum": 0.5
    }


def test_another_validation_set(composed):
    """Its option is chosen with the class, or before it."""
    chosen = "defaults:\n  - /data@eval.hard: digits\n"
    assert composed(f"{chosen}eval: {{hard: {{_target_: mine.Set}}}}\n").eval["hard"].arguments == {"augment": False}
    own = ("eval.hard._target_=mine.Set", "eval.hard.size=3")
    assert composed(chosen, *own).eval["hard"].arguments == {"size": 3}
    assert composed("", "+data@eval.hard=digits", own[0]).eval["hard"].arguments == {"augment": False}


def test_an_update_with_a_class(composed):
    """It does not begin with the common optimizer, either."""
    updates = (
        "updates:\n"
        "  - {name: a, task: classification, parameters: [a], optimizer: {_target_: torch.optim.SGD}}\n"
        "  - {name: b, task: classification, parameters: [b], optimizer: {lr: 2}}\n"
    )
    first, second = composed(NADAM + updates).updates
    assert (first.optimizer.lr, first.optimizer.weight_decay, first.optimizer.arguments) == (None, None, {})
    assert (second.optimizer.target, second.optimizer.lr) == ("torch.optim.NAdam", 2)


# The command line


def test_its_settings_need_no_plus(composed):
    optimizer = composed(NADAM, "optimizer.betas=[0.8,0.9]", "+optimizer.lr=0.5", "~optimizer.eps").optimizer
    assert (optimizer.lr, optimizer.arguments) == (0.5, {"betas": [0.8, 0.9]})
    without = composed("optimizer: {_target_: torch.optim.NAdam, eps: 1}\n", "~optimizer.eps").optimizer
    assert without.arguments == {}


def test_as_earlier_versions_recorded_it():
    given = ["~optimizer", "++optimizer._target_=torch.optim.RMSprop", "++optimizer.alpha=0.9"]
    assert compose.from_command_line(given).optimizer.arguments == {"alpha": 0.9}


def test_without_an_option(composed):
    text = "defaults:\n  - override /model: null\nmodel: {_target_: mine.Net}\n"
    assert composed(text).model.arguments == {}


def test_another_programs_configuration_is_left_alone(tmp_path):
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer/adam.yaml").write_text("_target_: a.Adam\nbetas: 1\n")
    (tmp_path / "main.yaml").write_text("defaults: [optimizer: adam, _self_]\n")
    with initialize_config_dir(str(tmp_path), **compose.VERSION_BASE):
        own = hydra.compose("main", ["optimizer._target_=a.SGD"])
    assert own == {"optimizer": {"_target_": "a.SGD", "betas": 1}}


def shown(tmp_path, *arguments):
    done = run_cli(*arguments, "--cfg", "job", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)


@pytest.mark.slow
def test_cfg_shows_what_runs(tmp_path):
    """Of an experiment, and of a primary configuration beside and over train.yaml."""
    write(tmp_path, "experiment/mine", NADAM)
    write(tmp_path, "mine", f"defaults: [train, _self_]\n{NADAM}")
    write(tmp_path, "chosen", f"defaults: [train, _self_, override optimizer: sgd]\n{OWN_SGD}")
    given = ("--config-dir", str(tmp_path))
    for name in ("experiment=mine", "--config-name=mine"):
        optimizer = shown(tmp_path, *given, name)["optimizer"]
        assert "betas" not in optimizer
        assert (optimizer["lr"], optimizer["weight_decay"]) == (1e-3, None)
    assert shown(tmp_path, *given, "--config-name=chosen")["optimizer"]["momentum"] == 0.9


# Runs


@pytest.mark.slow
def test_a_run_is_resumed_with_the_same_class(tmp_path):
    """By its command, by `trainapp continue` with a later end, and as the origin of another."""
    write(tmp_path, "experiment/mine", f"{NADAM}model: {{_target_: trainapp.models.mlp.MLP, width: 8}}\n")
    given = ("--config-dir=.", "experiment=mine", *runs.TINY, "data=digits", "optimizer.eps=1e-6", "every.save=2")
    train(tmp_path / "a", *given, "train.max_steps=2")
    written = yaml.safe_load((tmp_path / "a/.hydra/config.yaml").read_text())["optimizer"]
    assert written.keys() >= {"_target_", "lr", "eps"}
    assert "betas" not in written
    done = run_cli("continue", "a", "train.max_steps=4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    train(tmp_path / "b", *given)
    of_both = [[line["loss"] for line in metrics(tmp_path / name) if "loss" in line] for name in "ab"]
    assert of_both[0] == of_both[1]
    assert len(of_both[0]) == 4
    train(tmp_path / "c", "mode=predict", "checkpointing.resume=a", "train.device=cpu", cwd=tmp_path)
    assert len(lines(tmp_path / "c/predictions.jsonl")) > 0
    rerun = run_cli("rerun", "a", "optimizer._target_=torch.optim.RAdam", "hydra.run.dir=d", cwd=tmp_path)
    assert rerun.returncode == 0, rerun.stderr
    assert "RAdam" in (tmp_path / "d/.hydra/config.yaml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "by",
    ["hydra/sweeper=trainapp", "hydra/sweeper=basic", "hydra/launcher=submitit_local hydra.launcher.timeout_min=2"],
)
def test_a_sweep_over_experiments(tmp_path, by):
    """One names a class, another has the default option. submitit composes a job in the job's own process."""
    write(tmp_path, "experiment/mine", NADAM)
    write(tmp_path, "experiment/plain", "optimizer: {lr: 1e-2}\n")
    given = ("--config-dir=.", "-m", *runs.TINY, *runs.MODELS["mlp"], *by.split(), "tracker=[]")
    done = run_cli(*given, "experiment=mine,plain", "hydra.sweep.dir=sweep", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    paths = [tmp_path / f"sweep/{job}/.hydra/config.yaml" for job in (0, 1)]
    own, plain = (yaml.safe_load(path.read_text())["optimizer"] for path in paths)
    assert (own["_target_"], own["weight_decay"]) == ("torch.optim.NAdam", None)
    assert (plain["_target_"], plain["weight_decay"]) == ("torch.optim.AdamW", 0.05)
    assert "betas" in plain
    assert "betas" not in own


def test_a_decay_that_the_class_does_not_have(tmp_path):
    own = ("optimizer._target_=torch.optim.Rprop", "optimizer.weight_decay=0.1")
    with pytest.raises(UserError, match=r"optimizer\.weight_decay=0\.1: torch\.optim\.Rprop has no weight decay; use"):
        runs.run(tmp_path, *runs.MODELS["mlp"], *own)


def test_an_option_that_a_later_experiment_chooses(composed, tmp_path):
    """Its class is replaced by that of an earlier file, which is not done in silence, either."""
    write(tmp_path, "experiment/base", "optimizer: {_target_: torch.optim.NAdam, lr: 1e-3}\n")
    message = r"experiment/mine chooses optimizer=sgd: experiment/base sets optimizer\._target_, whose class"
    with pytest.raises(UserError, match=message):
        composed("defaults: [base, override /optimizer: sgd]\noptimizer: {lr: 0.5}\n")
    chosen = composed("defaults: [base, override /optimizer: sgd]\noptimizer: {_target_: mine.SGD}\n").optimizer
    assert (chosen.target, chosen.arguments) == ("mine.SGD", SGD_OPTION)
