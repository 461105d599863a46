"""How the end of a job is judged: by its exit status, its result.json, and what it has printed."""

import json
import signal

import pytest

from trainapp.errors import NOT_FINITE
from trainapp.files import RESULT
from trainapp.sweep import outcome
from trainapp.sweep.jobs import forget_failure
from trainapp.sweep.journal import Journal
from trainapp.sweep.outcome import NOT_OUR_CHILD, Outcome, TrialState


@pytest.fixture
def judge(tmp_path):
    """A function that returns the outcome of a job with this exit status, log and result.json."""

    def judge(status, printed="", is_held=False, **result):
        (tmp_path / outcome.CONSOLE_LOG).write_text(f"== started now\n{printed}\n")
        (tmp_path / RESULT).write_text(json.dumps(result))
        return outcome.judge(tmp_path, "train", status, is_held)

    return judge


def test_one_that_has_trained_to_its_end_has_finished(judge):
    facts = {"ended": "train.max_steps=4", "steps": 4}
    assert judge(0, **facts) == Outcome(TrialState.FINISHED, "", facts)


def test_one_without_enough_memory_is_infeasible_by_the_kind_of_its_error(judge):
    printed = "trainapp: OutOfMemoryError: CUDA out of memory"
    end = judge(1, printed, failed="OutOfMemoryError: CUDA out of memory", error_kind="out_of_memory")
    assert (end.state, end.error_kind) == (TrialState.INFEASIBLE, "out_of_memory")


def test_a_message_about_memory_does_not_make_an_exception_infeasible(judge):
    end = judge(1, "trainapp: out of memory, says a callback", failed="out of ...", error_kind="training_stopped")
    assert end.state is TrialState.FAILED


def test_a_mistake_is_known_by_its_exit_status(judge):
    end = judge(2, "trainapp: out of memory, says a setting")
    assert (end.state, end.error_kind) == (TrialState.FAILED, "mistake")


def test_a_result_of_an_earlier_version_is_judged_by_its_words(judge):
    printed = "trainapp: out of memory in forward with micro-batch 1: nothing is left to halve."
    assert judge(1, printed, failed="out of memory in forward").state is TrialState.INFEASIBLE
    assert judge(1, "trainapp: step 3: the loss is not finite (nan)").error_kind == NOT_FINITE
    assert judge(1, "TypeError: no", failed="TypeError: no")[:2] == (TrialState.FAILED, "TypeError: no")


def test_one_that_was_ended_by_a_signal_may_continue(judge):
    assert judge(-signal.SIGKILL)[:2] == (TrialState.STOPPED, "ended by SIGKILL")
    assert judge(128 + signal.SIGTERM)[:2] == (TrialState.STOPPED, "ended by SIGTERM")


def test_one_that_finds_its_directory_in_use_may_continue(judge):
    end = judge(2, "trainapp: hydra.run.dir=x: another run is using this directory; wait")
    assert end.state is TrialState.STOPPED


def test_one_that_ends_at_a_rung_is_paused(judge):
    stopped = {"signal": "sweep.pruner"}
    assert judge(0, is_held=True, stopped=stopped).state is TrialState.PAUSED
    assert judge(0, stopped=stopped).state is TrialState.STOPPED
    assert judge(1, "TypeError: no", is_held=True, failed="TypeError: no").state is TrialState.FAILED


def test_one_of_an_earlier_process_of_the_sweep_is_judged_by_its_result(judge):
    assert judge(NOT_OUR_CHILD, ended="train.max_steps=4").state is TrialState.FINISHED
    assert judge(NOT_OUR_CHILD) == Outcome(TrialState.STOPPED, "", {})


def test_one_is_lost_where_nothing_has_asked_it_to_end(judge):
    killed, asked = -signal.SIGKILL, 75
    assert outcome.was_lost(judge(killed), killed)
    assert outcome.was_lost(judge(NOT_OUR_CHILD), NOT_OUR_CHILD)
    assert not outcome.was_lost(judge(asked), asked)


def test_the_words_of_states_are_those_of_the_journal_and_the_terminal():
    words = "new running paused stopped finished failed infeasible"
    assert " ".join(TrialState) == words
    assert " ".join(f"{state}" for state in TrialState) == words
    assert json.loads(json.dumps([*TrialState])) == words.split()


def test_the_result_of_an_earlier_failure_is_removed(tmp_path):
    result = tmp_path / RESULT
    result.write_text('{"stopped": {"signal": "SIGINT"}, "ended": "SIGINT"}')
    forget_failure(tmp_path)
    assert result.exists()
    result.write_text('{"failed": "out of memory"}')
    forget_failure(tmp_path)
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
