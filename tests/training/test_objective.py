"""The objective is known to be one of the task's metrics before anything is trained."""

import logging

import helpers
import pytest
import runs
import weighted

from trainapp.errors import UserError

OWN = (*runs.MODELS["mlp"], "user_packages=[own_tasks]", "task=own_tasks.nan_in_evaluation", "every.eval=2")
RARE = (*weighted.OVERRIDES, "task=weighted.task", "every.eval=2")


def test_a_built_in_tasks_is_found_before_anything_is_written(tmp_path):
    rule = r"objective=max acuracy: there is no such metric; there are accuracy, loss; did you mean 'accuracy'\?"
    with pytest.raises(UserError, match=rule):
        runs.prepare(tmp_path, *runs.MODELS["mlp"], "every.eval=2", "objective=max acuracy")
    assert helpers.files(tmp_path) == set()


def test_one_that_only_some_batches_have(tmp_path, caplog):
    """The first samples lack it: an evaluation before the first step finds it, or refuses it."""
    caplog.set_level(logging.INFO)
    first = weighted.Vectors("train").targets[:2]
    assert 3 not in first  # else another test
    result = runs.run(tmp_path / "rare", *RARE, "objective=max third", "train.max_steps=2")
    assert "objective=max third: not among the metrics of the first samples, so evaluating first" in caplog.text
    assert [line["step"] for line in helpers.evaluations(tmp_path / "rare")] == [0, 2]
    assert result.objective == helpers.evaluations(tmp_path / "rare")[-1]["third"]
    with pytest.raises(UserError, match=r"objective=max thrid: there is no such metric; .* mean 'third'"):
        runs.run(tmp_path / "misspelt", *RARE, "objective=max thrid", "train.max_steps=2")
    assert not (tmp_path / "misspelt" / "checkpoints").exists()
    assert not (tmp_path / "misspelt" / "metrics.jsonl").exists()  # nor a step


def test_one_that_the_first_samples_have_costs_no_evaluation(tmp_path):
    runs.run(tmp_path, *OWN, "objective=max ratio", "train.max_steps=2")
    assert [line["step"] for line in helpers.evaluations(tmp_path)] == [2]


def test_a_run_that_is_never_evaluated_says_so(tmp_path, caplog):
    runs.prepare(tmp_path, *runs.MODELS["mlp"], "every.eval=null", "objective=max accuracy").close()
    assert "objective=max accuracy: the run is never evaluated" in caplog.text
    with pytest.raises(UserError, match=r"stopping\.patience=2: it follows evaluations, but every\.eval=null"):
        runs.prepare(tmp_path, *runs.MODELS["mlp"], "every.eval=null", "stopping.patience=2")


def test_the_result_says_what_a_sweeper_receives(tmp_path):
    """The objective of the last evaluation; here the best is an earlier one."""
    result = runs.run(
        tmp_path, *runs.MODELS["mlp"], "every.eval=2", "objective=max loss", "optimizer.lr=0.05", "train.max_steps=4"
    )
    written, (first, last) = helpers.result(tmp_path), helpers.evaluations(tmp_path)
    assert first["loss"] > last["loss"]
    assert (written["best_objective"], written["best_step"]) == (first["loss"], 2)
    assert written["objective"] == result.objective == last["loss"]
