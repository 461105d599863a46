"""The micro-batch that a run begins with: the precedence of all sources."""

import dataclasses
from types import SimpleNamespace

import pytest
import runs

from trainapp.config import resume_rules
from trainapp.config.compose import from_command_line
from trainapp.parallel.ranks import SingleRank
from trainapp.run.first_sizes import determines_memory, initial_sizes
from trainapp.sizes.micro_batches import LargestMicroBatch, ShapeHistory
from trainapp.sizes.record import Sizes
from trainapp.techniques import catalogue


def known(size: int) -> dict:
    """The state left by an earlier run, a checkpoint or a restart: one shape, validated; twice the size failed."""
    return {"start": 64, "buckets": {"64": [size, size, 2 * size, True]}}


BUDGET = 1 << 30
SOURCES = {
    "restart": {"micro": known(7), "eval_micro": known(9)},
    "saved": {"micro": known(11), "eval_micro": known(13), "budget": BUDGET},
}
SCHEDULE = "batch.micro_schedule={1: 23, 5: 29}"


@pytest.fixture(scope="module")
def begin(tmp_path_factory):
    """The first sizes of a run with these settings, on one of `world` ranks, that continues after `attempts`."""
    prepared = runs.closed(tmp_path_factory.mktemp("run"), *runs.MODELS["mlp"])

    def sizes(*overrides: str, world=1, attempts=0, budget=BUDGET, **records) -> Sizes:
        session = dataclasses.replace(
            prepared,
            config=from_command_line(["batch.global_size=64", *overrides]),
            eval_sets={"": SimpleNamespace(samples=1000)},
            memory=SimpleNamespace(budget=budget),
            ranks=SingleRank(),
        )
        session.ranks.world_size, session.state.progress.step = world, attempts
        return initial_sizes(session, **records)

    return sizes


# In order of precedence: what is set or known, and the resulting training size.
ORDER = [
    (("restart",), (), 7),
    ((), (SCHEDULE,), 23),
    ((), ("batch.micro_size=31",), 31),
    (("saved",), (), 11),
    ((), (), 64),
]


@pytest.mark.parametrize("first", range(len(ORDER)))
@pytest.mark.parametrize("second", range(len(ORDER)))
def test_the_first_that_is_known_decides(begin, first, second):
    (sources, overrides, size) = ORDER[min(first, second)]
    (others, more, _) = ORDER[max(first, second)]
    sizes = begin(*{*overrides, *more}, **{name: SOURCES[name] for name in (*sources, *others)})
    sizes.train.apply_schedule(1)
    assert sizes.train.size == size


@pytest.mark.parametrize(
    ("sources", "overrides", "size"),
    [
        (("restart", "saved"), ("batch.eval_micro_size=10",), 9),
        (("restart",), ("batch.eval_micro_size=5",), 5),  # a restart never exceeds the setting
        (("saved",), ("batch.eval_micro_size=5",), 5),
        (("saved",), (), 13),
        (("saved",), ("batch.micro_size=3",), 13),
        ((), (), 128),
    ],
)
def test_evaluation(begin, sources, overrides, size):
    assert begin(*overrides, **{name: SOURCES[name] for name in sources}).evaluation.size == size


def test_sizes_found_with_other_memory_are_not_used(begin):
    sizes = begin(saved=SOURCES["saved"] | {"used": {"": {1: {64: 11}}}, "oom_restarts": 2}, budget=2 * BUDGET)
    assert (sizes.train.size, sizes.evaluation.size) == (64, 128)
    assert (sizes.micro_schedule(), sizes.oom_restarts) == ({1: 11}, 2)  # but their record is continued


def test_sizes_found_with_other_settings_are_not_used(begin, caplog):
    caplog.set_level("INFO", "trainapp")
    changed = ["activation_checkpointing.mode: none before, full now"]
    sizes = begin(saved=SOURCES["saved"], changed=changed)
    assert (sizes.train.size, sizes.evaluation.size) == (64, 128)
    sizes = begin(saved=SOURCES["saved"], budget=2 * BUDGET)
    assert (sizes.train.size, sizes.evaluation.size) == (64, 128)
    why = "searching the micro-batch size from scratch, since this has changed since the checkpoint:"
    assert caplog.messages == [f"{why} {changed[0]}", f"{why} memory limit: 1.0 GiB before, 2.0 GiB now"]


@pytest.mark.parametrize(
    ("sources", "overrides", "size"),
    [
        (("saved",), ("batch.micro_size=31", "batch.eval_micro_size=10"), 31),
        (("saved",), (SCHEDULE, "batch.eval_micro_size=10"), 23),
        (("saved", "restart"), (), 7),  # of workers that have these settings
    ],
)
def test_nothing_is_said_where_the_size_is_known_otherwise(begin, caplog, sources, overrides, size):
    caplog.set_level("INFO", "trainapp")
    assert begin(*overrides, changed=["x"], **{name: SOURCES[name] for name in sources}).train.size == size
    assert caplog.messages == []


def test_nothing_is_said_where_all_samples_fitted_anyway(begin, caplog):
    caplog.set_level("INFO", "trainapp")
    largest = {"micro": known(64), "eval_micro": known(128), "budget": BUDGET}
    assert begin(saved=largest, changed=["x"]).train.size == 64
    assert caplog.messages == []


# Without any of the techniques.
PLAIN = from_command_line(["train.ema=0.9", "optimizer=adamw"])


@pytest.mark.parametrize("technique", catalogue.TECHNIQUES, ids=lambda technique: technique.setting)
def test_every_technique_determines_memory(technique):
    changes = resume_rules.changes(PLAIN.to_dict(), catalogue.with_techniques(PLAIN, [technique]).to_dict())
    assert any(determines_memory(change.name) for change in changes), changes


@pytest.mark.parametrize(
    ("overrides", "does"),
    [
        (("activation_checkpointing=full", "activation_checkpointing.every=2"), True),
        (("activation_checkpointing=auto", "activation_checkpointing.modes=[full,none]"), True),
        (("activation_checkpointing.compiled_budget=0.5",), True),
        (("memory.loss_chunk=64",), True),
        (("train.compile=true",), True),
        (("model.freeze=[layers]",), True),
        (("+adapter.rank=4",), True),
        (("optimizer.lr=0.5", "optimizer.weight_decay=0.5", "data.num_workers=3", "schedule=constant"), False),
        (
            ("train.max_steps=9", "every.save=3", "checkpointing.keep_last=5", "train.seed=3", "oom.clean_steps=1"),
            False,
        ),
        (("memory.limit=1GiB", "memory.timeline=true", "memory.guard=false"), False),  # the limit is compared in bytes
        (("parallel.max_restarts=9", "parallel.timeout=9"), False),
    ],
)
def test_what_else_determines_memory(overrides, does):
    now = from_command_line(["train.ema=0.9", "optimizer=adamw", *overrides])
    changes = resume_rules.changes(PLAIN.to_dict(), now.to_dict())
    assert changes
    assert any(determines_memory(change.name) for change in changes) == does


@pytest.mark.slow
def test_a_resume_with_another_technique_searches_as_a_fresh_run(tmp_path, caplog):
    """A size that fitted without it says nothing. With the same limit and techniques nothing is searched again."""
    caplog.set_level("INFO", "trainapp")
    own = (*runs.MODELS["gpt"], "model.depth=4", "model.dropout=0", "batch.micro_size=auto", "memory.limit=500KiB")
    own = (*own, "oom.clean_steps=1", "train.max_steps=10")
    longer = (*own, "train.max_steps=20")
    first = runs.run(tmp_path / "run", *own)
    fresh = runs.run(tmp_path / "fresh", *own, "activation_checkpointing=full")
    assert first.micro_size < fresh.micro_size < 16
    assert "from scratch" not in caplog.text

    resumed = runs.run(tmp_path / "run", *longer, "activation_checkpointing=full")
    assert resumed.micro_size == fresh.micro_size
    (line,) = [message for message in caplog.messages if "from scratch" in message]
    assert line.endswith("since the checkpoint: activation_checkpointing.mode: none before, full now")

    again = runs.run(tmp_path / "fresh", *longer, "activation_checkpointing=full")
    assert (again.micro_schedule, again.oom_restarts) == (fresh.micro_schedule, fresh.oom_restarts)
    assert caplog.text.count("from scratch") == 1


def test_the_share_of_a_rank(begin):
    assert begin(world=3).train.size == 22
    assert begin("accumulation.steps=3", world=2).train.size == 11
    assert begin("batch.micro_size=50", world=2).train.size == 32
    assert begin(world=3).evaluation.size == 44
    assert begin("batch.eval_micro_size=400", world=3).evaluation.size == 334  # all samples of one rank


@pytest.mark.parametrize(
    ("step", "by_step"),
    [
        (0, {1: 23, 4: 23, 5: 29, 9: 29}),
        (2, {3: 23, 4: 23, 5: 29}),  # resumed between two entries: the earlier one applies
        (4, {5: 29, 6: 29}),
        (7, {8: 29, 9: 29}),
    ],
)
def test_a_schedule_after_a_resume(begin, step, by_step):
    sizes = begin(SCHEDULE, attempts=step)
    for coming in range(step + 1, 10):
        sizes.train.apply_schedule(coming)
        if coming in by_step:
            assert sizes.train.size == by_step[coming]


def test_what_failed_is_not_scheduled_again(begin):
    sizes = begin(SCHEDULE, restart=SOURCES["restart"], attempts=3)
    for coming in range(4, 8):
        sizes.train.apply_schedule(coming)
    assert sizes.train.size == 7


def test_a_restart_from_before_any_shape_was_known(begin):
    """Memory ran out in the very first fetch: no buckets exist yet."""
    assert begin(restart={"micro": {"start": 16, "buckets": {}}}).train.size == 16


@pytest.mark.parametrize(("vote", "retries_in_place"), [("always", True), ("never", False)])
@pytest.mark.parametrize("source", ["restart", "saved"])
def test_no_larger_size_is_tried_where_one_that_fails_costs_a_restart(begin, source, vote, retries_in_place):
    """The source's search has not ended: between 8, which works, and 32, which does not, lies 20."""
    search = {"start": 64, "buckets": {"64": [8, 8, 32, False]}}
    record = {source: {"micro": search, "eval_micro": search, "budget": BUDGET}}
    sizes = begin("oom.clean_steps=1", f"parallel.vote_on_oom={vote}", world=2, **record)
    for searched in (sizes.train, sizes.evaluation):
        searched.history[64] = ShapeHistory(LargestMicroBatch(8))
        assert searched.record_success(SingleRank()) == ({64: 20} if retries_in_place else {})
        assert searched.search_has_ended is not retries_in_place
        searched.history[64] = ShapeHistory(LargestMicroBatch(8))
        assert searched.may_change is retries_in_place  # otherwise the ranks would ask each other in every step


def test_an_evaluation_of_rows_per_sample_has_no_more_samples_than_training(tmp_path):
    """A model with a row for each sample of the global batch has none for others."""
    own = (*runs.own_model("writing_models.Declares"), "user_packages=[writing_models]", "data=digits", "every.eval=2")
    session = runs.closed(tmp_path / "a", *own)
    assert session.sizes.evaluation.size == session.config.batch.global_size
    assert runs.run(tmp_path / "b", *own).steps == 4
