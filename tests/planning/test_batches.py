"""Batches that differ: the longest of the first ones stands for all, and the plan says so."""

import measured
import runs
import torch

from trainapp.config import compose
from trainapp.data.batch import MicroBatch
from trainapp.planning import planner
from trainapp.planning.batches import longest

OVER = (
    *runs.TINY, "user_packages=[planned_models]", "checkpointing=off", "oom.grow=false", "plan.techniques=false",
    "every.eval=1", "train.max_steps=100", "train.check_loss=false", "model=mlp", "~model.width", "~model.depth",
    "~model.dropout", "data=digits", "~data.augment", "task=classification",
)  # fmt: skip
PADDED = (
    "model._target_=planned_models.Meaned", "data._target_=planned_models.Padded", "+data.size=250", "+data.long=-1",
    "batch.global_size=10", "batch.micro_size=10", "batch.eval_micro_size=20",
)  # fmt: skip
VARIES = "the batches differ in shape"


def plan(*overrides):
    return planner.plan(compose.from_command_line((*OVER, *overrides)))[0]


def varies(facts):
    return any(note.startswith(VARIES) for note in facts["notes"])


def test_texts_of_different_lengths(tmp_path):
    gpt = (*runs.TINY, *runs.MODELS["gpt"], "checkpointing=off", "plan.techniques=false", "every.eval=1")
    gpt = (*gpt, "data.min_length=4", "batch.global_size=16", "batch.micro_size=8", "batch.eval_micro_size=8")
    facts = planner.plan(compose.from_command_line(gpt))[0]
    assert varies(facts)
    assert max(measured.peaks(tmp_path, *gpt)) <= facts["peak_bytes"]


def test_a_longer_sample_of_the_evaluation_is_seen(tmp_path):
    """Where all are alike, the last batch, of 10 samples where others have 20, changes nothing."""
    overrides = (*PADDED, "+data.val_size=50")
    assert not varies(plan(*overrides))
    overrides = (*overrides, "+data.val_long=25")
    facts = plan(*overrides)
    assert varies(facts)
    assert max(measured.peaks(tmp_path, *OVER, *overrides)) <= facts["peak_bytes"]


def micro(samples, *shape):
    data = {"inputs": torch.zeros(samples, *shape), "scale": torch.zeros(5)}
    return MicroBatch(data, False, True, samples, lambda start, end: None)


def test_what_stands_for_all():
    assert longest(iter([micro(8, 4), micro(8, 4), micro(3, 4)])) is None
    assert longest(iter([micro(8, 4), micro(8, 9), micro(3, 4)])).data["inputs"].shape == (8, 9)
    assert longest(iter([])) is longest(iter([micro(3, 9)])) is None
