"""What a run says of itself: lines at its start, the table and result.json at its end. An objective that is no number
is never the best, and never in a file.
"""

import math

import helpers
import pytest
import runs
from test_files import strict

from trainapp.run.result import print_summary, result_of
from trainapp.training import loop

MLP = (*runs.MODELS["mlp"], "model.depth=2", "train.max_steps=1")  # 64 x 16 + 16 parameters, and 16 x 10 + 10


def trained_parts(caplog, run_dir, *overrides):
    """What a run logs of parameters that are trained."""
    caplog.set_level("INFO", "trainapp")
    caplog.clear()
    runs.run(run_dir, *overrides)
    parts = "; ".join(caplog.messages).split("; ")
    return [part for part in parts if "parameters are trained" in part]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.freeze=[layers]"], ["170 of 1210 parameters are trained (14.05%)"]),
        (["optimizer.groups=[{match: layers, lr: 0.01}]"], []),
    ],
)
def test_a_part_is_trained(tmp_path, caplog, overrides, said):
    assert trained_parts(caplog, tmp_path / "run", *MLP, *overrides) == said
    evaluated = (*MLP, *overrides, "mode=eval", f"checkpointing.resume={tmp_path / 'run'}")
    assert trained_parts(caplog, tmp_path / "eval", *evaluated) == []


def test_seconds_are_of_all_processes_of_a_run(tmp_path):
    first = runs.prepare(tmp_path, *MLP, "every.save=1")
    first.meter.began -= 3600
    loop.train(first)
    first.close()
    second = runs.prepare(tmp_path, *MLP, "train.max_steps=2")
    second.close()
    assert 3600 < result_of(second).seconds < 3700
    assert runs.run(tmp_path / "eval", *MLP, "mode=eval", f"checkpointing.resume={tmp_path}").seconds < 100


WITHOUT_STEPS = ("throughput", "peak memory", "micro-batch")


def rows_of(capsys) -> dict[str, str]:
    """The rows of the summary, by name."""
    lines = capsys.readouterr().out.splitlines()
    return {name.strip(): value for name, _, value in (line.partition("  ") for line in lines)}


def test_a_finished_run_that_is_started_again_has_no_rows_about_steps_it_did_not_make(tmp_path, capsys):
    runs.run(tmp_path, *runs.MODELS["mlp"])
    first = rows_of(capsys)
    assert first.keys() >= {*WITHOUT_STEPS, "steps", "time", "checkpoint"}
    assert first["micro-batch"].strip() == "16 x 1 accumulated"
    ended = runs.run(tmp_path, *runs.MODELS["mlp"])
    again = rows_of(capsys)
    assert (ended.steps, again.keys()) == (4, first.keys() - set(WITHOUT_STEPS) | {"ended by"})
    assert all(again[name] == first[name] for name in ("steps", "checkpoint", "outputs"))


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
    assert helpers.result(tmp_path)["objective_note"] is None


def test_the_last_one_is_nan(tmp_path):
    run = runs.closed(tmp_path, *EVALUATED, "task=own_tasks.InfOnce", "objective=max ratio")
    run.state.progress.best, run.state.progress.objective = 0.5, -math.inf
    assert result_of(run).objective_note == "-inf at the last evaluation"


def test_a_logged_value(tmp_path):
    run = runs.prepare(tmp_path, *runs.MODELS["mlp"])
    scalars = {"loss": math.nan, "samples_per_second": 1.0, "memory/peak": 1, "memory/limit": 1, "memory/x": math.inf}
    run.tracker.log_step(1, 16, scalars, "accuracy")
    run.close()
    (line,) = lines(tmp_path, "metrics.jsonl")
    assert (line["loss"], line["loss_note"], line["memory/x"], line["memory/x_note"]) == (None, "nan", None, "inf")


def test_the_table_has_the_size_of_most_steps(tmp_path, capsys):
    """Not that of the last step."""
    schedule = "batch.micro_schedule={1: 8, 9: 4}"
    ended = runs.run(tmp_path, *MLP, schedule, "train.max_steps=10")
    assert ended.micro_size == 4
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("micro-batch")]
    assert row.split(maxsplit=1)[1] == "8 x 2 accumulated"


def test_the_table_names_skipped_steps(tmp_path, capsys):
    run = runs.prepare(tmp_path, *MLP)
    loop.train(run)
    run.state.progress.skipped = 3
    print_summary(run, result_of(run))
    assert "1 (16 samples), 3 more skipped: not finite, or no count" in capsys.readouterr().out
