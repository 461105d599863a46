"""A plan says where a loss of the user's own could be computed without all logits."""

import pytest
import runs
import torch.nn.functional as F

from trainapp.assembly.components import load_components
from trainapp.config import compose
from trainapp.planning import planner, report
from trainapp.planning.traced_run import trace
from trainapp.tasks import inputs_and_targets, linear_cross_entropy

GPT = (*runs.TINY, *runs.MODELS["gpt"], "user_packages=[test_own_loss]", "plan.levers=true")
NOTE = "the loss is the task's own and has all logits in memory, 32 per prediction: trainapp.tasks.linear_cross_entropy"


def smoothed(model, batch):
    inputs, targets = inputs_and_targets(batch)
    logits = model(inputs).flatten(0, 1).float()
    return F.cross_entropy(logits, targets.flatten(), reduction="sum", label_smoothing=0.1), targets.numel(), {}


def in_chunks(model, batch):
    inputs, targets = inputs_and_targets(batch)
    return linear_cross_entropy(model.features(inputs), model.head, targets)[0], targets.numel(), {}


@pytest.mark.parametrize(
    ("settings", "is_noted"),
    [
        (("task=test_own_loss.smoothed",), True),
        (("task=test_own_loss.smoothed", "model.width=32"), False),  # as wide as its vocabulary: nothing to save
        (("task=test_own_loss.in_chunks",), False),
        (("task=auto",), False),  # the lever itself applies
    ],
)
def test_a_hint_where_the_users_own_loss_has_all_logits(settings, is_noted):
    config = compose.from_command_line([*GPT, *settings])
    found = trace(config, load_components(config), 4, 0)
    assert [hint.startswith(NOTE) for hint in found.hints] == ([True] if is_noted else [])
    applies = any("memory.loss_chunk" in lever.setting for lever in found.levers)
    assert applies is (settings == ("task=auto",))


@pytest.mark.slow
def test_the_plan_notes_it_and_explains_what_it_has_not_searched():
    config = compose.from_command_line([*GPT, "task=test_own_loss.smoothed", "every.eval=null", "batch.micro_size=4"])
    facts, _ = planner.plan(config)
    printed = report.text(facts, config).splitlines()
    assert facts["certainty"] == "exact"  # a hint is no doubt
    assert [note.startswith(NOTE) for note in facts["notes"]] == [True]
    assert facts["notes"][0] in printed
    assert None in [entry["largest_micro_size"] for entry in facts["levers"]]
    assert "(largest -: not searched)" in printed
    known = [entry | {"largest_micro_size": 1} for entry in facts["levers"]]
    assert "not searched" not in report.text(facts | {"levers": known}, config)
