"""Whatever a forward changes, a run that is out of memory at step k equals one that changes its size at step k."""

import contextlib
import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import writing_models
from runs import differences, own_model

from trainapp import snapshot
from trainapp.errors import TrainingStopped
from trainapp.snapshot import Snapshot
from trainapp.training import loop
from trainapp.training.session import Session

from .conftest import prepared, tiny
from .inject import Counts, Injector, Recorded, Watched, operations

pytestmark = pytest.mark.usefixtures("without_pictures")

OWN = ("user_packages=[writing_models]", "data=digits", "train.max_steps=6", "train.check_loss=false")
MLP = ("model=mlp", "model.width=16", *OWN)


def model(name: str) -> tuple[str, ...]:
    return (*own_model(f"writing_models.{name}"), *OWN)


CASES = {  # other models, losses and data: zoo
    **{name: model(name) for name in ("Teacher", "TeacherSilent", "TeacherHidden", "ExtraState", "Counter")},
    "module task": (*MLP, "task=writing_models.ModuleTask"),
}
IN_PLACE = {"Teacher", "TeacherSilent", "TeacherHidden", "module task"}  # so that their first write is without a copy


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


def recovered(run_dir: Path, case: str, phase: str, step: int) -> Recorded:
    """A run with an error in the second of a step's two micro-batches."""
    injector = Injector(phase, step, operations(*CASES[case])[phase, step] * 3 // 4)
    recorded = Recorded(tiny(run_dir, *CASES[case]), injector)
    assert injector.fired == len(recorded.failures) == 1
    (failure,) = recorded.failures
    assert (failure.step, failure.phase, failure.old_size, failure.new_size) == (step, phase, 8, 4)
    return recorded


STEPS = (1, 5)  # the first, and one after `oom.clean_steps`


@pytest.mark.parametrize(
    ("case", "step"),
    [
        pytest.param(case, step, marks=() if (i + j) % 4 == 0 else pytest.mark.nightly)
        for i, case in enumerate(CASES)
        for j, step in enumerate(STEPS)
    ],
)
def test_equals_the_configured_switch(tmp_path, case, step):
    recorded = recovered(tmp_path, case, ("forward", "backward")[step > 1], step)
    assert differences(everything(recorded), configured(case, (step, 4))) == []
    (failure,) = recorded.failures
    was_rebuilt = "so back to the start" in failure.action
    assert was_rebuilt == (case in IN_PLACE and step == 1)
    assert bool(failure.lost) == was_rebuilt


def test_the_switch_matters():
    """Otherwise the cells prove nothing."""
    assert differences(configured("Teacher", (5, 4)), configured("Teacher", (2, 4))) != []


EVALUATING = (*model("CountsInEvaluation"), "every.eval=2", "batch.eval_micro_size=90")


def survives_in_evaluation(run_dir: Path, step: int, part: float = 0.5) -> list[str]:
    """Where a run that is out of memory in an evaluation differs from one that is not, after training has gone on."""
    counts = Counts()
    undisturbed = Recorded(tiny(run_dir / "a", *EVALUATING), counts)
    injector = Injector("evaluate", step, int(counts.operations["evaluate", step] * part))
    recorded = Recorded(tiny(run_dir / "b", *EVALUATING), injector)
    (failure,) = recorded.failures
    assert (failure.phase, failure.step, failure.old_size, failure.new_size) == ("evaluate", step, 90, 45)
    return differences(everything(recorded), everything(undisturbed))


@pytest.mark.parametrize(("step", "part"), [(2, 0.5), (4, 0.9)])
def test_an_evaluation_counts_nothing_twice(tmp_path, step, part):
    assert survives_in_evaluation(tmp_path, step, part) == []


@pytest.mark.slow
def test_a_compiled_model(tmp_path, monkeypatch):
    overrides = (*model("Teacher"), "task=writing_models.Failing", "train.compile=true")
    for step in STEPS:
        monkeypatch.setattr(writing_models.Failing, "fails_at", 2 * step)  # in the step's second micro-batch
        recorded = Recorded(tiny(tmp_path / f"a{step}", *overrides))
        assert [failure.step for failure in recorded.failures] == [step]
        wanted = Recorded(tiny(tmp_path / f"b{step}", *overrides, schedule={step: 4}))
        assert differences(everything(recorded), everything(wanted)) == []


class InModel(Injector):
    """Counts the operations inside the model alone."""

    def _phase(self) -> str:
        return super()._phase() if self._in_model else ""


def test_an_evaluation_that_writes_for_the_first_time_goes_back(tmp_path):
    injector = InModel("evaluate", 2, 4)  # in the first micro-batch, after the write
    recorded = Recorded(tiny(tmp_path / "a", *EVALUATING), injector)
    (failure,) = recorded.failures
    assert failure.lost == ["model.total"]
    assert "the forward has written model.total, of which there was no copy" in failure.action
    assert "so back to the start; 2 finished steps are repeated" in failure.action
    assert recorded.run.sizes.evaluation.size == 45
    undisturbed = Recorded(tiny(tmp_path / "b", *EVALUATING))
    assert differences(everything(recorded)["all"], everything(undisturbed)["all"]) == []


def test_without_the_transaction_an_evaluation_counts_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(Snapshot, "undone_on_error", lambda self: contextlib.nullcontext())
    assert survives_in_evaluation(tmp_path, 4, 0.6) != []


def test_a_rebuilt_run_continues_where_it_began(tmp_path):
    """Not from the seed, where the run itself began at another run's checkpoint."""
    saving = (*CASES["Teacher"], "checkpointing=standard", "every.save=2")
    Recorded(tiny(tmp_path / "a", *saving, "train.max_steps=2"))
    for name, injector in (("b", Injector("backward", 3, 3)), ("c", None)):
        config = tiny(tmp_path / name, *CASES["Teacher"], schedule=None if injector else {3: 4})
        resume = dataclasses.replace(config.checkpointing, resume=str(tmp_path / "a"))
        recorded = Recorded(dataclasses.replace(config, checkpointing=resume), injector)
        if injector:
            assert "so back to the checkpoint of step 2; 0 finished steps are repeated" in recorded.failures[0].action
            found = everything(recorded)
    assert differences(found, everything(recorded)) == []


@pytest.mark.parametrize(
    ("resume", "step", "place"),
    [("checkpoints/step_00000002", 3, "the checkpoint of step 2; 0 finished"), ("none", 2, "the start; 1 finished")],
)
def test_a_rebuilt_run_that_has_saved_nothing_ignores_other_checkpoints_in_its_directory(tmp_path, resume, step, place):
    """They are later ones of another branch, or those of an earlier run."""
    saving = (*MLP, "checkpointing=standard", "checkpointing.keep_last=9", "every.save=2", "schedule=constant")
    Recorded(tiny(tmp_path, *saving, "train.max_steps=4"))
    named = {"checkpointing.resume": resume if resume == "none" else str(tmp_path / resume)}
    recorded = Recorded(tiny(tmp_path, *saving, changes=named), Injector("commit", step, 2))
    assert f"so back to {place} steps are repeated" in recorded.failures[0].action


@pytest.mark.slow
def test_a_rebuilt_run_begins_again_with_the_weights_that_it_began_with(tmp_path):
    """Those of another run, as long as it has no checkpoint of its own."""
    saving = (*CASES["Teacher"], "checkpointing=standard", "every.save=2")
    Recorded(tiny(tmp_path / "a", *saving, "train.max_steps=2"))
    begun = (*CASES["Teacher"], f"model.init_from={tmp_path / 'a'}")
    found = Recorded(tiny(tmp_path / "b", *begun), Injector("backward", 1, 3))
    assert "so back to the start; 0 finished steps are repeated" in found.failures[0].action
    wanted = Recorded(tiny(tmp_path / "c", *begun, schedule={1: 4}))
    assert differences(everything(found), everything(wanted)) == []
    assert differences(everything(wanted), configured("Teacher", (1, 4))) != []


SKIPPING = ("train.nonfinite=skip",)


def skipped(run_dir: Path, case: str, step: int) -> tuple[dict, dict]:
    """The state before and after a step whose inputs are not finite."""
    session = prepared(tiny(run_dir, *CASES[case], *SKIPPING))
    fetcher = session.batches._loader.fetcher
    states = []
    try:
        for number in range(1, step + 1):
            if number == step:
                data = fetcher.dataset
                bad = lambda batch: batch | {"inputs": batch["inputs"] * torch.nan}  # noqa: E731
                fetcher.dataset = Watched(data, session, None, [], bad)
                states.append(model_state(session))
            loop.train_step(session)
        states.append(model_state(session))
        assert session.state.progress.skipped == 1
    finally:
        session.close()
    return states[0], states[1]


def model_state(session: Session) -> dict:
    owners = session.state.stateful.owners
    states = {name: owner.copy() for name, owner in owners.items() if "extra_state" in name}
    tensors = (*session.state.model.named_parameters(), *session.state.model.named_buffers())
    return {"states": states, "tensors": {name: tensor.detach().clone() for name, tensor in tensors}}


@pytest.mark.parametrize("case", ["Teacher", "TeacherSilent", "ExtraState"])
def test_a_skipped_step_leaves_the_model_as_it_was(tmp_path, case):
    before, after = skipped(tmp_path, case, 3)
    assert differences(before, after) == []


@pytest.mark.parametrize("case", ["Teacher", "ExtraState"])
def test_without_restoring_a_skipped_step_leaves_traces(tmp_path, monkeypatch, case):
    monkeypatch.setattr(Snapshot, "restore", lambda self, but=(): None)
    assert differences(*skipped(tmp_path, case, 3)) != []


def test_a_first_write_cannot_be_skipped(tmp_path):
    with pytest.raises(TrainingStopped, match=r"train.nonfinite=skip cannot skip this step.*model\.teacher"):
        skipped(tmp_path, "Teacher", 1)


@pytest.mark.parametrize(
    ("part", "case", "step"),
    [
        ((snapshot, "_refill", lambda held, before: None), "Counter", 5),
        ((Snapshot, "_written", lambda self: []), "Teacher", 1),
        ((Snapshot, "_sums", lambda self: {}), "TeacherSilent", 5),
    ],
)
def test_without_one_part_its_cell_fails(tmp_path, monkeypatch, part, case, step):
    """The others: zoo/test_controls.py."""
    wanted, _ = configured(case, (step, 4)), operations(*CASES[case])
    monkeypatch.setattr(*part)
    assert differences(everything(recovered(tmp_path, case, "forward", step)), wanted) != []
