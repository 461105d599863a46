"""What a model keeps outside of tensors, and what training and evaluation leave for one another."""

import pytest
import runs
from measured import by_part

from trainapp.config import compose
from trainapp.planning import planner
from trainapp.planning.certainty import EXACT, RANGE
from trainapp.train import loop
from trainapp.train.evaluate import evaluate

OVER = (
    *runs.TINY, "data=digits", "checkpointing=off", "oom.grow=false", "batch.global_size=16",
    "batch.eval_micro_size=16", "train.grad_clip=null", "plan.levers=false", "train.max_steps=100", "every.eval=1",
    "user_packages=[planned_models]", "model=own",
)  # fmt: skip


@pytest.fixture
def own(tmp_path):
    """Overrides for a run of a model of `planned_models`."""

    def overrides(name):
        group = tmp_path / "conf" / "model"
        group.mkdir(parents=True, exist_ok=True)
        (group / "own.yaml").write_text(f"_target_: planned_models.{name}\n")
        return (*OVER, f"hydra.searchpath=[file://{tmp_path / 'conf'}]")

    return overrides


def planned(overrides):
    return planner.plan(compose.from_command_line(overrides))[0]


def in_turn(folder, overrides):
    """Bytes of training and of evaluations between its steps, the highest of each."""
    run = runs.prepare(folder, *overrides)
    highest = {True: 0, False: 0}
    try:
        for is_step in (True, True, False, True, False):
            if is_step:
                loop.train_step(run)
            else:
                run.memory.peak = 0
                evaluate(run)
            peak = run.memory.watched_peak if is_step else run.memory.peak
            highest[is_step] = max(highest[is_step], peak)
    finally:
        run.close()
    return highest[True], highest[False]


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("Flagged", "is_set"),
        ("FlaggedByEvaluation", "is_set"),
        ("FillsBuffer", "memory"),
        ("SlicedQueue", "queue"),
    ],
)
def test_what_one_leaves_for_the_other_makes_a_range_that_holds_both_in_turn(tmp_path, own, name, left):
    facts = planned(own(name))
    assert facts["certainty"] == RANGE
    assert any(f"traced separately, and one may change the other ({left})" in note for note in facts["notes"])
    assert by_part(facts) == in_turn(tmp_path / "run", own(name))


@pytest.mark.parametrize("name", ["FlaggedInVain", "Averaging", "Spread"])
def test_what_changes_no_memory_is_still_exact(tmp_path, own, name):
    facts = planned(own(name))
    assert facts["certainty"] == EXACT
    assert by_part(facts) == in_turn(tmp_path / "run", own(name))


@pytest.mark.parametrize(
    ("name", "counter"),
    [
        ("InClosure", "_ticks.tick.count"),
        ("InHook", "InHook.__init__.hook.numbers"),
        ("InDefault", "_by_default.default 0.0"),
        ("InFunction", "_ticks.calls"),
        ("InOtherModule", "own_counts.number"),
    ],
)
def test_counters_outside_of_attributes_are_noticed(own, name, counter):
    facts = planned(own(name))
    assert facts["certainty"] == RANGE
    assert any(f"the model counts or draws ({counter}" in note for note in facts["notes"])
