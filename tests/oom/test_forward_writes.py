"""What a forward writes: where a run that is out of memory goes back, in training, evaluation and skipped steps."""

import contextlib
from pathlib import Path

import pytest
import writing_models
from faults import Fault, Injector
from harness import Recorded, model_state
from runs import differences, own_model

from trainapp.errors import TrainingStopped
from trainapp.state.snapshot import Snapshot
from trainapp.training import loop

from .conftest import operations, prepared, tiny, undisturbed

OWN = ("user_packages=[writing_models]", "data=digits", "train.max_steps=6", "train.check_loss=false")


def model(name: str) -> tuple[str, ...]:
    return (*own_model(f"writing_models.{name}"), *OWN)


CASES = {name: model(name) for name in ("Teacher", "TeacherSilent", "ExtraState")}  # other models, losses, data: zoo
CASES["Carrying"] = (*model("Carrying"), "task=writing_models.Carries", "objective=min loss")
STEPS = (1, 5)  # the first, and one after `oom.clean_steps`


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("case", CASES)
def test_only_a_first_write_without_a_copy_goes_back(tmp_path, case, step):
    phase = ("forward", "backward")[step > 1]
    fault = Fault(phase, step, operations(*CASES[case])[phase, step] * 3 // 4)  # in the second of two micro-batches
    recorded = Recorded(tiny(tmp_path, *CASES[case]), fault)
    (failure,) = recorded.failures
    assert (failure.step, failure.phase, failure.recovery.old_size, failure.recovery.new_size) == (step, phase, 8, 4)
    assert differences(recorded.record(), undisturbed(*CASES[case], schedule=((step, 4),))) == []
    was_rebuilt = "restarting from the start" in failure.recovery.action
    assert was_rebuilt == (case.startswith("Teacher") and step == 1)
    assert bool(failure.lost) == was_rebuilt


EVALUATING = (*model("CountsInEvaluation"), "every.eval=2", "batch.eval_micro_size=90")


def survives_in_evaluation(run_dir: Path, step: int, part: float = 0.5) -> list[str]:
    """Where a run that is out of memory in an evaluation differs from one that is not: in training, or evaluations."""
    fault = Fault("evaluate", step, int(operations(*EVALUATING)["evaluate", step] * part))
    recorded = Recorded(tiny(run_dir, *EVALUATING), fault)
    (failure,) = recorded.failures
    assert (failure.phase, failure.step, failure.recovery.old_size, failure.recovery.new_size) == (
        "evaluate",
        step,
        90,
        45,
    )
    record, wanted = recorded.record(), undisturbed(*EVALUATING)
    evaluated = [line["loss"] for line in wanted.evaluations]
    is_equal = [line["loss"] for line in record.evaluations] == pytest.approx(evaluated, rel=1e-5)
    return [*differences(record[:2], wanted[:2]), *([] if is_equal else ["evaluations"])]


@pytest.mark.parametrize(("step", "part"), [(2, 0.5), (4, 0.9)])
def test_an_evaluation_counts_nothing_twice(tmp_path, step, part):
    assert survives_in_evaluation(tmp_path, step, part) == []


@pytest.mark.slow
def test_a_compiled_model(tmp_path, monkeypatch):
    overrides = (*model("Teacher"), "task=writing_models.Failing", "train.compile=true", "train.draws=device")
    for step in STEPS:
        monkeypatch.setattr(writing_models.Failing, "fails_at", 2 * step)  # in the step's second micro-batch
        recorded = Recorded(tiny(tmp_path / f"a{step}", *overrides))
        assert [failure.step for failure in recorded.failures] == [step]
        wanted = Recorded(tiny(tmp_path / f"b{step}", *overrides, schedule={step: 4}))
        assert differences(recorded.record(), wanted.record()) == []


ALWAYS = (*model("WritesAlways"), "task=writing_models.Weighs", "objective=min loss", "data.num_workers=0")


@pytest.mark.parametrize(("step", "part"), [(2, 0.5), (2, 0.95), (4, 0.5)])
def test_an_evaluation_that_is_out_of_memory_leaves_nothing_to_training(tmp_path, step, part):
    evaluating = (*ALWAYS, "every.eval=2", "batch.eval_micro_size=90")
    fault = Fault("evaluate", step, int(operations(*evaluating)["evaluate", step] * part))
    recorded = Recorded(tiny(tmp_path, *evaluating), fault)
    assert [(failure.phase, failure.recovery.new_size) for failure in recorded.failures] == [("evaluate", 45)]
    found, wanted = recorded.record(), undisturbed(*ALWAYS, "every.eval=null")
    results = {"objective", "best", "best_step"}
    for record in (found, wanted):
        progress = record.state["progress"]
        record.state["progress"] = {name: value for name, value in progress.items() if name not in results}
    assert differences(found[:3], wanted[:3]) == []


def test_an_evaluation_that_writes_for_the_first_time_goes_back(tmp_path):
    # In the first micro-batch, after the write.
    recorded = Recorded(tiny(tmp_path, *EVALUATING), Fault("evaluate", 2, 12))
    (failure,) = recorded.failures
    assert failure.lost == ["model.total"]
    assert "the forward has written model.total, of which there was no copy" in failure.recovery.action
    assert "restarting from the start and repeating 2 finished steps" in failure.recovery.action
    assert recorded.run.sizes.evaluation.size == 45
    wanted = undisturbed(*model("CountsInEvaluation"), "every.eval=null")  # from now on there is a copy
    assert differences(recorded.record().state["model"], wanted.state["model"]) == []


def test_without_the_transaction_an_evaluation_counts_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(Snapshot, "undone_on_error", lambda self: contextlib.nullcontext())
    assert survives_in_evaluation(tmp_path, 4, 0.6) != []


def test_a_rebuilt_run_continues_where_it_began(tmp_path):
    """Not from the seed, where the run itself began at another run's checkpoint."""
    saving = (*CASES["Teacher"], "checkpointing=standard", "every.save=2")
    Recorded(tiny(tmp_path / "a", *saving, "train.max_steps=2"))
    resuming = {"checkpointing.resume": str(tmp_path / "a")}
    found = Recorded(tiny(tmp_path / "b", *CASES["Teacher"], changes=resuming), Fault("backward", 3, 3))
    assert (
        "restarting from the checkpoint of step 2 and repeating 0 finished steps" in found.failures[0].recovery.action
    )
    wanted = Recorded(tiny(tmp_path / "c", *CASES["Teacher"], schedule={3: 4}, changes=resuming))
    assert differences(found.record(), wanted.record()) == []


@pytest.mark.parametrize(
    ("resume", "step", "place"),
    [
        ("checkpoints/step_00000002", 3, "the checkpoint of step 2 and repeating 0"),
        ("none", 2, "the start and repeating 1"),
    ],
)
def test_a_rebuilt_run_that_has_saved_nothing_ignores_other_checkpoints_in_its_directory(tmp_path, resume, step, place):
    """They are later ones of another branch, or those of an earlier run."""
    saving = (*CASES["ExtraState"], "checkpointing=standard", "checkpointing.keep_last=9", "every.save=2")
    Recorded(tiny(tmp_path, *saving, "schedule=constant", "train.max_steps=4"))
    named = {"checkpointing.resume": resume if resume == "none" else str(tmp_path / resume)}
    recorded = Recorded(tiny(tmp_path, *saving, "schedule=constant", changes=named), Fault("commit", step, 2))
    assert f"restarting from {place} finished steps" in recorded.failures[0].recovery.action


@pytest.mark.slow
def test_a_rebuilt_run_begins_again_with_the_weights_that_it_began_with(tmp_path):
    """Those of another run, as long as it has no checkpoint of its own."""
    saving = (*CASES["Teacher"], "checkpointing=standard", "every.save=2")
    Recorded(tiny(tmp_path / "a", *saving, "train.max_steps=2"))
    begun = (*CASES["Teacher"], f"model.init_from={tmp_path / 'a'}")
    found = Recorded(tiny(tmp_path / "b", *begun), Fault("backward", 1, 3))
    assert "restarting from the start and repeating 0 finished steps" in found.failures[0].recovery.action
    wanted = Recorded(tiny(tmp_path / "c", *begun, schedule={1: 4}))
    assert differences(found.record(), wanted.record()) == []
    assert differences(wanted.record().state, undisturbed(*CASES["Teacher"], schedule=((1, 4),)).state) != []


SKIPPING = ("train.nonfinite=skip", "train.draws=device")  # no trial calls, which a control would spoil


def skipped(run_dir: Path, case: str, step: int) -> list[str]:
    """What differs after a step whose inputs are not finite."""
    injector = Injector([Fault("forward", step, kind="nan")])
    with contextlib.closing(prepared(tiny(run_dir, *CASES[case], *SKIPPING))) as session:
        for _ in range(step - 1):
            loop.train_step(session)
        before = model_state(session.state.model)
        injector.watch(session)
        with injector:
            loop.train_step(session)
        assert session.state.progress.skipped == 1
        return differences(before, model_state(session.state.model))


@pytest.mark.parametrize("case", ["Teacher", "TeacherSilent", "ExtraState"])
def test_a_skipped_step_leaves_the_model_as_it_was(tmp_path, case):
    assert skipped(tmp_path, case, 3) == []


@pytest.mark.parametrize("case", ["Teacher", "ExtraState"])
def test_without_restoring_a_skipped_step_leaves_traces(tmp_path, monkeypatch, case):
    monkeypatch.setattr(Snapshot, "restore", lambda self, except_kinds=(): None)
    assert skipped(tmp_path, case, 3) != []


def test_a_first_write_cannot_be_skipped(tmp_path):
    with pytest.raises(TrainingStopped, match=r"train.nonfinite=skip cannot skip this step.*model\.teacher"):
        skipped(tmp_path, "Teacher", 1)
