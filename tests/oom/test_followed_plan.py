"""A run that follows a plan says, once, when a step contradicts it: the log, result.json and the summary have it."""

import logging

import pytest
import runs
from helpers import result

from trainapp.data.promise import deviation
from trainapp.train import against_plan

RUN = (
    *runs.TINY, "batch.global_size=32", "train.max_steps=8", "checkpointing=off", "oom.remember=false",
    "oom.clean_steps=40", "train.grad_clip=null",
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("without_pictures", "planner_that_stays")


@pytest.fixture
def own(tmp_path):
    """Overrides for a run of a model of `planned_models` with so many bytes for what depends on the batch."""

    def overrides(name, *more, room=250_000):
        group = tmp_path / "conf" / "model"
        group.mkdir(parents=True, exist_ok=True)
        (group / "own.yaml").write_text(f"_target_: planned_models.{name}\n")
        search = f"hydra.searchpath=[file://{tmp_path / 'conf'}]"
        own = ("model=own", "data=digits", "user_packages=[planned_models]", search)
        return (*RUN, *own, f"memory.limit={12_000 + room}", *more)

    return overrides


def notes_of(folder, overrides, caplog):
    """The result, and what was said of the plan."""
    caplog.clear()
    caplog.set_level(logging.INFO)
    ended = runs.run(folder, *overrides)
    return ended, [r.getMessage() for r in caplog.records if "were planned" in r.getMessage()]


PLANNED = ("batch.micro_size=plan",)
ASKED = ("batch.micro_size=auto",)


@pytest.mark.slow
@pytest.mark.parametrize("setting", [PLANNED, ASKED], ids=["plan", "auto"])
def test_a_model_that_does_as_planned_gets_no_word(tmp_path, own, caplog, setting):
    ended, said = notes_of(tmp_path / "run", own("Net", *setting), caplog)
    assert said == []
    assert ended.plan_note is None
    assert "plan_note" not in result(tmp_path / "run")
    assert ended.oom_restarts == (setting is ASKED)


@pytest.mark.slow
@pytest.mark.parametrize("model", runs.MODELS)
def test_nor_do_models_of_our_own(tmp_path, caplog, model):
    ended, said = notes_of(tmp_path / "run", (*RUN, *runs.MODELS[model], *PLANNED, "every.eval=4"), caplog)
    assert (said, ended.plan_note) == ([], None)


@pytest.mark.parametrize(("setting", "named"), [(PLANNED, "batch.micro_size=plan"), (ASKED, "oom.plan")])
def test_a_model_that_needs_a_little_more_later_gets_one(tmp_path, own, caplog, capsys, setting, named):
    ended, said = notes_of(tmp_path / "run", own("Creeping", *setting), caplog)
    (note,) = said
    assert note.startswith(f"{named}: step ")
    assert "(exact)" in note
    assert "if memory runs out, a smaller size follows" in note
    assert ended.plan_note == note == result(tmp_path / "run")["plan_note"]
    assert note in capsys.readouterr().out
    assert ended.oom_restarts == (setting is ASKED)


@pytest.mark.parametrize(
    ("model", "advice"),
    [("Growing", "if memory runs out, a smaller size follows"), ("Shrinking", "a larger micro-batch may fit")],
)
def test_it_is_noticed_in_the_step_that_differs(tmp_path, own, caplog, model, advice):
    """With one micro-batch per step."""
    overrides = own(model, *PLANNED, "batch.global_size=8", "train.max_steps=16", room=10_000_000)
    _, (note,) = notes_of(tmp_path / "run", overrides, caplog)
    assert note.startswith("batch.micro_size=plan: step 13 needs ")
    assert advice in note


@pytest.mark.parametrize(("model", "step"), [("Growing", 5), ("Hungrier", 1)])
def test_a_planned_size_that_fails_gets_a_word_too(tmp_path, own, caplog, model, step):
    overrides = own(model, *PLANNED, "batch.global_size=8", "train.max_steps=16", room=65_000)
    ended, (note,) = notes_of(tmp_path / "run", overrides, caplog)
    assert note.startswith(f"batch.micro_size=plan: step {step} needs more than 75.2 KiB with micro-batch ")
    assert "(exact)" in note
    assert "a smaller size follows" in note
    assert ended.plan_note == note == result(tmp_path / "run")["plan_note"]
    assert ended.oom_restarts >= 1


def test_a_size_of_the_users_own_follows_no_plan(tmp_path, own, caplog):
    ended, said = notes_of(tmp_path / "run", own("Growing", "batch.micro_size=8"), caplog)
    assert (said, ended.plan_note) == ([], None)


@pytest.mark.slow
def test_a_range_is_contradicted_by_more_than_its_end_only(tmp_path, own, caplog):
    """Thrifty reads a value: a run needs the lower end."""
    _, said = notes_of(tmp_path / "run", own("Thrifty", *PLANNED, room=400_000), caplog)
    assert said == []


def test_after_an_error_sizes_follow_what_was_measured(tmp_path, own, caplog):
    """The planned size fails at once, and what its half needs tells how wrong the plan is."""
    ended, _ = notes_of(tmp_path / "run", own("Hungrier", *PLANNED, "oom.clean_steps=3", "train.max_steps=14"), caplog)
    assert 0.9 * 262_000 < ended.peak_memory_bytes <= 262_000
    assert ended.oom_restarts == 1


def test_a_shard_that_measures_more_once_is_not_believed(monkeypatch):
    """gloo's threads may free a message a moment late."""
    said = _notes_with(monkeypatch, "fsdp", [True, False, True, True, False, True, True, True, True])
    assert said == [8]
    assert _notes_with(monkeypatch, "ddp", [False, True, True]) == [2]


def _notes_with(monkeypatch, strategy, contradictions):
    """The steps that are noted, of two ranks, where these contradict the plan."""
    from types import SimpleNamespace as Some

    from trainapp.data.forecast import Deviation, Forecast, Promise
    from trainapp.train.run import Attempt, Step

    promise = Promise("oom.plan", "exact", 100, 0.0, True)
    train = Some(forecast=(16, Forecast(4, {}, 100, 0, 200, promise)), is_unproven=True, compare=lambda *_: None)
    said: list[int] = []
    run = Some(
        sizes=Some(train=train, plan_note=None),
        attempt=Attempt(),
        ranks=Some(world=2),
        meter=Some(samples=100),
        config=Some(parallel=Some(strategy=strategy), every=Some(log=1)),
        state=Some(progress=Some(step=1), global_size=4),
        tracker=Some(note=lambda text: said.append(run.attempt.step.number)),
    )
    for number, contradicts in enumerate(contradictions, 1):
        run.attempt.step = Step(None, number, number, 4, True, False)
        found = Deviation(4, 100, 101) if contradicts else None
        monkeypatch.setattr(against_plan, "deviation", lambda *_, found=found: found)
        against_plan.compare_with_plan(run)
    monkeypatch.setattr(against_plan, "deviation", deviation)
    return said
