"""Which settings make an experiment: every one has its place, and spelling is no difference."""

import copy
import dataclasses
import json

import helpers
import pytest

from trainapp.config import compose, identity
from trainapp.config.schema import Config

BASE = compose.from_command_line(["model=mlp", "data=synthetic_images", "schedule=wsd", "schedule.warmup=0"]).to_dict()


def changed(values, *before_default):
    """BASE with `{"section.key": value}`, and what is different from BASE."""
    return identity.differences(
        json.loads(json.dumps(BASE, default=str)), helpers.changed(BASE, values), *before_default
    )


def test_every_setting_has_its_place():
    """A new setting belongs into RESULT, where another value is another experiment, or into FREE."""
    plain = BASE | {name: BASE[name] | {"arguments": {}} for name in ("data", "model", "optimizer")}
    placed = identity.names(identity.RESULT) | identity.names(identity.FREE)
    assert identity.settings(plain).keys() == placed
    assert identity.names(identity.RESULT) & identity.names(identity.FREE) == set()


def test_no_setting_of_the_schema_is_hidden_by_its_section():
    top = {field.name for field in dataclasses.fields(Config)} - set(identity.NOT_SETTINGS)
    sections = {name.partition(".")[0] for name in identity.settings(BASE)}
    assert sections == top - {"loader", "task_arguments"}


def update(**optimizer):
    """A generator that is trained by SGD with these settings."""
    settings = {"target": "torch.optim.SGD", "lr": 0.1, "arguments": {"momentum": 0.9}, **optimizer}
    return [{"name": "generator", "task": "gan.generate", "parameters": ["generator"], "optimizer": settings}]


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({}, []),
        ({"lr": 0.2, "fused": True, "offload": True}, ["updates.generator.optimizer.lr"]),
        ({"lr": 0.1 + 0, "groups": [], "weight_decay": 0}, []),
        ({"arguments": {"momentum": 0.5}}, ["updates.generator.optimizer.momentum"]),
        ({"target": "torch.optim.Adam", "arguments": {}}, ["updates.generator.optimizer._target_"]),
    ],
)
def test_settings_of_updates_are_compared_one_by_one(changes, differing):
    before, after = BASE | {"updates": update()}, BASE | {"updates": update(**changes)}
    assert [name for name, _, _ in identity.differences(before, after)] == differing
    assert "updates" in [name for name, _, _ in identity.differences(BASE, after)]


@pytest.mark.parametrize(
    ("values", "differing"),
    [
        ({"optimizer.lr": 0.5}, ["optimizer.lr"]),
        ({"train.seed": 1, "train.max_steps": 3, "every.eval": 2, "memory.limit": "1GiB"}, ["train.seed"]),
        ({"model.arguments.width": 3}, ["model.width"]),
        ({"loader.drop_last": True, "loader.num_workers": 2}, ["data.drop_last"]),
        ({"model.target": "trainapp.models.resnet.ResNet", "model.arguments": {"depth": 9}}, ["model._target_"]),
        ({"objective": "max accuracy", "mode": "eval"}, ["objective"]),
        ({"checkpointing.load": "weights", "checkpointing.resume": "x"}, ["checkpointing.load"]),
        ({"batch.global_size": 8, "batch.micro_size": 4, "parallel.strategy": "ddp"}, ["batch.global_size"]),
        ({"schedule.warmup": "3 epochs"}, ["schedule.warmup"]),
        ({"optimizer.arguments.betas": [0.1, 0.2]}, ["optimizer.betas"]),
        ({"optimizer.groups": [{"match": ["head"], "lr": 1.0}]}, ["optimizer.groups"]),
        ({"schedule.target": "torch.optim.lr_scheduler.StepLR"}, ["schedule._target_"]),
    ],
)
def test_differences_are_named_as_users_write_them(values, differing):
    assert [name for name, _, _ in changed(values)] == differing


@pytest.mark.parametrize(
    "values",
    [
        {"optimizer.lr": 1.0 * BASE["optimizer"]["lr"]},
        {"schedule.warmup": "0 epochs"},
        {"schedule.decay": "20.0 percent"},
        {"model.arguments.width": float(BASE["model"]["arguments"]["width"])},
        {"data.arguments.image_shape": tuple(BASE["data"]["arguments"]["image_shape"])},
        {"optimizer.arguments.foreach": False},
        {"run_dir": "elsewhere", "command": "another"},
    ],
)
def test_spelling_is_no_difference(values):
    assert changed(values) == []


def test_two_names_of_a_file_are_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("weights.pt", "others.pt"):
        (tmp_path / name).touch()
    before = BASE | {"model": BASE["model"] | {"init_from": "weights.pt"}}
    for name, differing in (("weights.pt", []), ("others.pt", ["model.init_from"]), ("none.pt", ["model.init_from"])):
        after = BASE | {"model": BASE["model"] | {"init_from": str(tmp_path / name)}}
        assert [found[0] for found in identity.differences(before, after)] == differing


def test_a_setting_of_a_newer_version_had_its_default():
    older = copy.deepcopy(BASE)
    del older["checkpointing"]["load"], older["oom"], older["model"]["freeze"]
    assert identity.differences(older, BASE) == []
    after = BASE | {"model": BASE["model"] | {"freeze": ["head"]}}
    assert [name for name, _, _ in identity.differences(older, after)] == ["model.freeze"]


def test_an_argument_that_one_side_does_not_name_has_its_constructors_default():
    def default(section, target, argument):
        assert (section, argument) == ("model", "more")
        return 7

    assert changed({"model.arguments.more": 7}, default) == []
    assert changed({"model.arguments.more": 8}, default) == [("model.more", 7, 8)]
    assert changed({"model.arguments.more": 8}) == []  # without imports it is left open


def test_weights_to_begin_with_are_those_of_one_run():
    def of(source):
        return BASE | {"checkpointing": BASE["checkpointing"] | {"load": "weights", "resume": source}}

    assert identity.differences(of("runs/a"), of("./runs/a")) == []
    assert identity.differences(of("runs/a"), of("auto")) == []
    assert identity.differences(of("runs/a"), of("runs/b")) == [("checkpointing.resume", "runs/a", "runs/b")]


def test_the_metric_behind_the_objective_is_part_of_the_experiment():
    """The best so far would be compared with other numbers. Other metrics come and go."""
    f1 = {"target": "own.F1", "arguments": {"average": "macro"}}
    before = BASE | {"objective": "max f1/0", "metrics": {"f1": f1}}
    micro = before | {"metrics": {"f1": {**f1, "arguments": {"average": "micro"}}}}
    assert [name for name, _, _ in identity.differences(before, micro)] == ["metrics.f1"]
    assert identity.differences(before, before | {"metrics": {"f1": f1, "other": f1}, "callbacks": {"own": f1}}) == []


def test_the_validation_set_behind_the_objective_is_part_of_the_experiment():
    hard, easy = ({"target": "own.Set", "arguments": {"noise": noise}} for noise in (0.6, 0.1))
    f1 = {"target": "own.F1", "arguments": {}}
    before = BASE | {"objective": "max hard/f1", "eval": {"hard": hard}, "metrics": {"f1": f1}}
    assert [name for name, _, _ in identity.differences(before, before | {"eval": {"hard": easy}})] == ["eval.hard"]
    assert [name for name, _, _ in identity.differences(before, before | {"metrics": {}})] == ["metrics.f1"]
    assert identity.differences(before, before | {"eval": {"hard": hard, "easy": easy}}) == []
