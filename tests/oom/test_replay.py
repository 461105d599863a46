"""`micro_schedule` of result.json, set as `batch.micro_schedule`, replays any run bit for bit.

Each run here has out-of-memory errors and something else that changes the process, the step or its number.
"""

import json
from pathlib import Path
from typing import Any

import helpers
import pytest
import runs
import torch
from faults import Fault
from harness import Recorded

from trainapp.run import prepare, recipe, recipe_text
from trainapp.run.first_sizes import initial_sizes
from trainapp.sizes.record import RESTART

from .conftest import cell, prepared, tiny

SAVING = {
    "checkpointing.save": True,
    "checkpointing.resume": "auto",
    "checkpointing.keep_last": 9,
    "train.max_steps": 6,
}
# Dropout and BatchNorm's running statistics: a step cut in another way has other bits.
OVERRIDES = cell("resnet", "fp32")
GPT = (*runs.MODELS["gpt"], "model.context_length=64", "data.size=96", "data.val_size=8", "data.min_length=6")


def ended(recorded: Recorded) -> tuple[torch.Tensor, dict[str, Any]]:
    """The final weights, and result.json as anyone would read it."""
    return runs.weights(recorded.run.state.model), helpers.result(recorded.run_dir)


def replay(run_dir: Path, result: dict[str, Any], *overrides: str, changes: dict[str, Any]) -> torch.Tensor:
    """The final weights of an undisturbed run that follows the schedule in `result`, in one process."""
    composed = runs.configure(
        run_dir,
        *(*runs.STEPS_ONLY, "train.ema=0.9", *overrides),
        f"batch.micro_schedule='{json.dumps(result['micro_schedule'])}'",  # as one pastes it on the command line
    )
    config = tiny(run_dir, *overrides, schedule=composed.batch.micro_schedule, changes=changes)
    again = Recorded(config)
    assert not again.failures
    assert ended(again)[1]["micro_schedule"] == result["micro_schedule"]
    return runs.weights(again.run.state.model)


def stopped_and_resumed(tmp_path: Path, *overrides: str, changes: dict[str, Any]) -> Recorded:
    """Memory runs out in step 2; after step 3 the run ends; another process resumes it and runs out in step 5."""
    first = Recorded(
        tiny(tmp_path / "run", *overrides, changes={**SAVING, **changes, "train.max_steps": 3}),
        Fault("backward", 2, 3),
    )
    assert len(first.failures) == 1
    config = tiny(tmp_path / "run", *overrides, changes={**SAVING, **changes})
    second = Recorded(config, Fault("backward", 5, 3))
    assert [f.step for f in second.failures] == [5]
    return second


@pytest.mark.slow
def test_a_run_that_was_resumed(tmp_path):
    changes = {"schedule.shape": "constant"}
    weights, result = ended(stopped_and_resumed(tmp_path, *OVERRIDES, changes=changes))
    assert result["micro_schedule"] == {"1": 8, "2": 4, "4": 8, "5": 4}  # batch.micro_size=8 begins each process
    assert result["oom_restarts"] == 2
    again = replay(tmp_path / "again", result, *OVERRIDES, changes={**changes, "train.max_steps": 6})
    assert torch.equal(weights, again)


@pytest.mark.slow
def test_without_the_checkpoints_record_it_would_not_replay(tmp_path, monkeypatch):
    # Negative control.

    def forgetting(run, restart, saved, changed):
        return initial_sizes(run, restart, saved and saved | {"used": {}}, changed)

    monkeypatch.setattr(prepare, "initial_sizes", forgetting)
    changes = {"schedule.shape": "constant"}
    weights, result = ended(stopped_and_resumed(tmp_path, *OVERRIDES, changes=changes))
    assert "2" not in result["micro_schedule"]
    config = {**changes, "train.max_steps": 6, "batch.micro_size": 8}
    schedule = {int(step): size for step, size in result["micro_schedule"].items()}
    again = Recorded(tiny(tmp_path / "again", *OVERRIDES, schedule=schedule, changes=config))
    assert not torch.equal(weights, runs.weights(again.run.state.model))


@pytest.mark.slow
@pytest.mark.parametrize("every", [None, 2])
def test_a_run_that_went_back_after_an_error_in_the_commit(tmp_path, every):
    """To the checkpoint of step 4, made in step 4, or to the start: what came after it is not in the schedule."""
    changes = {**SAVING, "every.save": every, "train.max_steps": 7}
    config = tiny(tmp_path / "run", *OVERRIDES, changes=changes)
    recorded = Recorded(config, Fault("backward", 3, 3), Fault("commit", 6, 2))
    assert [f.phase for f in recorded.failures] == ["backward", "commit"]
    weights, result = ended(recorded)
    assert result["micro_schedule"] == ({"1": 2} if every is None else {"1": 8, "3": 4, "5": 2})
    assert result["oom_restarts"] == 2
    again = replay(tmp_path / "again", result, *OVERRIDES, changes={"train.max_steps": 7})
    assert torch.equal(weights, again)


@pytest.mark.slow
def test_a_run_with_skipped_steps(tmp_path):
    """Step 3 is skipped; the attempt after it has the same step, and runs out of memory."""
    changes = {"train.nonfinite": "skip", "train.max_steps": 5}
    skipped = Fault("loss", 3, kind="nan")
    config = tiny(tmp_path / "run", *OVERRIDES, changes=changes)
    recorded = Recorded(config, skipped, Fault("backward", 4, 3))
    assert (recorded.run.state.progress.step, recorded.run.state.progress.skipped) == (5, 1)
    assert [f.step for f in recorded.failures] == [3]
    weights, result = ended(recorded)
    assert result["micro_schedule"] == {"1": 8, "4": 4}
    assert result["steps"] == 5
    schedule = {int(attempt): size for attempt, size in result["micro_schedule"].items()}

    def again(number: int) -> Recorded:
        shifted = {attempt + number * (attempt > 1): size for attempt, size in schedule.items()}
        config = tiny(tmp_path / f"again_{number}", *OVERRIDES, schedule=shifted, changes=changes)
        return Recorded(config, skipped)

    assert torch.equal(weights, runs.weights(again(0).run.state.model))
    assert again(0).run.sizes.micro_schedule() == schedule
    # Negative control: one attempt late.
    assert not torch.equal(weights, runs.weights(again(1).run.state.model))


@pytest.mark.slow
@pytest.mark.parametrize("resumed", [False, True])
def test_shapes_of_several_sizes(tmp_path, resumed):
    """A limit finds a size per shape: the fetch size, too, is as it was."""
    changes = {"batch.global_size": 16, "batch.micro_size": 16, "train.max_steps": 12, "train.ema": None}
    peak = Recorded(tiny(tmp_path / "a", *GPT, changes={**changes, "batch.micro_size": 5})).run.memory.peak
    limited = {**changes, "batch.micro_size": "auto", "memory.limit": peak, "oom.grow": True}
    if resumed:
        saving = {**limited, **SAVING, "train.max_steps": 12, "schedule.shape": "constant"}
        Recorded(tiny(tmp_path / "run", *GPT, changes={**saving, "train.max_steps": 3}))
        recorded = Recorded(tiny(tmp_path / "run", *GPT, changes=saving))
        changes["schedule.shape"] = "constant"
    else:
        recorded = Recorded(tiny(tmp_path / "run", *GPT, changes=limited))
    weights, result = ended(recorded)
    assert result["oom_restarts"] > 0
    sizes = [search.size for search in recorded.run.sizes.train.searches.values()]
    assert min(sizes) < max(sizes)
    assert any(isinstance(plan, dict) for plan in result["micro_schedule"].values())
    again = replay(tmp_path / "again", result, *GPT, changes={**changes, "batch.micro_size": "auto"})
    assert torch.equal(weights, again)


# A schedule that is in force.


def test_the_opening_line_says_what_is_in_force(tmp_path):
    run = runs.closed(tmp_path, *runs.MODELS["mlp"], "batch.micro_schedule={1: 4, 3: 8, 9: 2}", "batch.micro_size=16")
    first, *_ = recipe_text.lines_of(recipe.recipe_of(run))
    assert "= micro-batch 4 x 4" in first
    assert "batch.micro_schedule" in first


# What a restart leaves behind.

LEFT = {"micro": {"start": 8, "buckets": {"128": [3, 0, 6, True]}}, "oom_restarts": 5}


def sizes_at_start(run_dir: Path) -> tuple[int, int]:
    """Return the size with which a run begins, and the number of restarts that it knows of."""
    run = prepared(tiny(run_dir, *OVERRIDES))
    run.close()
    return run.sizes.train.size, run.sizes.oom_restarts


def test_the_size_of_a_restart_is_used_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    (tmp_path / RESTART).write_text(json.dumps(LEFT))
    assert sizes_at_start(tmp_path) == (3, 5)
    assert not (tmp_path / RESTART).exists()
    assert sizes_at_start(tmp_path) == (8, 0)


def test_what_an_earlier_start_has_left_is_discarded(tmp_path, monkeypatch):
    """It is not for this start of the same command, nor for its restarts."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    (tmp_path / RESTART).write_text(json.dumps(LEFT))
    assert sizes_at_start(tmp_path) == (8, 0)
    assert not (tmp_path / RESTART).exists()
