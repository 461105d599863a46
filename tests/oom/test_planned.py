"""`auto` asks the plan after a run's first error: one error, then the size that fits, which the step itself proves.

The planner's process has started already: tests/planning/test_process.py has runs that start it.
"""

import logging
import time

import pytest
import runs
from helpers import incidents, metrics

import trainapp
from trainapp.config import compose
from trainapp.oom import planned
from trainapp.parallel.ranks import SingleRank
from trainapp.planning import planner
from trainapp.run import runner
from trainapp.tracking.console import Progress
from trainapp.tracking.meter import Meter

from .conftest import MODELS, tiny
from .inject import Recorded

RUN = (*runs.TINY, "batch.global_size=32", "train.max_steps=8", "checkpointing=off", "oom.remember=false")
RUN = (*RUN, "plan.levers=false")  # for the plans that are compared with runs: tracing all levers takes half a minute
GPT = (*RUN, *runs.MODELS["gpt"], "memory.limit=300KB")

pytestmark = pytest.mark.usefixtures("without_pictures", "planner_that_stays")


@pytest.fixture
def own(tmp_path):
    """Overrides for a run of a model of `planned_models` with so many bytes for what depends on the batch."""

    def overrides(name, room, *more):
        group = tmp_path / "conf" / "model"
        group.mkdir(parents=True, exist_ok=True)
        (group / "own.yaml").write_text(f"_target_: planned_models.{name}\n")
        search = f"hydra.searchpath=[file://{tmp_path / 'conf'}]"
        own = ("model=own", "data=digits", "user_packages=[planned_models]", search, "train.grad_clip=null")
        return (*RUN, *own, f"memory.limit={12_000 + room}", *more)

    return overrides


def plan_of(overrides):
    """As `trainapp.plan`, in this process."""
    return planner.plan(compose.from_command_line(overrides))[0]


def run_of(folder, overrides, caplog=None):
    """The run's result, its incidents, and how often a plan was asked for."""
    if caplog is not None:
        caplog.clear()
        caplog.set_level(logging.INFO)
    ended = runs.run(folder, *overrides)
    asked = 0 if caplog is None else sum("planning the largest" in r.getMessage() for r in caplog.records)
    return ended, incidents(folder), asked


@pytest.mark.slow
def test_the_second_attempt_has_the_largest_size_that_fits(tmp_path):
    ended, (only,), _ = run_of(tmp_path / "planned", GPT)
    searched, _, _ = run_of(tmp_path / "searched", (*GPT, "oom.plan=false"))
    largest = plan_of(GPT)["largest_micro_size"]
    assert (only["old_size"], only["new_size"]) == (32, largest)
    assert f"micro-batch 32 -> {largest} as planned in " in only["action"]
    assert ended.micro_size == largest >= searched.micro_size
    assert ended.oom_restarts == 1 < searched.oom_restarts
    assert ended.peak_memory_bytes <= 300_000
    assert ended.micro_schedule == {1: largest}


@pytest.mark.slow
def test_the_first_fetch_is_halved_without_a_plan(tmp_path, caplog):
    """Its shape is not known until a batch has been cut. An error after that asks."""
    own = ("model=mlp", "model.width=16", "data=digits", "~data.augment", "data._target_=planned_models.Stacked")
    overrides = (
        *RUN,
        *own,
        "user_packages=[planned_models]",
        "batch.global_size=256",
        "memory.limit=70000",
        "data.num_workers=0",
    )
    _, failures, asked = run_of(tmp_path / "run", overrides, caplog)
    assert (failures[0]["step"], failures[0]["phase"], failures[0]["new_size"]) == (1, "data", 128)
    assert asked == 1
    assert ["as planned" in failure["action"] for failure in failures] == [False, False, True]


def test_loader_processes_have_no_limit_of_their_own(tmp_path):
    """The data set is larger than the limit. Its rows are views of it, which a counter in its process would add."""
    own = ("model=mlp", "model.width=16", "data=digits", "~data.augment", "data._target_=planned_models.Views")
    overrides = (*RUN, *own, "user_packages=[planned_models]", "memory.limit=100000", "data.num_workers=1")
    ended, failures, _ = run_of(tmp_path / "run", overrides)
    assert failures == []
    assert ended.steps == 8


def test_a_plan_of_views_is_exact(tmp_path):
    """Neither a run nor its plan counts what the samples are views of."""
    own = ("model=mlp", "model.width=16", "data=digits", "~data.augment", "user_packages=[planned_models]")
    overrides = (*RUN, *own, "train.grad_clip=null")
    facts = plan_of([*overrides, "data._target_=planned_models.Views"])
    assert facts["certainty"] == "exact"


@pytest.mark.slow
def test_it_replays_bit_for_bit(tmp_path):
    """Dropout: a step cut in another way has other bits."""
    changes = {"batch.micro_size": "auto", "batch.global_size": 32}
    overrides = (*runs.MODELS["gpt"], "oom.plan=true")
    recorded = Recorded(tiny(tmp_path / "planned", *overrides, changes={**changes, "memory.limit": 320_000}))
    schedule = recorded.run.sizes.used
    assert len(recorded.failures) == 1
    assert schedule.keys() == {1}
    replayed = Recorded(tiny(tmp_path / "replayed", *overrides, schedule=schedule, changes=changes))
    assert replayed.failures == []
    assert runs.differences(recorded.state(), replayed.state()) == []
    other = Recorded(tiny(tmp_path / "other", *overrides, schedule={1: 7}, changes=changes))
    assert runs.differences(recorded.state(), other.state()) != []


@pytest.mark.slow
def test_a_plan_that_is_too_high_is_halved_and_not_asked_again(tmp_path, own, caplog):
    ended, failures, asked = run_of(tmp_path / "run", own("Hungrier", 250_000, "train.max_steps=12"), caplog)
    assert "as planned" in failures[0]["action"]
    assert failures[1]["old_size"] == failures[0]["new_size"]
    assert failures[1]["new_size"] == failures[1]["old_size"] // 2
    assert asked == 1
    assert len(failures) == 2  # what half of the size needs says how wrong the plan is
    assert 0.9 * 262_000 < ended.peak_memory_bytes <= 262_000


@pytest.mark.slow
def test_a_plan_that_is_too_low_does_not_end_the_search(tmp_path, own, caplog):
    ended, failures, asked = run_of(tmp_path / "run", own("Leaner", 200_000, "train.max_steps=30"), caplog)
    low = failures[0]["new_size"]
    assert "as planned" in failures[0]["action"]
    assert (asked, len(failures)) == (1, 1)
    assert ended.micro_size > 2 * low
    without_growing, _, _ = run_of(tmp_path / "fixed", own("Leaner", 200_000, "oom.grow=false"))
    assert without_growing.micro_size == low


@pytest.mark.slow
def test_where_values_are_read_the_higher_peak_counts(tmp_path, own):
    overrides = own("Reading", 200_000)
    _, failures, _ = run_of(tmp_path / "run", overrides)
    first = failures[0]
    facts, _ = planner.plan(compose.from_command_line(overrides), only=("training",))
    assert facts["certainty"] == "range"
    assert first["new_size"] == facts["largest_micro_size"]
    assert len(failures) == 1


@pytest.mark.slow
def test_where_values_are_read_and_ask_for_less_the_search_goes_on_without_an_error(tmp_path, own):
    ended, (only,), _ = run_of(tmp_path / "run", own("Thrifty", 400_000, "train.max_steps=12"))
    assert ended.micro_size > 2 * only["new_size"]
    assert 0.9 * 412_000 < ended.peak_memory_bytes <= 412_000


@pytest.mark.slow
def test_evaluation_begins_with_its_planned_size_too(tmp_path, own, caplog):
    """It would fail with 64, 32, 16, ..."""
    overrides = own("Evaluating", 300_000, "every.eval=8")
    _, failures, asked = run_of(tmp_path / "run", overrides, caplog)
    assert [failure["phase"] for failure in failures] == ["forward"]
    assert asked == 1
    facts = plan_of(overrides)
    assert 1 < facts["largest_eval_micro_size"] < facts["largest_micro_size"]
    assert metrics(tmp_path / "run")[-1]["batch/eval_micro_size"] == facts["largest_eval_micro_size"]


@pytest.mark.slow
def test_an_error_of_evaluation_is_planned_alone(tmp_path, own, caplog):
    overrides = own("Evaluating", 300_000, "every.eval=8", "batch.micro_size=2")
    ended, (only,), asked = run_of(tmp_path / "run", overrides, caplog)
    largest = plan_of(overrides)["largest_eval_micro_size"]
    assert only["phase"] == "evaluate"
    assert f"evaluation micro-batch 64 -> {largest} as planned in " in only["action"]
    assert (ended.micro_size, asked) == (2, 1)


@pytest.mark.slow
def test_a_run_that_begins_with_the_plan_meets_no_error(tmp_path, own, caplog):
    overrides = own("Evaluating", 300_000, "every.eval=8", "batch.micro_size=plan")
    ended, failures, asked = run_of(tmp_path / "run", overrides, caplog)
    facts = plan_of(overrides)
    assert failures == []
    assert asked == 0
    assert ended.micro_size == facts["largest_micro_size"] < 32
    assert metrics(tmp_path / "run")[-1]["batch/eval_micro_size"] == facts["largest_eval_micro_size"] < 64


@pytest.mark.slow
def test_a_planned_evaluation_that_fails_is_halved(tmp_path, own, caplog):
    """batch.micro_size=plan has asked already."""
    overrides = own("Hungrier", 250_000, "every.eval=8", "batch.micro_size=plan")
    _, failures, asked = run_of(tmp_path / "run", overrides, caplog)
    assert asked == 0
    assert "evaluate" in {failure["phase"] for failure in failures}
    assert all("as planned" not in failure["action"] for failure in failures)


@pytest.mark.slow
def test_where_a_plan_takes_too_long_the_size_is_halved(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(planned, "PATIENCE", 0.01)
    monkeypatch.setattr(planned, "ATTEMPTS", 0)
    _, failures, asked = run_of(tmp_path, (*GPT, "train.max_steps=1"), caplog)
    assert asked == 1
    assert any("took longer than 0 s; halving instead" in record.getMessage() for record in caplog.records)
    assert (failures[0]["old_size"], failures[0]["new_size"]) == (32, 16)


@pytest.mark.slow
def test_lengths_that_vary_within_a_shape_are_planned_for_the_longest(tmp_path):
    overrides = (*GPT, "data.min_length=12")
    _, failures, _ = run_of(tmp_path, overrides)
    facts = planner.plan(compose.from_command_line(overrides), only=("training",))[0]
    assert [failure["new_size"] for failure in failures] == [facts["largest_micro_size"]]


@pytest.mark.slow
def test_texts_of_all_lengths_meet_one_error(tmp_path):
    """A search would try the middle between the planned size and the failed one again and again."""
    overrides = (*GPT, "data.min_length=2", "train.max_steps=20")
    _, failures, _ = run_of(tmp_path / "planned", overrides)
    assert len(failures) == 1
    _, searched, _ = run_of(tmp_path / "searched", (*overrides, "oom.plan=false"))
    assert len(searched) > 2


@pytest.mark.slow
def test_what_is_only_estimated_leaves_a_margin(tmp_path, own):
    overrides = own("Leaving", 500_000, "train.max_steps=12")
    ended, (only,), _ = run_of(tmp_path / "run", overrides)
    facts = plan_of(overrides)
    assert facts["certainty"] == "not traceable"
    assert 0.9 * facts["largest_micro_size"] <= only["new_size"] < facts["largest_micro_size"]
    assert ended.micro_size >= only["new_size"]


LEFT_ALONE = {
    "a size of the user's": ("batch.micro_size=16",),
    "micro-batches of the user's": ("accumulation.steps=2",),
    "a schedule": ("batch.micro_schedule={1: 32}",),
    "a smaller global batch": ("oom.keep_global_batch=false",),
    "false": ("oom.plan=false",),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_what_is_halved_without_a_plan(tmp_path, caplog, case):
    _, failures, asked = run_of(tmp_path, (*GPT, "train.max_steps=1", *LEFT_ALONE[case]), caplog)
    assert asked == 0
    assert failures[0]["new_size"] == failures[0]["old_size"] // 2


@pytest.mark.slow
def test_a_second_shape_is_planned_too(tmp_path, caplog):
    """Each shape has a size of its own; the first that fails gets the plan's."""
    caplog.set_level(logging.INFO)
    calls = {"n": 0}

    def short_but_one(batch):
        calls["n"] += 1
        return batch if calls["n"] > 5 else {name: t[:, :4].contiguous() for name, t in batch.items()}

    config = tiny(
        tmp_path, *MODELS["gpt"], "oom.plan=true", "train.ema=null",
        changes={"batch.micro_size": "auto", "memory.limit": 190_000, "train.max_steps": 8},
    )  # fmt: skip
    recorded = Recorded(config, changed=short_but_one)
    (only,) = recorded.failures
    assert only.step > 1
    facts = planner.plan(config, only=("training",))[0]
    assert (only.old_size, only.new_size) == (16, facts["largest_micro_size"])
    sizes = {bucket: search.size for bucket, search in recorded.run.sizes.train.searches.items()}
    assert sizes == {8: 16, 32: only.new_size}


def test_a_stop_request_does_not_wait_for_the_plan(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    stop = runs.StopAt(0)
    run = runner.prepare(compose.from_command_line(GPT, str(tmp_path / "run")), stop, SingleRank())
    stop.run = run
    try:
        failure = runner.attempt(run)
        assert failure is not None
        runner.recover(run, failure)
    finally:
        run.close()
    assert any("the run is to stop; halving instead" in record.getMessage() for record in caplog.records)
    assert (failure.old_size, failure.new_size) == (32, 16)


@pytest.mark.slow
def test_what_does_not_fit_at_all_takes_two_errors(tmp_path, caplog):
    """The plan says that none fits: the smallest is tried, and the run ends with its advice."""
    overrides = (*runs.MODELS["gpt"], "batch.micro_size=auto", "oom.plan=true")
    limit = plan_of([*RUN, *overrides, "batch.micro_size=1"])["peak_bytes"] - 4000
    caplog.set_level(logging.INFO)
    with pytest.raises(trainapp.errors.TrainingStopped, match="with micro-batch 1: nothing is left to halve"):
        runs.run(tmp_path, *RUN, *overrides, f"memory.limit={limit}")
    assert len(incidents(tmp_path)) == 1  # the last one is the message


def test_a_plan_under_which_nothing_fits_refuses_the_run(tmp_path, own):
    with pytest.raises(trainapp.errors.UserError) as error:
        run_of(tmp_path, own("Net", 4000, "batch.micro_size=plan"))
    message = str(error.value)
    assert message.startswith("batch.micro_size=plan: no micro-batch fits memory.limit=15.6 KiB: the smallest needs ")
    assert "(exact)" in message
    assert "batch.micro_size=N tries it anyway" in message


def test_a_plan_under_which_evaluation_does_not_fit_refuses_the_run(tmp_path, own):
    with pytest.raises(trainapp.errors.UserError, match=r"no evaluation micro-batch fits .* batch\.eval_micro_size=N"):
        run_of(tmp_path, own("Evaluating", 25_000, "batch.micro_size=plan", "every.eval=8"))


@pytest.mark.slow
def test_a_range_under_which_nothing_fits_begins_with_the_smallest_and_a_warning(tmp_path, own, caplog):
    """The highest peak of one sample does not fit; the run needs the lowest."""
    ended, failures, _ = run_of(tmp_path, own("Thrifty", 25_000, "batch.micro_size=plan"), caplog)
    assert (ended.micro_size, failures) == (1, [])
    (warning,) = [r.getMessage() for r in caplog.records if "no micro-batch fits" in r.getMessage()]
    assert "(range)" in warning
    assert "the run starts with the smallest anyway" in warning


HOURS = 100_000.0  # seconds that a plan seems to take


@pytest.fixture
def slow_plans(monkeypatch):
    """Plans after which the clock says that hours have passed. The function makes those after an error fail."""
    passed, clock, fails = [0.0], time.monotonic, []

    def slow(plan):
        def ask(*arguments, **named):
            answer = plan(*arguments, **named)
            passed[0] += HOURS
            return None if fails else answer

        return ask

    monkeypatch.setattr(time, "monotonic", lambda: clock() + passed[0])
    monkeypatch.setattr(planned, "_asked", slow(planned._asked))
    monkeypatch.setattr(runner.first_sizes, "first_sizes", slow(runner.first_sizes.first_sizes))
    return lambda: fails.append(True)


def seconds_of(folder, overrides, caplog):
    """Of training, by the result and by the first log step; and the most that was expected to be left."""
    ended, _, _ = run_of(folder, overrides, caplog)
    assert HOURS < ended.seconds < 1.5 * HOURS  # the time of the run hides nothing
    shown = [text.split(" | ")[-1].removesuffix(" left") for text in caplog.messages if text.endswith(" left")]
    left = [sum(int(n) * 60**power for power, n in enumerate(reversed(text.split(":")))) for text in shown]
    assert len(left) == 8
    return ended.samples / ended.samples_per_second, 32 / metrics(folder)[0]["samples_per_second"], max(left)


@pytest.mark.parametrize("when", ["after an error", "too late", "first size"])
def test_planning_counts_neither_as_training_nor_for_the_time_left(tmp_path, caplog, slow_plans, when):
    if when == "too late":
        slow_plans()
    overrides = (*GPT, "batch.micro_size=plan") if when == "first size" else GPT
    assert max(seconds_of(tmp_path, overrides, caplog)) < 0.1 * HOURS


WITHOUT = {  # what is replaced by nothing; whether planning then counts as training, and for the time left
    "pauses of the meter": (Meter, "pause", (), True, False),
    "pauses of the progress": (Progress, "pause", (), False, True),
    "a start of the meter": (Meter, "start", ("batch.micro_size=plan",), True, False),
}


@pytest.mark.parametrize("case", WITHOUT)
def test_planning_would_count_without(tmp_path, caplog, slow_plans, monkeypatch, case):
    """Negative control."""
    owner, name, more, as_training, for_left = WITHOUT[case]
    once = getattr(owner, name)
    is_first = lambda own: name == "start" and not hasattr(own, "started")  # noqa: E731  # when the meter is built
    monkeypatch.setattr(owner, name, lambda own, *_: once(own) if is_first(own) else None)
    training, first_step, left = seconds_of(tmp_path, (*GPT, *more), caplog)
    assert (training > HOURS, first_step > HOURS) == (as_training, as_training)
    assert (left > HOURS) == for_left
