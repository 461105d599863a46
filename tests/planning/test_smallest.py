"""Models that cannot train on a single sample, and callbacks, which no trace calls."""

import pytest
import runs

from trainapp.config import compose
from trainapp.planning import planner
from trainapp.planning.certainty import EXACT, RANGE

OVER = (
    *runs.TINY, "data=digits", "checkpointing=off", "plan.levers=false", "train.grad_clip=null",
    "user_packages=[planned_models]",
)  # fmt: skip
OWN = ("model=mlp", "~model.width", "~model.depth", "~model.dropout", "~data.augment")


def planned(*overrides):
    return planner.plan(compose.from_command_line((*OVER, *overrides)))[0]


@pytest.mark.parametrize("name", ["Normed", "Refusing"])
def test_a_search_leaves_out_the_single_sample_that_a_model_refuses(name):
    model = (*OWN, f"model._target_=planned_models.{name}")
    least = planned(*model, "batch.micro_size=3")["peak_bytes"]
    facts = planned(*model, f"memory.limit={least}")
    assert (facts["certainty"], facts["largest_micro_size"]) == (EXACT, 3)


def test_where_none_fits_the_plan_is_of_the_smallest_that_can_be_normalised():
    facts = planned(*OWN, "model._target_=planned_models.Normed", "memory.limit=20KiB")
    assert (facts["certainty"], facts["largest_micro_size"], facts["micro_size"]) == (EXACT, 0, 2)


def test_callbacks_of_the_users_make_a_range():
    facts = planned("model=mlp", "model.width=16", "+callbacks.drift._target_=planned_models.Drift")
    assert facts["certainty"] == RANGE
    assert any("callbacks are not traced (drift)" in note for note in facts["notes"])


def test_those_of_the_application_do_not():
    facts = planned("model=mlp", "model.width=16", "callbacks=confusion_matrix")
    assert facts["certainty"] == EXACT
