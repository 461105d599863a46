"""The next run begins with what an earlier one found: a hint that avoids its errors and costs at most one retry."""

import dataclasses
import json
from pathlib import Path

import pytest

from trainapp.oom import hints
from trainapp.parallel.ranks import SingleRank
from trainapp.paths import user_cache_dir
from trainapp.run import runner
from trainapp.signals import StopRequest

from .conftest import MODELS, tiny
from .inject import Recorded

PLAIN = ("model=mlp", "model.width=32", "data=digits", "train.ema=null", "train.max_steps=12", "every.log=null")
CHANGES = {"batch.micro_size": "auto", "batch.global_size": 64, "oom.remember": True, "oom.grow": True}


pytestmark = pytest.mark.usefixtures("without_pictures")


@pytest.fixture
def limit(tmp_path) -> int:
    """A limit in bytes under which 24 samples of 64 fit."""
    changes = {"batch.micro_size": 24, "batch.global_size": 64, "train.max_steps": 2}
    return Recorded(tiny(tmp_path / "limit", *PLAIN, changes=changes)).run.memory.peak


def run(run_dir: Path, *overrides: str, changes: dict) -> Recorded:
    """A complete run, which then stores its sizes as `runner.run` does."""
    config = tiny(run_dir, *PLAIN, *overrides, changes={**CHANGES, **changes})
    done = Recorded(config)
    hints.remember(done.run)
    return done


def sizes(run_: Recorded) -> list[int]:
    """The micro-batches of the run, in order."""
    return list(run_.run.sizes.used.values())


def files() -> list[Path]:
    folder = user_cache_dir() / "oom"
    return sorted(folder.glob("*.json")) if folder.is_dir() else []


def test_a_second_run_has_no_errors(tmp_path, limit):
    first = run(tmp_path / "a", changes={"memory.limit": limit})
    assert first.failures
    second = run(tmp_path / "b", changes={"memory.limit": limit})
    assert second.failures == []
    assert sizes(second) == [first.run.sizes.train.size]
    assert len(files()) == 1


def test_the_command_line_remembers(tmp_path, limit):
    config = tiny(tmp_path / "a", *PLAIN, changes={**CHANGES, "memory.limit": limit})
    first = runner.run(config)
    second = runner.run(tiny(tmp_path / "b", *PLAIN, changes={**CHANGES, "memory.limit": limit}))
    assert first.oom_restarts > 0
    assert (second.oom_restarts, second.micro_size) == (0, first.micro_size)
    assert second.micro_schedule == {1: first.micro_size}


def edit(change) -> None:
    """Edit the only file in the cache."""
    (path,) = files()
    known = json.loads(path.read_text())
    change(known["micro"]["buckets"])
    path.write_text(json.dumps(known))


@pytest.mark.slow
def test_a_wrong_hint_costs_one_retry(tmp_path, limit):
    first = run(tmp_path / "a", changes={"memory.limit": limit})
    size = first.run.sizes.train.size

    def too_large(buckets):
        for bucket in buckets:
            buckets[bucket] = [min(64, size + 8), min(64, size + 8), None, True]

    edit(too_large)
    second = run(tmp_path / "b", changes={"memory.limit": limit})
    assert [f.old_size for f in second.failures][:1] == [min(64, size + 8)]
    assert len([f for f in second.failures if f.step == 1]) == 1
    assert second.run.memory.peak <= limit


def test_a_hint_that_is_too_small_is_outgrown_or_harmless(tmp_path):
    # Nothing ever failed at 64: a run that starts below it because of an old hint tries it again.
    run(tmp_path / "a", changes={})
    edit(lambda buckets: buckets.update({bucket: [16, 16, 24, False] for bucket in buckets}))
    second = run(tmp_path / "b", changes={})
    assert second.failures == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '"text"',
        '{"micro": {}}',
        '{"micro": {"start": 64, "buckets": {"128": ["a", "b", "c", "d"]}}, "eval_micro": {"buckets": {}}}',
        '{"micro": {"start": 64, "buckets": {"128": [0, 0, null, true]}}, "eval_micro": {"buckets": {}}}',
        '{"micro": {"start": 64, "buckets": {"128": [-4, 0, null, true]}}, "eval_micro": {"buckets": {}}}',
        '{"micro": {"start": 64, "buckets": {"128": [7.5, 0, null, true]}}, "eval_micro": {"buckets": {}}}',
        '{"micro": {"start": 64, "buckets": {"128": [16, 16]}}, "eval_micro": {"buckets": {}}}',
        '{"micro": {"start": 64, "buckets": {"x": [16, 16, null, true]}}, "eval_micro": {"buckets": {}}}',
        '{"micro": {"start": 64, "buckets": {"128": [16, 16, "many", true]}}, "eval_micro": {"buckets": {}}}',
    ],
)
def test_what_cannot_be_read_is_ignored(tmp_path, text):
    run(tmp_path / "a", changes={"train.max_steps": 1})
    (path,) = files()
    path.write_text(text)
    second = run(tmp_path / "b", changes={"train.max_steps": 2})
    assert second.failures == []
    assert sizes(second) == [64]


def test_binary_rubbish_is_ignored(tmp_path):
    run(tmp_path / "a", changes={"train.max_steps": 1})
    (path,) = files()
    path.write_bytes(b"\xff\xfe\x00\x80")
    assert sizes(run(tmp_path / "b", changes={"train.max_steps": 2})) == [64]


@pytest.mark.slow
def test_off_neither_reads_nor_writes(tmp_path, limit):
    off = {"memory.limit": limit, "oom.remember": False}
    assert run(tmp_path / "a", changes=off).failures
    assert files() == []
    run(tmp_path / "b", changes={"memory.limit": limit})
    assert len(files()) == 1
    assert run(tmp_path / "c", changes=off).failures


@pytest.mark.slow
def test_clear_forgets_and_finds_again(tmp_path, limit):
    run(tmp_path / "a", changes={"memory.limit": limit})
    assert run(tmp_path / "b", changes={"memory.limit": limit, "oom.remember": "clear"}).failures
    assert run(tmp_path / "c", changes={"memory.limit": limit}).failures == []


DEPENDS = {
    "limit": {"memory.limit": 40_000_000},
    "width": {"model.width": 33},
    "precision": {"precision.mode": "bf16"},
    "checkpointing": {"activation_checkpointing.mode": "full"},
    "average": {"train.ema": 0.9},
    "global batch": {"batch.global_size": 32},
    "loader": None,
}


@pytest.mark.parametrize("what", [name for name, change in DEPENDS.items() if change])
def test_what_it_depends_on_is_in_the_key(tmp_path, what):
    run(tmp_path / "a", changes={"train.max_steps": 1})
    run(tmp_path / "b", changes={"train.max_steps": 1, **DEPENDS[what]})
    assert len(files()) == 2


def test_another_optimizer_or_model_is_another_key(tmp_path):
    run(tmp_path / "a", changes={"train.max_steps": 1})
    run(tmp_path / "b", "optimizer=sgd", changes={"train.max_steps": 1})
    run(tmp_path / "c", *MODELS["resnet"], changes={"train.max_steps": 1})
    assert len(files()) == 3


def test_other_ranks_or_another_strategy_is_another_key(tmp_path):
    one = run(tmp_path / "a", changes={"train.max_steps": 1}).run
    alone = hints.describe(one)
    one.ranks.world = 2
    assert hints.describe(one) != alone
    ddp = hints.describe(dataclasses.replace(one, config=tiny(tmp_path / "b", *PLAIN, "parallel=ddp")))
    assert ddp != hints.describe(dataclasses.replace(one, config=tiny(tmp_path / "c", *PLAIN, "parallel=fsdp")))


def test_another_seed_or_length_is_the_same_key(tmp_path):
    run(tmp_path / "a", changes={"train.max_steps": 1})
    run(tmp_path / "b", changes={"train.max_steps": 2, "train.seed": 7})
    assert len(files()) == 1


@pytest.mark.parametrize(
    "chosen",
    [{"batch.micro_size": 2}, {"accumulation.steps": 32}, {"batch.micro_schedule": {1: 2}}],
    ids=lambda c: next(iter(c)),
)
def test_a_size_that_the_user_chose_is_no_experience(tmp_path, chosen):
    # Nothing failed: success at 2 is no evidence against 64.
    run(tmp_path / "a", changes=chosen)
    assert sizes(run(tmp_path / "b", changes={})) == [64]


@pytest.mark.slow
def test_a_schedule_is_not_changed_by_experience(tmp_path, limit):
    run(tmp_path / "a", changes={"memory.limit": limit})
    planned = run(tmp_path / "b", changes={"memory.limit": limit, "batch.micro_schedule": {4: 4}})
    assert [f.old_size for f in planned.failures][:1] == [64]  # it starts like a run without a hint


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRAINAPP_CACHE", str(tmp_path / "file" / "below"))
    assert run(tmp_path / "a", changes={"train.max_steps": 2}).failures == []


@pytest.mark.slow
def test_the_evaluation_size_is_remembered_too(tmp_path):
    evaluating = {"every.eval": 12, "batch.eval_micro_size": "auto", "batch.global_size": 180, "oom.grow": False}
    training = {"batch.global_size": 180, "batch.micro_size": 8, "train.max_steps": 2}
    peak = Recorded(tiny(tmp_path / "x", *PLAIN, changes=training)).run.memory.peak
    first = run(tmp_path / "a", changes={**evaluating, "memory.limit": int(1.1 * peak)})
    assert next(f.old_size for f in first.failures if f.evaluating) == 360  # twice the global batch: the whole split
    second = run(tmp_path / "b", changes={**evaluating, "memory.limit": int(1.1 * peak)})
    assert second.failures == []
    assert second.run.sizes.evaluation.size == first.run.sizes.evaluation.size


def test_it_is_in_the_checkpoint(tmp_path, limit):
    changes = {**CHANGES, "memory.limit": limit, "oom.remember": False, "checkpointing.save": True}
    changes |= {"checkpointing.resume": "auto", "every.save": 12}
    first = Recorded(tiny(tmp_path / "a", *PLAIN, changes=changes))
    assert first.failures
    config = tiny(tmp_path / "a", *PLAIN, changes={**changes, "train.max_steps": 14})
    run = runner.prepare(config, StopRequest(), SingleRank())
    run.close()
    assert run.state.progress.step == 12
    assert run.sizes.train.size == first.run.sizes.train.size
