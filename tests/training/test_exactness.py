"""`debug=exactness` names what a retry would not restore, and passes what it would."""

import queue

import pytest
import runs
import torch
import writing_models

from trainapp.errors import TrainingStopped
from trainapp.state.checksum import checksum
from trainapp.training import exactness, loop

OWN = ("user_packages=[writing_models,test_exactness]", "data=digits", *runs.STEPS_ONLY, "batch.micro_size=8")
MLP = ("model=mlp", "model.width=16", "model.dropout=0.1", *OWN)
EXACTNESS = "debug=exactness"


def own(kind: type) -> tuple[str, ...]:
    return (*runs.own_model(f"{kind.__module__}.{kind.__name__}"), *OWN)


def trained(run_dir, *overrides):
    """The run's state after four steps, and its notes."""
    run = runs.prepare(run_dir, *overrides)
    notes, note = [], run.tracker.note
    run.tracker.note = lambda text, *rest: (notes.append(text), note(text, *rest))
    try:
        loop.train(run)
    finally:
        run.close()
    return run.state.tensors(), notes


def message(tmp_path, *overrides) -> list[str]:
    """The lines of the message that stops the run."""
    with pytest.raises(TrainingStopped) as stopped:
        trained(tmp_path, *overrides, EXACTNESS)
    return str(stopped.value).splitlines()


def test_the_checksum_of_a_conjugate_is_that_of_its_values():
    values = torch.fft.fft(torch.rand(64))
    for view in (values.conj(), values.conj().imag):
        assert view.is_conj() or view.is_neg()
        assert torch.equal(checksum(view), checksum(view.resolve_conj().resolve_neg()))
        assert not torch.equal(checksum(view), checksum(-view))


COVERED = {
    "resnet": (*runs.STEPS_ONLY, *runs.MODELS["resnet"]),
    "own generators": own(writing_models.Generators),
    "task": (*MLP, "task=writing_models.QueueTask"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", COVERED)
def test_what_is_covered_passes_and_is_not_changed(tmp_path, case):
    checked, notes = trained(tmp_path / "a", *COVERED[case], EXACTNESS)
    assert any("retrying each of the first 3 steps gives the same result" in text for text in notes)
    plain, notes = trained(tmp_path / "b", *COVERED[case], "train.deterministic=true")
    assert not any("retried" in text for text in notes)
    assert runs.differences(checked, plain) == []


class CountingTask:
    """A loss with a counter that no retry restores."""

    def __init__(self):
        self.calls = queue.SimpleQueue()

    def __call__(self, model, batch):
        self.calls.put(1)
        loss, _ = writing_models.cross_entropy(model, batch)
        return loss * (1 + 0.1 * self.calls.qsize()), len(batch["targets"]), {}


def test_what_a_retry_would_change_is_named(tmp_path):
    lines = message(tmp_path, *MLP, "task=test_exactness.CountingTask")
    assert lines[1].startswith("  two runs of step 1 from the same state differ in the loss, ")
    assert any("the gradient of model." in line for line in lines)
    assert "get_extra_state" in lines[-1]
    assert "are nondeterministic" not in lines[-1]


@pytest.mark.slow
def test_kernels_may_be_the_cause(tmp_path):
    lines = message(tmp_path, *MLP, "task=test_exactness.CountingTask", "train.deterministic=false")
    assert "the kernels (cpu) are nondeterministic, which train.deterministic=true prevents" in lines[-1]


def test_without_a_rollback_every_model_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(exactness, "rollback", lambda *_, **__: None)
    assert any("gradient" in line for line in message(tmp_path, *MLP))
