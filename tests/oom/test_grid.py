"""A run that is out of memory at step k is bit-identical to one configured to change its size at step k.

Phase x step x model x precision. Every cell asserts that the error struck, and where.
"""

from pathlib import Path

import pytest
import torch
from faults import PHASES, Fault, Injector, injected
from harness import Recorded
from runs import differences

from trainapp.run import runner
from trainapp.training.engine import Engine

from .conftest import MODELS, PRECISIONS, cell, operations, prepared, tiny, undisturbed

STEPS = (1, 3, 4)  # first, middle, last


def late(model: str, precision: str, phase: str, step: int) -> int:
    """An operation in the last quarter of the phase: in the second micro-batch, if the step has two."""
    count = operations(*cell(model, precision))[phase, step]
    assert count, f"{phase} has no operation"
    return count * 3 // 4


def recovered_as_configured(tmp_path: Path, model: str, precision: str, phase: str, step: int) -> list[str]:
    """Where the recovered run differs from the configured one. Asserts that the error struck once, in its phase."""
    fault = Fault(phase, step, late(model, precision, phase, step))
    recorded = Recorded(tiny(tmp_path, *cell(model, precision)), fault)
    (failure,) = recorded.failures
    # Averaging has no micro-batch: it resumes where it stopped, and the sizes stay.
    sized = phase != "weight average"
    assert (failure.step, failure.phase, failure.recovery.old_size, failure.recovery.new_size) == (
        step,
        phase,
        8,
        4 if sized else 8,
    )
    wanted = undisturbed(*cell(model, precision), schedule=((step, 4),) if sized else ())
    return differences(recorded.record(), wanted)


def marks_of(model: str, more: int) -> tuple[pytest.MarkDecorator, ...]:
    """With the quick tests one model in every phase; with each push every pair of model, precision, phase and step;
    nightly each model in each phase with the other two steps and precisions.
    """
    if more:
        return (pytest.mark.nightly,)
    return () if model == "mlp" else (pytest.mark.slow,)


GRID = [
    pytest.param(
        *(model, list(PRECISIONS)[(2 * i + j + more) % 3], phase, STEPS[(i + j + more) % 3]),
        marks=marks_of(model, more),
    )
    for i, model in enumerate(MODELS)
    for j, phase in enumerate((*PHASES, "weight average"))
    for more in range(3)
]


@pytest.mark.parametrize(("model", "precision", "phase", "step"), GRID)
def test_bit_identical_to_a_configured_switch(tmp_path, model, precision, phase, step):
    assert recovered_as_configured(tmp_path, model, precision, phase, step) == []


@pytest.mark.slow
def test_two_halvings_in_one_step(tmp_path):
    # Fails while the micro-batch is above 4: 16 -> 8 -> 4 within step 3; the oracle goes from 16 to 4 at once.
    overrides = (*cell("resnet", "fp32"), "batch.micro_size=16")
    recorded = Recorded(tiny(tmp_path, *overrides), Fault("backward", 3, 5, above=4))
    assert [(f.step, f.recovery.old_size, f.recovery.new_size) for f in recorded.failures] == [(3, 16, 8), (3, 8, 4)]
    assert differences(recorded.record(), undisturbed(*overrides, schedule=((3, 4),))) == []


@pytest.mark.slow
def test_fetched_ahead_by_a_worker(tmp_path):
    # The worker has already fetched for the old cut: the retry still sees the same samples.
    recorded = Recorded(tiny(tmp_path, *cell("resnet", "fp32"), "data.num_workers=1"), Fault("forward", 3, 20))
    assert len(recorded.failures) == 1
    assert recorded.fetched == []  # in the worker
    wanted = undisturbed(*cell("resnet", "fp32"), schedule=((3, 4),))
    assert differences(recorded.record(), wanted._replace(fetched=[])) == []


# Every pair of model, precision and step; one of three with each push.
CELLS = [
    pytest.param(model, precision, STEPS[(i + j) % 3], marks=() if i == j else pytest.mark.nightly)
    for i, model in enumerate(MODELS)
    for j, precision in enumerate(PRECISIONS)
]


@pytest.mark.parametrize("back", [pytest.param(b, marks=() if b % 6 == 0 else pytest.mark.nightly) for b in range(20)])
def test_evaluation_counts_once_wherever_it_fails(tmp_path, back):
    """The metrics equal those of an evaluation in smaller batches; training is untouched. Other models: zoo."""
    # From the last operation of an evaluation backwards: loss, metric and count must be added together or not at all.
    overrides = (*cell("mlp", "fp32"), "every.eval=1", "batch.eval_micro_size=90")
    fault = Fault("evaluate", 3, operations(*overrides)["evaluate", 3] - 1 - back)
    recorded = Recorded(tiny(tmp_path, *overrides), fault)
    (failure,) = recorded.failures
    assert (failure.phase, failure.step, failure.recovery.old_size, failure.recovery.new_size) == (
        "evaluate",
        3,
        90,
        45,
    )
    assert (recorded.run.sizes.train.size, recorded.run.sizes.evaluation.size) == (8, 45)
    found, whole = recorded.record(), undisturbed(*overrides)
    for part in ("model", "optimizer", "average"):
        assert differences(found.state[part], whole.state[part]) == []
    assert found.fetched == whole.fetched
    wanted = undisturbed(*overrides, "batch.eval_micro_size=45").evaluations
    assert [line["step"] for line in found.evaluations] == [1, 2, 3, 4]
    for line, other in zip(found.evaluations, wanted, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert line["accuracy"] == pytest.approx(other["accuracy"], abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "precision", "step"), CELLS)
def test_commit_goes_back_to_the_start(tmp_path, model, precision, step):
    fault = Fault("commit", step, late(model, precision, "commit", step))
    recorded = Recorded(tiny(tmp_path, *cell(model, precision)), fault)
    (failure,) = recorded.failures
    assert (failure.phase, failure.step, failure.recovery.old_size, failure.recovery.new_size) == ("commit", step, 8, 4)
    assert f"restarting from the start and repeating {step - 1} finished steps" in failure.recovery.action
    assert differences(recorded.record(), undisturbed(*cell(model, precision), schedule=((1, 4),))) == []


def test_the_commit_was_torn(tmp_path, monkeypatch):
    # Otherwise the cells above prove nothing: half of the parameters have changed when the error strikes.
    run = prepared(tiny(tmp_path, *cell("mlp", "fp32")))
    before = {}
    commit = Engine.commit

    def remembering(*arguments):
        before.update({n: p.detach().clone() for n, p in run.state.model.named_parameters()})
        return commit(*arguments)

    monkeypatch.setattr(Engine, "commit", remembering)
    with injected(Injector([Fault("commit", 3, late("mlp", "fp32", "commit", 3))])):
        failure = runner.run_until_oom(run)
    run.close()
    assert failure.phase == "commit"
    moved = [not torch.equal(before[n], p) for n, p in run.state.model.named_parameters()]
    assert 0 < sum(moved) < len(moved)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_after_the_commit_nothing_is_done_twice(tmp_path, precision):
    # The parameters have changed: whatever fails from here on, the step counts, exactly once.
    recorded = Recorded(tiny(tmp_path, *cell("mlp", precision)), Fault("after the commit", 3))
    assert len(recorded.failures) == 1
    wanted = undisturbed(*cell("mlp", precision))
    assert differences(recorded.record()[:2], wanted[:2]) == []  # without the log, in which it struck
