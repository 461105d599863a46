"""Which settings a run keeps in its directory, and which may change."""

import copy
import dataclasses

import helpers

from trainapp.config import compose, resume_rules
from trainapp.config.schema import Config

BASE = compose.from_command_line(["model=mlp", "data=synthetic_images", "schedule=wsd"]).to_dict()


def experiment(changed):
    """The changes that make another experiment, and the others, by name."""
    found = resume_rules.changes(BASE, helpers.changed(BASE, changed))
    return [c.name for c in found if c.is_another_experiment], [c.name for c in found if not c.is_another_experiment]


def test_what_makes_the_result_must_match():
    changed = {
        "model.target": "own.Model",
        "model.arguments.width": 3,
        "data.arguments.size": 3,
        "data.drop_last": True,
    }
    changed |= {"task": "own.loss", "optimizer.lr": 0.5, "schedule.warmup": 5, "objective": "min loss"}
    changed |= {"train.seed": 5, "batch.global_size": 5}
    as_written = {path.replace(".arguments.", ".").replace(".target", "._target_") for path in changed}
    assert experiment(changed) == (sorted(as_written), [])


def test_where_and_how_it_is_computed_may_change():
    changed = {"train.max_steps": 5, "every.save": 5, "memory.limit": "1GiB", "batch.micro_size": 5}
    changed |= {"activation_checkpointing.modes": ["full"], "activation_checkpointing.compiled_budget": 0.5}
    changed |= {"data.num_workers": 5, "optimizer.fused": False, "parallel.strategy": "ddp"}
    assert experiment(changed) == ([], sorted(changed))


def test_updates_are_compared_setting_by_setting():
    def configured(**optimizer):
        settings = {"target": "torch.optim.SGD", "lr": 0.1, "arguments": {"momentum": 0.9}, **optimizer}
        update = {"name": "generator", "task": "gan.generate", "parameters": ["g"], "optimizer": settings}
        return BASE | {"updates": [update]}

    changes = resume_rules.changes(configured(), configured(lr=0.2, fused=True, arguments={"momentum": 0.5}))
    assert [(c.name, c.is_another_experiment) for c in changes] == [
        ("updates.generator.optimizer.fused", False),
        ("updates.generator.optimizer.lr", True),
        ("updates.generator.optimizer.momentum", True),
    ]
    assert str(changes[1]) == "updates.generator.optimizer.lr: 0.1 before, 0.2 now"


def test_what_is_no_setting_of_the_run_is_not_compared():
    assert resume_rules.changes(BASE, copy.deepcopy(BASE)) == []
    other = {"run_dir": "x", "command": "y", "mode": "eval", "checkpointing.resume": "z"}
    assert experiment(other) == ([], [])
    names = {field.name for field in dataclasses.fields(Config)}
    assert {name.partition(".")[0] for name in resume_rules._MUST_MATCH} <= names
