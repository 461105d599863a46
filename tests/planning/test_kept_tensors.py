"""Tensors that live from step to step: counted in every one, planned and measured alike."""

import itertools

import pytest
import runs
from torch import nn

from trainapp.config import compose
from trainapp.errors import TrainingStopped
from trainapp.memory.live_tensors import LiveTensors
from trainapp.parallel.ranks import SingleRank
from trainapp.planning import planner
from trainapp.run import runner
from trainapp.signals import StopRequest
from trainapp.training import loop
from trainapp.training.evaluate import evaluate

STEPS = 5
ONE = "batch.global_size=16"  # micro-batch per step
OVER = (
    *runs.TINY, "data=digits", "checkpointing=off", "oom.grow=false", "oom.clean_steps=100",
    "batch.global_size=32", "batch.micro_size=16", "train.grad_clip=null", "train.max_steps=100",
    "plan.techniques=false", "user_packages=[planned_models]",
)  # fmt: skip


@pytest.fixture
def own(tmp_path):
    """Overrides for a run of a model of `planned_models`."""

    def overrides(name, *more):
        group = tmp_path / "conf" / "model"
        group.mkdir(parents=True, exist_ok=True)
        (group / "own.yaml").write_text(f"_target_: planned_models.{name}\n")
        return (*OVER, "model=own", f"hydra.searchpath=[file://{tmp_path / 'conf'}]", *more)

    return overrides


def data(name):
    return ("model=mlp", "model.width=16", "~data.augment", f"data._target_=planned_models.{name}")


def measured(folder, *overrides, steps=STEPS):
    """The peak of each step, in bytes."""
    run, peaks = runs.prepare(folder, *overrides), []
    try:
        for _ in range(steps):
            loop.train_step(run)
            peaks.append(run.memory.counter.peak)
    finally:
        run.close()
    return peaks


def planned(*overrides):
    return planner.plan(compose.from_command_line(overrides))[0]


def test_a_list_that_grows_is_counted_in_every_step(tmp_path, own):
    peaks = measured(tmp_path / "run", *own("Bank"))
    growth = 2 * 4000  # of two micro-batches
    assert [b - a for a, b in itertools.pairwise(peaks[1:])] == [growth] * (STEPS - 2)
    facts = planned(*own("Bank"))
    assert facts["peak_bytes"] == peaks[1]
    assert facts["categories"]["kept"] == growth


def test_a_ring_of_fixed_length_stays_as_large_as_it_is(tmp_path, own):
    peaks = measured(tmp_path / "run", *own("Ring", ONE))
    assert peaks[1] < peaks[2] == peaks[3] == peaks[4]
    assert peaks[4] == measured(tmp_path / "none", *own("Net", ONE))[4] + 3 * 4000


def test_what_a_model_keeps_until_its_next_forward_is_planned_to_the_byte(tmp_path, own):
    overrides = own("Remembering", ONE)
    peaks, facts = measured(tmp_path / "run", *overrides), planned(*overrides)
    assert peaks[0] < peaks[1] == peaks[2]
    assert facts["peak_bytes"] == max(peaks)


def test_it_is_counted_in_the_first_step_only_without_what_is_carried(tmp_path, own, monkeypatch):
    """The comparison above can fail."""
    peaks = measured(tmp_path / "right", *own("Remembering", ONE))
    monkeypatch.setattr(LiveTensors, "_surviving", lambda self: [])
    assert max(measured(tmp_path / "wrong", *own("Remembering", ONE))) < max(peaks)


def test_an_evaluation_between_steps_leaves_nothing_in_them(tmp_path):
    """Its totals, and a metric's, die with it."""
    run, peaks = runs.prepare(tmp_path, *OVER, *runs.MODELS["mlp"], "every.eval=1", "batch.eval_micro_size=8"), []
    try:
        for _ in range(4):
            loop.train_step(run)
            peaks.append(run.memory.counter.peak)
            evaluate(run)
    finally:
        run.close()
    assert peaks[1] == peaks[2] == peaks[3]


def test_the_parameters_of_a_teacher_count_before_they_are_used(tmp_path):
    overrides = (*OVER, "model=mlp", "model.width=16", "task=planned_models.Taught")
    peaks, facts = measured(tmp_path / "run", *overrides), planned(*overrides)
    assert facts["peak_bytes"] == max(peaks)
    assert facts["categories"]["kept"] == 26_000


def test_a_module_without_shapes_yet_has_no_memory(tmp_path):
    run = runs.prepare(tmp_path, *OVER, "model=mlp", "model.width=16", "task=planned_models.Taught")
    run.state.stateful.modules["task.lazy"] = nn.LazyLinear(3)
    with run.memory.watch(run.meter.resident()):
        events, kinds = run.memory.events([])
    run.close()
    assert sum(size for number, size in events if kinds[number] == "kept") == 26_000


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_the_limit_is_not_exceeded_without_a_word(tmp_path, own, workers):
    """Every step is small, and none fails in a run that forgets."""
    overrides = own("Bank", f"data.num_workers={workers}")
    limit = measured(tmp_path / "free", *overrides)[3] + 4000
    with pytest.raises(TrainingStopped, match="nothing is left to halve"):
        runs.run(tmp_path / "limited", *overrides, "batch.micro_size=auto", f"memory.limit={limit}")


@pytest.mark.slow
def test_a_rollback_counts_what_the_failed_attempt_has_left_as_long_as_it_lives(tmp_path, own):
    """The bank keeps what the failed attempts have added: no rollback restores plain attributes."""
    overrides = own("Ring", "batch.micro_size=auto")
    whole = measured(tmp_path / "free", *own("Ring", "batch.micro_size=32"))
    half = measured(tmp_path / "half", *own("Ring"))
    run = runner.prepare(
        compose.from_command_line([*overrides, "train.max_steps=5", f"memory.limit={max(whole) - 1}"], str(tmp_path)),
        StopRequest(),
        SingleRank(),
    )
    try:
        failures = []
        while (failure := runner.attempt(run)) is not None:
            failures.append(failure)
            runner.recover(run, failure)
        last = run.memory.counter.peak
    finally:
        run.close()
    assert failures
    assert all(isinstance(failure.used, int) for failure in failures)
    assert run.sizes.train.size == 16
    assert last == half[-1]


@pytest.mark.parametrize("kind", ["Views", "Sliced"])
def test_samples_that_are_views_of_a_data_set_count_as_themselves(tmp_path, kind):
    overrides = (*OVER, *data(kind), "data.num_workers=0")
    peaks, facts = measured(tmp_path / "run", *overrides), planned(*overrides)
    assert max(peaks) <= facts["peak_bytes"] <= max(peaks) + 16 * 64 * 4  # the batch, which a trace has as its own
    stacked = measured(tmp_path / "stacked", *OVER, *data("Stacked"), "data.num_workers=0")
    batch = 16 * 64 * 4
    assert max(peaks) <= max(stacked)
    assert max(stacked) - max(peaks) <= 3 * batch  # single samples, and for slices the batch


def test_models_of_our_own_keep_nothing(tmp_path):
    for name, model in runs.MODELS.items():
        run = runs.prepare(tmp_path / name, *OVER, *model)
        try:
            for _ in range(3):
                loop.train_step(run)
                with run.memory.watch(run.meter.resident()):
                    kept = [n for n, kind in run.memory.counter.kinds.items() if kind == "kept"]
                assert kept == [], name
        finally:
            run.close()


def test_the_error_names_what_is_kept(tmp_path, own):
    run = runs.prepare(tmp_path, *own("Bank"))
    try:
        for _ in range(2):
            loop.train_step(run)
        run.memory.limit = run.memory.counter.peak
        failure = runner.attempt(run)
    finally:
        run.close()
    assert failure.step == 3
    assert failure.by_category["kept"] == 4 * 4000
    assert sum(failure.by_category.values()) == failure.used
