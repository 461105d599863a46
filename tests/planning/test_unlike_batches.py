"""Batches that differ in something beside their tensors."""

import pytest
import runs
from measured import peaks

from trainapp.config import compose
from trainapp.planning import planner
from trainapp.planning.certainty import EXACT, RANGE

OVER = (
    *runs.TINY, "checkpointing=off", "oom.grow=false", "batch.micro_size=16", "plan.levers=false",
    "batch.eval_micro_size=16", "train.max_steps=100", "every.eval=1", "user_packages=[planned_models]",
    "model=mlp", "~model.width", "~model.depth", "~model.dropout", "model._target_=planned_models.OfAnyLength",
    "data=digits", "~data.augment", "train.check_loss=false",
)  # fmt: skip


@pytest.mark.parametrize(("data", "certainty"), [("Texts", RANGE), ("Lengths", RANGE), ("Counts", EXACT)])
def test_strings_and_numbers_that_differ_make_a_range(tmp_path, data, certainty):
    overrides = (*OVER, f"data._target_=planned_models.{data}")
    facts, _ = planner.plan(compose.from_command_line(overrides))
    assert facts["certainty"] == certainty
    low, high = facts.get("range_bytes", [facts["peak_bytes"]] * 2)
    assert low <= max(peaks(tmp_path, *overrides)) <= high
    assert (low < high) == (certainty == RANGE)


def test_a_longer_string_than_those_in_any_traced_batch_is_in_the_longest(tmp_path):
    facts, _ = planner.plan(compose.from_command_line((*OVER, "data._target_=planned_models.Texts")))
    _, high = facts["range_bytes"]
    assert high > 16 * 64 * 64 * 4  # of rows of 64 numbers, in the batch of the long one
