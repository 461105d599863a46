"""Whatever a forward changes, a run that is out of memory at step k equals one that changes its size at step k."""

import collections
import functools
import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import writing_models
from runs import differences

from trainapp.checkpoint.stateful import Stateful
from trainapp.train.model_tensors import ModelTensors

from .conftest import tiny
from .inject import Counts, Injector, Recorded

pytestmark = pytest.mark.usefixtures("without_pictures")

OWN = ("user_packages=[writing_models]", "data=digits", "train.max_steps=6")
MODEL = ("model=mlp", "~model.width", "~model.depth", "~model.dropout", *OWN)
MLP = ("model=mlp", "model.width=16", *OWN)


def model(kind: type) -> tuple[str, ...]:
    return (*MODEL, f"model._target_=writing_models.{kind.__name__}")


CASES = {
    **{kind.__name__: model(kind) for kind in writing_models.MODELS},
    "queue task": (*MLP, "task=writing_models.QueueTask"),
    "queue task at the top": (*MLP, "task=writing_models.queue_task"),
    "module task": (*MLP, "task=writing_models.ModuleTask"),
    "data": (*MLP, "~data.augment", "data._target_=writing_models.StatefulDigits"),
}
IN_PLACE = {*(kind.__name__ for kind in writing_models.IN_PLACE), "module task"}


def everything(recorded: Recorded) -> dict[str, Any]:
    """All that must be equal, also what no checkpoint holds."""
    state = recorded.run.state
    modules = {"model": state.model, **state.stateful.modules}
    tensors = {
        f"{root}.{name}": tensor.detach().clone()
        for root, module in modules.items()
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    return recorded.state() | {"all": tensors}


@functools.cache
def configured(case: str, *schedule: tuple[int, int]) -> dict[str, Any]:
    """The run that switches sizes by configuration."""
    with tempfile.TemporaryDirectory() as folder:
        recorded = Recorded(tiny(Path(folder), *CASES[case], schedule=dict(schedule)))
        assert not recorded.failures
        return everything(recorded)


@functools.cache
def operations(case: str) -> collections.Counter:
    """The number of operations in each phase of each step."""
    counts = Counts()
    with tempfile.TemporaryDirectory() as folder:
        Recorded(tiny(Path(folder), *CASES[case]), counts)
    return counts.operations


def recovered(run_dir: Path, case: str, phase: str, step: int) -> Recorded:
    """A run with an error in the second of a step's two micro-batches."""
    injector = Injector(phase, step, operations(case)[phase, step] * 3 // 4)
    recorded = Recorded(tiny(run_dir, *CASES[case]), injector)
    assert injector.fired == len(recorded.failures) == 1
    (failure,) = recorded.failures
    assert (failure.step, failure.phase, failure.old_size, failure.new_size) == (step, phase, 8, 4)
    return recorded


STEPS = (1, 5)  # the first, and one after `oom.clean_steps`
CELLS = list(itertools.product(("forward", "backward"), STEPS))


@pytest.mark.parametrize(
    ("case", "phase", "step"),
    [
        pytest.param(case, *cell, marks=() if (i + j) % 4 == 0 else pytest.mark.slow)
        for i, case in enumerate(CASES)
        for j, cell in enumerate(CELLS)
    ],
)
def test_equals_the_configured_switch(tmp_path, case, phase, step):
    recorded = recovered(tmp_path, case, phase, step)
    assert differences(everything(recorded), configured(case, (step, 4))) == []
    (failure,) = recorded.failures
    was_rebuilt = "so back to the start" in failure.action
    # Only the first write is without a copy.
    assert was_rebuilt == (case in IN_PLACE and step == 1)
    assert bool(failure.lost) == was_rebuilt


@pytest.mark.slow
@pytest.mark.parametrize(("case", "step"), itertools.product(CASES, STEPS))
def test_the_switch_matters(case, step):
    """Otherwise the cells prove nothing."""
    assert differences(configured(case, (step, 4)), configured(case, (2, 4))) != []


def without(monkeypatch, part: str) -> None:
    """A restore point that lacks one of its parts."""
    take = ModelTensors.take
    if part == "registries":
        monkeypatch.setattr(ModelTensors, "_restore_registries", lambda self: None)
    elif part == "memory":
        monkeypatch.setattr(ModelTensors, "_restore_memory", lambda self, position: None)
    elif part == "versions":
        monkeypatch.setattr(ModelTensors, "_written", lambda self: [])
    elif part == "checksums":
        monkeypatch.setattr(ModelTensors, "take", lambda self, verify, everything: take(self, False, everything))
    elif part == "copies":
        monkeypatch.setattr(ModelTensors, "_written", lambda self: [])
        monkeypatch.setattr(ModelTensors, "_copy", lambda self, everything: setattr(self, "_restorable", set()))
    elif part == "states":
        monkeypatch.setattr(Stateful, "restore", lambda *_, **__: None)
    elif part == "modules of the task":
        monkeypatch.setattr(Stateful, "modules", property(lambda self: {}, lambda self, _: None), raising=False)


@pytest.mark.parametrize(
    ("part", "case", "step"),
    [
        ("registries", "TeacherReplaced", 5),
        ("registries", "Lazy", 1),
        ("registries", "LateModule", 1),
        ("memory", "TeacherAssigned", 5),
        ("versions", "Teacher", 1),
        ("versions", "Codebook", 5),
        ("versions", "FromData", 1),
        ("checksums", "TeacherSilent", 1),
        ("checksums", "NormalisedSilent", 5),
        ("checksums", "Buffers", 5),
        ("copies", "Buffers", 5),
        ("states", "ExtraState", 5),
        ("states", "Generators", 5),
        ("states", "queue task", 1),
        ("states", "data", 5),
        ("modules of the task", "module task", 5),
    ],
)
def test_without_one_part_its_cell_fails(tmp_path, monkeypatch, part, case, step):
    wanted, _ = configured(case, (step, 4)), operations(case)
    without(monkeypatch, part)
    assert differences(everything(recovered(tmp_path, case, "forward", step)), wanted) != []
