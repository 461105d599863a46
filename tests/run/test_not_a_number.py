"""An objective that is not a number is never the best, and never in a file."""

import math

import helpers
import pytest
import runs
from test_files import strict

EVALUATED = (*runs.MODELS["mlp"], "user_packages=[own_tasks]", "every.eval=2", "data.num_workers=0")


def lines(run_dir, name: str) -> list[dict]:
    return [strict(line) for line in (run_dir / name).read_text().splitlines()]


@pytest.mark.parametrize("direction", ["min", "max"])
def test_every_evaluation_is_nan(tmp_path, direction, caplog, capsys):
    ended = runs.run(
        tmp_path, *EVALUATED, "task=own_tasks.nan_in_evaluation", f"objective={direction} ratio", "every.save=2",
        "checkpointing.keep_last=9",
    )  # fmt: skip
    assert math.isnan(ended.objective)  # a float, for sweepers
    result = strict((tmp_path / "result.json").read_text())
    assert result["objective"] is None
    assert result["objective_note"] == "nan at every evaluation"
    for line in lines(tmp_path, "evaluations.jsonl"):
        assert (line["ratio"], line["ratio_note"]) == (None, "nan")
        assert line["loss"] > 0
    assert "eval ratio is nan at every evaluation" in caplog.text
    assert "nan at every evaluation" in capsys.readouterr().out
    assert runs.saved(tmp_path, 4)["progress"]["best_step"] is None
    assert not (tmp_path / "checkpoints" / "best").exists()


def test_infinity_is_not_the_best(tmp_path):
    runs.run(tmp_path, *EVALUATED, "task=own_tasks.InfOnce", "objective=max ratio", "every.save=2")
    assert [line["ratio"] for line in lines(tmp_path, "evaluations.jsonl")] == [None, 0.5]
    progress = runs.saved(tmp_path, 4)["progress"]
    assert (progress["best"], progress["best_step"]) == (0.5, 4)
    assert "objective_note" not in helpers.result(tmp_path)


def test_the_last_one_is_nan(tmp_path, monkeypatch):
    run = runs.prepare(tmp_path, *EVALUATED, "task=own_tasks.InfOnce", "objective=max ratio")
    run.close()
    run.state.progress.best, run.state.progress.objective = 0.5, -math.inf
    from trainapp.run.result import result_of

    assert result_of(run, 1.0).objective_note == "-inf at the last evaluation"


def test_a_logged_value(tmp_path):
    run = runs.prepare(tmp_path, *runs.MODELS["mlp"])
    scalars = {"loss": math.nan, "samples_per_second": 1.0, "memory/peak": 1, "memory/limit": 1, "memory/x": math.inf}
    run.tracker.log(1, 16, scalars, "accuracy")
    run.close()
    (line,) = lines(tmp_path, "metrics.jsonl")
    assert (line["loss"], line["loss_note"], line["memory/x"], line["memory/x_note"]) == (None, "nan", None, "inf")
