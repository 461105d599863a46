"""Negative controls: a transaction that leaves out one part fails the cells that need it, and only leaves those green
that do not.
"""

import pytest

from trainapp.checkpoint import state_dicts
from trainapp.data.eval_batches import EvalBatches
from trainapp.oom import recovery
from trainapp.state import snapshot
from trainapp.state.snapshot import Snapshot
from trainapp.training.engine import Engine

from . import cells
from .harness import LEFT, leaving

NEEDED = {
    "registries": ("re-assigned buffer", "replaced parameter"),
    "tensors": ("batchnorm", "moco", "module as loss"),
    "owners": ("own generators", "noisy data", "replay"),  # a queue in a held object is restored by `state.held`, too
    "gradients": ("dict",),
}


@pytest.mark.parametrize(("part", "name"), [(part, name) for part, names in NEEDED.items() for name in names])
def test_without_a_part_its_cells_fail(tmp_path, part, name):
    with leaving(part):
        assert cells.after_an_error(name, "backward", 4, tmp_path) != []


@pytest.mark.slow
@pytest.mark.parametrize("part", NEEDED)
def test_the_controls_leave_other_cells_alone(tmp_path, part):
    """A plain model has none of this state; left-over gradients harm every model."""
    with leaving(part):
        differs = cells.after_an_error("tuple", "backward", 4, tmp_path) != []
    assert differs == (part == "gradients")


@pytest.mark.parametrize(
    ("part", "name", "step"),
    [
        ((snapshot, "_refill", lambda held, before: None), "counter", 4),
        ((Snapshot, "_written", lambda self: []), "moco", 1),
        ((Snapshot, "_checksums", lambda self: {}), "mean teacher through data", 4),
    ],
)
@pytest.mark.slow
def test_what_is_not_noticed_is_not_restored(tmp_path, monkeypatch, part, name, step):
    monkeypatch.setattr(*part)
    assert cells.after_an_error(name, "backward", step, tmp_path) != []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hidden teacher", "own generators", "queue", "running scale", "replay"])
def test_without_the_saved_state_a_resumed_run_is_another(tmp_path, monkeypatch, name):
    monkeypatch.setattr(state_dicts, "load_stateful", lambda *_: [])
    assert cells.resumed(name, tmp_path) != []


@pytest.mark.slow
def test_without_seeds_of_steps_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(Engine, "seed", lambda self, step: None)
    assert cells.after_an_error("mixup", "backward", 4, tmp_path) != []


@pytest.mark.slow
def test_other_samples_in_the_retry_fail(tmp_path, monkeypatch):
    change_size = recovery.change_size

    def next_samples(run, failure, decision):
        run.batches.advance(run.state.progress)
        return change_size(run, failure, decision)

    monkeypatch.setattr(recovery, "change_size", next_samples)
    assert cells.after_an_error("dict", "backward", 2, tmp_path) != []


@pytest.mark.slow
def test_an_evaluation_from_the_start_again_fails(tmp_path, monkeypatch):
    """What was evaluated before the error would count twice."""
    from_sample = EvalBatches.from_sample
    monkeypatch.setattr(EvalBatches, "from_sample", lambda self, done, *rest: from_sample(self, 0, *rest))
    assert cells.after_an_error_late_in_an_evaluation("dict", tmp_path) != []


@pytest.mark.slow
def test_an_evaluation_that_leaves_its_writes_fails(tmp_path, monkeypatch):
    """The hidden state moves in evaluation: what the failed batch wrote must not stay."""
    monkeypatch.setattr(*LEFT["tensors"])
    assert cells.after_an_error("writes in evaluation", "evaluate", 2, tmp_path) != []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["batchnorm", "noisy data"])
def test_another_seed_fails(tmp_path, name):
    """The comparison sees more than the sizes: a replay of the same schedule from another seed differs."""
    run = cells.finished(name, tmp_path / "run", cells.EVALUATING)
    other = cells.finished(name, tmp_path / "other", {**cells.EVALUATING, "train.seed": 1})
    assert len(cells.compare(run.record(), other.record())) > 5
