"""Tensors that live from step to step: counted in every one, planned and measured alike."""

import contextlib
import itertools

import pytest
import runs

from trainapp.config import compose
from trainapp.errors import TrainingStopped
from trainapp.memory.live_tensors import LiveTensors
from trainapp.planning import planner
from trainapp.run import runner
from trainapp.training import loop
from trainapp.training.evaluation.evaluate import evaluate

STEPS = 5
ONE = "batch.global_size=16"  # micro-batch per step
OVER = (
    *runs.TINY, "data=digits", "checkpointing=off", "oom.grow=false", "oom.clean_steps=100",
    "batch.global_size=32", "batch.micro_size=16", "train.grad_clip=null", "train.max_steps=100",
    "plan.techniques=false", "user_packages=[planned_models]",
)  # fmt: skip


def own(name, *more):
    return (*OVER, *runs.own_model(f"planned_models.{name}"), *more)


def measured(folder, *overrides, steps=STEPS):
    """The peak of each step, in bytes."""
    peaks = []
    with contextlib.closing(runs.prepare(folder, *overrides)) as run:
        for _ in range(steps):
            loop.train_step(run)
            peaks.append(run.memory.counter.peak)
    return peaks


def planned(*overrides):
    return planner.plan(compose.from_command_line(overrides))[0]


def test_a_list_that_grows_is_counted_in_every_step(tmp_path):
    peaks = measured(tmp_path / "run", *own("Bank"))
    growth = 2 * 4000  # of two micro-batches
    assert [b - a for a, b in itertools.pairwise(peaks[1:])] == [growth] * (STEPS - 2)
    facts = planned(*own("Bank"))
    assert facts["peak_bytes"] == peaks[1]
    assert facts["categories"]["kept"] == growth


def test_what_a_model_keeps_until_its_next_forward_is_planned_to_the_byte(tmp_path):
    overrides = own("Remembering", ONE)
    peaks, facts = measured(tmp_path / "run", *overrides), planned(*overrides)
    assert peaks[0] < peaks[1] == peaks[2]
    assert facts["peak_bytes"] == max(peaks)


def test_it_is_counted_in_the_first_step_only_without_what_is_carried(tmp_path, monkeypatch):
    """The comparison above can fail."""
    peaks = measured(tmp_path / "right", *own("Remembering", ONE))
    monkeypatch.setattr(LiveTensors, "_surviving", lambda self: [])
    assert max(measured(tmp_path / "wrong", *own("Remembering", ONE))) < max(peaks)


def test_an_evaluation_between_steps_leaves_nothing_in_them(tmp_path):
    """Its totals, and a metric's, die with it."""
    overrides, peaks = (*OVER, *runs.MODELS["mlp"], "every.eval=1", "batch.eval_micro_size=8"), []
    with contextlib.closing(runs.prepare(tmp_path, *overrides)) as run:
        for _ in range(4):
            loop.train_step(run)
            peaks.append(run.memory.counter.peak)
            evaluate(run)
    assert peaks[1] == peaks[2] == peaks[3]


def test_the_parameters_of_a_teacher_count_before_they_are_used(tmp_path):
    overrides = (*OVER, "model=mlp", "model.width=16", "task=planned_models.Taught")
    peaks, facts = measured(tmp_path / "run", *overrides), planned(*overrides)
    assert facts["peak_bytes"] == max(peaks)
    assert facts["categories"]["kept"] == 26_000


@pytest.mark.slow
def test_the_limit_is_not_exceeded_without_a_word(tmp_path):
    """Every step is small, and none fails in a run that forgets."""
    overrides = own("Bank")
    limit = measured(tmp_path / "free", *overrides)[3] + 4000
    with pytest.raises(TrainingStopped, match="nothing is left to halve"):
        runs.run(tmp_path / "limited", *overrides, "batch.micro_size=auto", f"memory.limit={limit}")


def test_models_of_our_own_keep_nothing(tmp_path):
    for name, model in runs.MODELS.items():
        with contextlib.closing(runs.prepare(tmp_path / name, *OVER, *model)) as run:
            for _ in range(3):
                loop.train_step(run)
                with run.memory.watch(run.meter.resident()):
                    kept = [n for n, kind in run.memory.counter.categories.items() if kind == "kept"]
                assert kept == [], name


def test_the_error_names_what_is_kept(tmp_path):
    with contextlib.closing(runs.prepare(tmp_path, *own("Bank"))) as run:
        for _ in range(2):
            loop.train_step(run)
        run.memory.limit = run.memory.counter.peak
        failure = runner.run_until_oom(run)
    assert failure.step == 3
    assert failure.by_category["kept"] == 4 * 4000
    assert sum(failure.by_category.values()) == failure.used
