"""How the end of a job is judged: by its exit status, its result.json, and what it has printed."""

import json
import signal

import pytest

from trainapp.errors import NOT_FINITE
from trainapp.files import RESULT
from trainapp.sweep import jobs
from trainapp.sweep.journal import Journal, Trial


@pytest.fixture
def judge(tmp_path):
    """A function that returns the outcome of a job with this exit status, log and result.json."""

    def outcome(status, printed="", **result):
        (tmp_path / jobs.CONSOLE_LOG).write_text(f"== started now\n{printed}\n")
        (tmp_path / RESULT).write_text(json.dumps(result))
        return jobs.outcome(Trial(0, (), "running", folder=str(tmp_path)), "train", status)

    return outcome


def test_one_that_has_trained_to_its_end_has_finished(judge):
    assert judge(0, ended="train.max_steps=4", steps=4) == (
        "finished",
        "",
        {"ended": "train.max_steps=4", "steps": 4},
        "",
    )


def test_one_without_enough_memory_is_infeasible_by_the_kind_of_its_error(judge):
    printed = "trainapp: OutOfMemoryError: CUDA out of memory"
    outcome = judge(1, printed, failed="OutOfMemoryError: CUDA out of memory", error_kind="out_of_memory")
    assert (outcome.state, outcome.error_kind) == ("infeasible", "out_of_memory")


def test_a_message_about_memory_does_not_make_an_exception_infeasible(judge):
    outcome = judge(1, "trainapp: out of memory, says a callback", failed="out of ...", error_kind="training_stopped")
    assert outcome.state == "failed"


def test_a_mistake_is_known_by_its_exit_status(judge):
    outcome = judge(2, "trainapp: out of memory, says a setting")
    assert (outcome.state, outcome.error_kind) == ("failed", "mistake")


def test_a_result_of_an_earlier_version_is_judged_by_its_words(judge):
    printed = "trainapp: out of memory in forward with micro-batch 1: nothing is left to halve."
    assert judge(1, printed, failed="out of memory in forward").state == "infeasible"
    assert judge(1, "trainapp: step 3: the loss is not finite (nan)").error_kind == NOT_FINITE
    assert judge(1, "TypeError: no", failed="TypeError: no")[:2] == ("failed", "TypeError: no")


def test_one_that_was_killed_or_finds_its_directory_in_use_may_continue(judge):
    assert judge(-signal.SIGKILL)[:2] == ("stopped", "ended by SIGKILL")
    assert judge(128 + signal.SIGTERM)[:2] == ("stopped", "ended by SIGTERM")
    assert judge(2, "trainapp: hydra.run.dir=x: another run is using this directory; wait").state == "stopped"


def test_the_result_of_an_earlier_failure_is_removed(tmp_path):
    result = tmp_path / RESULT
    result.write_text('{"stopped": {"signal": "SIGINT"}, "ended": "SIGINT"}')
    jobs.forget_failure(tmp_path)
    assert result.exists()
    result.write_text('{"failed": "out of memory"}')
    jobs.forget_failure(tmp_path)
    assert not result.exists()


@pytest.mark.parametrize(
    ("recorded", "diverged"),
    [
        ({"error": "step 3: the loss is not finite (nan)"}, True),  # by an earlier version
        ({"error": "step 3: the loss is not finite (nan)", "error_kind": "not_finite"}, True),
        ({"error": "callbacks.mine: is not finite", "error_kind": "training_stopped"}, False),
    ],
)
def test_a_trial_has_diverged_by_the_kind_of_its_error(tmp_path, recorded, diverged):
    journal = Journal(tmp_path)
    journal.add("trial", number=0, values=[], attributes={})
    journal.add("end", number=0, state="failed", facts={}, **recorded)
    assert Journal(tmp_path, writes=False).trials[0].diverged == diverged
