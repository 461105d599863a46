"""The typed configuration: rules, messages, sizes."""

from dataclasses import fields, is_dataclass
from typing import get_args

import helpers
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from trainapp.config.compose import VERSION_BASE, from_dict
from trainapp.config.modes import ACTIVITIES, Mode
from trainapp.config.schema import Batch, Config
from trainapp.errors import UserError
from trainapp.files import CONF
from trainapp.units import parse_memory_size


def composed(*overrides):
    """The configuration that the YAML files give for these overrides, as plain containers."""
    with initialize_config_dir(str(CONF), **VERSION_BASE):
        return OmegaConf.to_container(compose("train", list(overrides)), resolve=True)


PLAIN = composed()


def changed(**settings):
    """The default configuration with `section__key=value` changed."""
    return helpers.changed(PLAIN, {path.replace("__", "."): value for path, value in settings.items()})


# Rules


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train__seed": -1}, "train.seed=-1: must be greater than or equal to 0"),
        ({"train__max_steps": "10"}, "train.max_steps=10: must be a valid integer"),
        ({"train__max_time": 3600}, "train.max_time=3600: must be a time such as 11h50m or '90 minutes', or auto"),
        ({"train__max_time": "0s"}, "train.max_time=0s: must be a time such as"),
        ({"every__eval": "20 minutes"}, "every.eval=20 minutes: must be a number of steps, or like"),
        (
            {"every__log": "1h"},
            "every.log=1h: must be a number of steps, or like '2 epochs', '10000 samples', '5 percent'; every.save",
        ),
        ({"every__save": "20 parsecs"}, "every.save=20 parsecs: must be a number of steps"),
        ({"train__compile": "yes"}, "train.compile=yes: must be a valid boolean"),
        ({"train__grad_clip": 0.0}, "train.grad_clip=0.0: must be greater than 0"),
        ({"train__device": "gpu"}, "train.device=gpu: must be 'auto', 'cpu', 'cuda' or 'mps'"),
        ({"train__ema": 1.0}, "train.ema=1.0: must be less than 1"),
        ({"optimizer__lr": float("nan")}, "optimizer.lr=nan: must be a finite number"),
        ({"batch__micro_size": "small"}, "batch.micro_size=small: must be 'auto' or a valid integer"),
        ({"objective": "accuracy"}, "objective=accuracy: must be auto, or like 'max accuracy' or 'min loss'"),
        ({"mode": "test"}, "mode=test: must be 'train', 'eval'"),
        ({"data__num_workers": -1}, "data.num_workers=-1: must be 'auto' or greater than or equal to 0"),
        ({"optimizer__groups": [{"match": "x", "lr": -1}]}, "optimizer.groups.0.lr=-1: must be greater than 0"),
        ({"metrics": {"f1": {"width": 1}}}, "metrics.f1={'width': 1}: must have a `_target_`, the class to build"),
        ({"metrics": {"a b": {"_target_": "x"}}}, "metrics.a b=a b: String should match pattern"),
        ({"eval": {"val": {"_target_": "x"}}}, "eval.val=val: must consist of letters, digits, _ and -"),
        ({"task": {"width": 1}}, "task={'width': 1}: must be a valid string"),
        ({"user_packages": "mine"}, "user_packages=mine: must be a valid list"),
        (
            {"user_packages": [float("inf")]},
            "user_packages.0=inf: must be a valid string; YAML does not read it as one: write it in quotes",
        ),
    ],
)
def test_value_out_of_its_rule(settings, message):
    with pytest.raises(UserError) as refused:
        from_dict(changed(**settings))
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_the_default_is_accepted_and_keeps_its_values():
    config = from_dict(PLAIN, "a/run", "a command")
    assert (config.train.seed, config.train.max_steps, config.batch.micro_size) == (0, None, "auto")
    assert (config.run_dir, config.command) == ("a/run", "a command")
    assert config.model.target == "trainapp.models.resnet.ResNet"
    assert config.model.arguments["depth"] == 18
    assert "init_from" not in config.model.arguments
    assert config.optimizer.lr == PLAIN["optimizer"]["lr"]
    assert set(config.optimizer.arguments) == {"betas", "eps"}
    assert config.data.arguments == {"augment": PLAIN["data"]["augment"]}
    assert config.data.num_workers == "auto"


@pytest.mark.parametrize(
    ("schedule", "by_update"),
    [
        (None, {"": {}}),
        ({1: 64, 30: 32}, {"": {1: 64, 30: 32}}),
        ({1: 16, 3: {128: 16}}, {"": {1: 16, 3: {128: 16}}}),
        ('{"1": 16, "3": {"128": 16}}', {"": {1: 16, 3: {128: 16}}}),  # as in result.json
        ({"a": {1: 64}, "b": {"2": 3}}, {"a": {1: 64}, "b": {2: 3}}),
    ],
)
def test_schedule_of_micro_batches(schedule, by_update):
    assert Batch(micro_schedule=schedule).schedules == by_update


@pytest.mark.parametrize(
    "schedule", [{0: 4}, {"one": 4}, {1: 0}, {1: 2.5}, {1: "4"}, {1: {64: 0}}, {1: {}}, {}, 32, "32", "{"]
)
def test_a_schedule_of_another_form(schedule):
    with pytest.raises(UserError, match=r"batch.micro_schedule=.*must give sizes by the step from which they apply"):
        from_dict(changed(batch__micro_schedule=schedule))


def test_arguments_of_classes_are_apart_from_settings():
    update = {"name": "a", "task": {"_target_": "my.Loss", "width": 2}, "parameters": ["x"], "optimizer": {"lr": 1}}
    config = from_dict(
        changed(
            updates=[update, update | {"name": "b", "optimizer": {"_target_": "my.SGD", "nesterov": True}}],
            schedule={"_target_": "my.Schedule", "warmup": 3, "decay": 2},
            metrics={"f1": {"_target_": "my.F1", "target": 3}, "left_out": None},
            task={"_target_": "my.loss", "scale": 2},
        )
    )
    first, second = config.updates
    assert (first.task, first.task_arguments) == ("my.Loss", {"width": 2})
    assert (first.optimizer.lr, first.optimizer.arguments) == (1, config.optimizer.arguments)
    assert (second.optimizer.target, second.optimizer.arguments) == ("my.SGD", {"nesterov": True})
    assert (config.schedule.warmup, config.schedule.arguments) == (0, {"warmup": 3, "decay": 2})
    assert {name: own.arguments for name, own in config.metrics.items()} == {"f1": {"target": 3}}
    assert (config.task, config.task_arguments) == ("my.loss", {"scale": 2})


def test_all_mistakes_are_in_one_error():
    plain = changed(train__seed=-1, batch__micro_sze=3, optimizer__lr="fast", nonsense=1, run_dir="x")
    del plain["model"]
    with pytest.raises(UserError) as refused:
        from_dict(plain)
    starts = {line.partition(":")[0] for line in str(refused.value).splitlines()}
    assert starts == {"train.seed=-1", "batch.micro_sze", "optimizer.lr=fast", "nonsense", "run_dir", "model"}


def test_plain_form_has_every_value_and_no_object():
    def kinds(node):
        if isinstance(node, dict):
            return set().union(*(kinds(value) for value in node.values()), set())
        if isinstance(node, list):
            return set().union(*(kinds(value) for value in node), set())
        return {type(node)}

    plain = from_dict(PLAIN).to_dict()
    assert kinds(plain) <= {int, float, str, bool, type(None)}
    assert set(plain) == {field.name for field in fields(Config)}


# Memory sizes


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (1000, 1000),
        ("1000", 1000),
        ("1KiB", 1024),
        ("1kb", 1000),
        ("1.5 MiB", 3 * 2**19),
        ("8GiB", 8 * 2**30),
        (0.5, 5000),
        ("0.25", 2500),
        (1.0, 10000),
        (1, 1),
        (1e9, 10**9),
    ],
)
def test_memory_size_in_bytes(value, size):
    assert parse_memory_size(value, total=10000) == size


@pytest.mark.parametrize("value", ["banana", "", "-1", -5, 0, 0.0, "0GiB", "GiB", "1 XiB", True, "8 Gi B", "50%"])
def test_memory_size_that_is_none(value):
    with pytest.raises(ValueError, match=r"must be bytes, a size such as 8GiB or 500MB, or a fraction"):
        parse_memory_size(value, total=10000)


# What can be typed


def leaves(kind=Config, path=""):
    """The dotted name of every setting of the dataclasses, as a user writes it."""
    found = set()
    for field in fields(kind):
        name = {"target": "_target_"}.get(field.name, field.name)
        if field.name in ("run_dir", "command", "arguments", "task_arguments", "given", "started", "sweeper_direction"):
            continue
        dotted = f"{path}.{name}" if path else name
        found |= leaves(field.type, dotted) if is_dataclass(field.type) else {dotted}
    return found


@pytest.mark.slow
def test_every_setting_can_be_typed_without_a_plus():
    """Hydra refuses `name=value` for a name that no YAML file has."""
    known = set()
    for group in sorted({path.parent.name for path in CONF.glob("*/*.yaml")} - {"experiment", "debug", "hydra"}):
        for option in sorted((CONF / group).glob("*.yaml")):
            known |= {group} | _paths(composed(f"{group}={option.stem}"))
    assert leaves() - known == set()


def _paths(node, path=""):
    if not isinstance(node, dict) or not node:
        return {path}
    return set().union(*(_paths(value, f"{path}.{key}" if path else key) for key, value in node.items()))


def test_the_table_of_modes_has_each_of_them():
    assert set(ACTIVITIES) == set(get_args(Mode))
