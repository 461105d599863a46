"""Allocations that fail without an error, as in cuDNN's search for a convolution, and errors that may mean memory.

The allocator's counter is faked: only CUDA's has one.
"""

import json

import pytest
from faults import NO_ENGINE, Fault
from harness import Recorded
from oom.conftest import MODELS, tiny
from runs import differences

pytestmark = pytest.mark.usefixtures("one_thread")


def chosen(run_dir, *overrides, schedule=None):
    return tiny(run_dir, *MODELS["mlp"], "train.ema=null", *overrides, schedule=schedule)


@pytest.mark.parametrize(("phase", "step"), [("forward", 1), ("backward", 2)])
def test_the_step_is_retried_with_a_smaller_micro_batch(tmp_path, caplog, phase, step):
    recorded = Recorded(chosen(tmp_path / "run"), Fault(phase, step, 5, kind="swallowed"))
    (failure,) = recorded.failures
    assert (failure.step, failure.swallowed, failure.broken) == (step, True, None)
    assert (failure.recovery.old_size, failure.recovery.new_size) == (8, 4)
    assert "1 allocation failed in this micro-batch and the error was caught" in failure.message
    (line,) = [r.getMessage() for r in caplog.records if "out of memory" in r.getMessage()]
    assert line.startswith(f"out of memory at step {step} in a library, which caught the error and may have used")
    assert line.endswith("micro-batch 8 -> 4, retrying the step")
    (path,) = (tmp_path / "run/oom").glob("*.json")
    assert json.loads(path.read_text())["swallowed"] is True
    wanted = Recorded(chosen(tmp_path / "wanted", schedule={step: 4}))
    assert differences(recorded.record(), wanted.record()) == []
    undisturbed = Recorded(chosen(tmp_path / "undisturbed"))
    assert differences(recorded.record().state, undisturbed.record().state) != []


def test_the_size_that_ran_shrinks_not_another_shapes(tmp_path):
    """Checked after each micro-batch: the last one of a step may have another shape."""
    texts = ("data.min_length=4", "model.context_length=64", "batch.micro_size=4", "train.max_steps=6")
    config = tiny(tmp_path, *MODELS["gpt"], *texts)
    free = Recorded(config)
    buckets = free.run.sizes.train.searches
    assert len(buckets) > 1
    recorded = Recorded(tiny(tmp_path / "run", *MODELS["gpt"], *texts), Fault("forward", 1, kind="swallowed"))
    assert len(recorded.failures) == 1
    searches = recorded.run.sizes.train.searches.values()
    assert [search.size for search in searches if search.smallest_excluded] == [2]


def test_with_the_smallest_micro_batch_a_slow_step_is_better_than_none(tmp_path, caplog):
    with caplog.at_level("INFO"):
        recorded = Recorded(chosen(tmp_path), Fault("forward", 1, above=0, kind="swallowed"))
    assert [(f.recovery.old_size, f.recovery.new_size) for f in recorded.failures] == [(8, 4), (4, 2), (2, 1)]
    assert recorded.run.state.progress.step == 4
    lines = [r.getMessage() for r in caplog.records if "since the micro-batch is the smallest" in r.getMessage()]
    assert len(lines) == 1


@pytest.mark.parametrize("setting", ["oom.clean_steps=1", "oom.enabled=false"])
def test_a_validated_size_is_not_checked_and_nothing_if_recovery_is_off(tmp_path, setting):
    """The control of the others; a rank could not tell its peers."""
    assert not Recorded(chosen(tmp_path, setting), Fault("forward", 3, kind="swallowed")).failures


def test_evaluation(tmp_path):
    evaluated = ("every.eval=2", "batch.eval_micro_size=90")
    recorded = Recorded(chosen(tmp_path / "run", *evaluated), Fault("evaluate", 2, kind="swallowed"))
    (failure,) = recorded.failures
    assert (failure.evaluating, failure.swallowed, failure.recovery.old_size, failure.recovery.new_size) == (
        True,
        True,
        90,
        45,
    )
    assert recorded.run.sizes.train.size == 8
    wanted = Recorded(chosen(tmp_path / "wanted", *evaluated))
    assert recorded.run.state.progress.objective == pytest.approx(wanted.run.state.progress.objective)


def test_an_ambiguous_error_is_one_if_an_allocation_was_refused(tmp_path):
    recorded = Recorded(chosen(tmp_path), Fault("backward", 2, 5, kind="no engine for memory"))
    (failure,) = recorded.failures
    assert (failure.phase, failure.message, failure.swallowed) == ("backward", NO_ENGINE, False)
    assert (failure.recovery.old_size, failure.recovery.new_size) == (8, 4)


@pytest.mark.parametrize(("kind", "text"), [("no engine", NO_ENGINE), ("swallowed exception", "the labels are wrong")])
def test_other_errors_end_the_run(tmp_path, kind, text):
    with pytest.raises((RuntimeError, ValueError), match=text):
        Recorded(chosen(tmp_path), Fault("backward", 2, 5, kind=kind))


def test_earlier_refusals_do_not_count(tmp_path):
    """Those of the attempt before, which was rolled back. Sizes 4 and 7 are retried, which may be too few samples."""
    again = Fault("forward", 2, kind="no engine", times=3)
    with pytest.raises(RuntimeError, match=NO_ENGINE):
        Recorded(chosen(tmp_path), Fault("forward", 2, kind="swallowed"), again)
    assert len(list((tmp_path / "oom").glob("*.json"))) == 1  # of the first, which had no error
