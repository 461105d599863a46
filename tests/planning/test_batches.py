"""Batches that differ: the longest of the first ones stands for all, and the plan says so."""

import measured
import runs

from trainapp.config import compose
from trainapp.planning import planner

OVER = (
    *runs.TINY, "user_packages=[planned_models]", "checkpointing=off", "oom.grow=false", "plan.techniques=false",
    "every.eval=null", "train.max_steps=100", "train.check_loss=false", "model=mlp", "~model.width", "~model.depth",
    "~model.dropout", "data=digits", "~data.augment", "task=classification",
)  # fmt: skip
PADDED = (
    "model._target_=planned_models.Meaned", "data._target_=planned_models.Padded", "+data.size=250",
    "batch.global_size=10", "batch.micro_size=4",
)  # fmt: skip
VARIES = "the batches differ in shape"


def plan(*overrides):
    return planner.plan(compose.from_command_line((*OVER, *overrides)))[0]


def varies(facts):
    return any(note.startswith(VARIES) for note in facts["notes"])


def test_texts_of_different_lengths(tmp_path):
    gpt = (*runs.TINY, *runs.MODELS["gpt"], "checkpointing=off", "plan.techniques=false", "every.eval=null")
    gpt = (*gpt, "data.min_length=4", "batch.global_size=16", "batch.micro_size=8")
    facts = planner.plan(compose.from_command_line(gpt))[0]
    assert varies(facts)
    assert measured.peak(tmp_path, *gpt) <= facts["peak_bytes"]


def test_a_longer_sample_is_seen(tmp_path):
    """Where all are alike, the last batch, of 2 samples where others have 4, changes nothing."""
    assert not varies(plan(*PADDED))
    overrides = (*PADDED, "+data.long=101")
    facts = plan(*overrides)
    assert varies(facts)
    assert measured.peak(tmp_path, *OVER, *overrides) <= facts["peak_bytes"]
