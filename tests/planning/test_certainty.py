"""How sure a figure is, and how the plan says so."""

import pytest
import runs

from trainapp.assembly.components import load_components
from trainapp.config import compose
from trainapp.planning import planner, report
from trainapp.planning.certainty import EXACT, PROBED, RANGE, Noticed, certainty_of
from trainapp.planning.sizes import Planner
from trainapp.planning.variants import Variants

OVER = (*runs.TINY, "every.eval=1", "checkpointing=off", "plan.levers=false")


def test_nothing_noticed_is_exact():
    assert certainty_of(Noticed(), 100, 100).facts() == {"certainty": EXACT}


def test_an_operator_that_was_run_for_real():
    found = certainty_of(Noticed(probed=frozenset({"aten.b", "aten.a"})), 100, 100)
    notes = ["run for real to know what they allocate: aten.a, aten.b"]
    assert found.facts() == {"certainty": PROBED, "notes": notes}


@pytest.mark.parametrize(
    ("noticed", "note"),
    [
        (Noticed(reads=frozenset({"forward"})), "a mix may need more"),
        (Noticed(assumed=frozenset({"aten.nonzero"})), "shapes depend on values (aten.nonzero)"),
        (Noticed(unsettled=frozenset({"buffers grow"})), "other steps may need more: buffers grow"),
        (Noticed(varies=True), "the batches differ in shape"),
        (Noticed(untraced=("ValueError: no",) * 2), "the other way cannot be traced (ValueError: no)"),
    ],
)
@pytest.mark.parametrize("high", [100, 120])
def test_whatever_was_noticed_makes_a_range_even_of_equal_ends(noticed, note, high):
    found = certainty_of(noticed, 100, high)
    assert (found.name, found.ends) == (RANGE, (100, high))
    (only,) = found.notes
    assert note in only


def test_other_ranks_that_need_more_make_a_range_without_a_note():
    assert certainty_of(Noticed(), 100, 120).facts() == {"certainty": RANGE, "range_bytes": [100, 120]}


@pytest.fixture
def careful(tmp_path):
    """A model that reads a value on which no memory depends."""
    group = tmp_path / "conf" / "model"
    group.mkdir(parents=True)
    (group / "own.yaml").write_text("_target_: planned_models.Careful\n")
    search = f"hydra.searchpath=[file://{tmp_path / 'conf'}]"
    return (*OVER, "model=own", "data=digits", "user_packages=[planned_models]", search, "train.grad_clip=null")


def test_a_read_on_which_nothing_depends_is_still_a_range(careful):
    config = compose.from_command_line([*careful, "memory.limit=1GiB"])
    facts, _ = planner.plan(config)
    assert facts["certainty"] == RANGE
    assert facts["range_bytes"] == [facts["peak_bytes"]] * 2
    first = report.text(facts, config).splitlines()[0]
    assert "(range) of 1.0 GiB" in first
    assert " to " not in first


@pytest.mark.slow
def test_a_search_and_a_lever_are_no_surer_than_the_plan(careful):
    config = compose.from_command_line([*careful, "memory.limit=1GiB"])
    assert planner.plan(config, only=("training", "evaluation"))[0]["certainty"] == RANGE
    planned = Planner(config, load_components(config))
    planned.counts_work = True
    assert Variants(planned, planned.plan()[0]).own.certainty == RANGE


@pytest.mark.slow
def test_a_size_that_is_only_the_largest_that_is_tried_is_called_so():
    overrides = (*OVER, *runs.MODELS["mlp"])
    config = compose.from_command_line([*overrides, "memory.limit=1GiB"])
    facts, _ = planner.plan(config)
    fits = "micro-batch 16 (all samples of a step), evaluation 32 (the most that a run tries)"
    assert f"largest sizes that fit 1.0 GiB: {fits}" in report.text(facts, config).splitlines()
    wide = (*overrides, "batch.global_size=256", "model.width=64")
    limit = planner.plan(compose.from_command_line([*wide, "batch.micro_size=100"]))[0]["phases"]["backward"]
    facts, _ = planner.plan(compose.from_command_line([*wide, f"memory.limit={limit}"]))
    assert facts["largest_micro_size"] < 256
    line = next(line for line in report.text(facts, config).splitlines() if line.startswith("largest sizes that fit"))
    assert f"micro-batch {facts['largest_micro_size']}, evaluation" in line
