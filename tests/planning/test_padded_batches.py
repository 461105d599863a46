"""Batches whose shapes depend on which samples they hold: no plan of them is exact."""

import pytest
import runs
import torch

from trainapp.config import compose
from trainapp.data.batch import MicroBatch
from trainapp.planning import planner
from trainapp.planning.traced_part import representative

OVER = (
    *runs.TINY, "task=classification", "user_packages=[planned_models]", "checkpointing=off",
    "plan.levers=false", "batch.global_size=10", "batch.micro_size=10", "batch.eval_micro_size=20", "every.eval=1",
    "train.max_steps=40", "train.max_epochs=null",
)  # fmt: skip


@pytest.fixture
def padded(tmp_path):
    """Overrides for a run on `planned_models.Padded`."""
    for group, name in (("model", "Meaned"), ("data", "Padded")):
        folder = tmp_path / "conf" / group
        folder.mkdir(parents=True)
        (folder / "own.yaml").write_text(f"_target_: planned_models.{name}\n")
    return (*OVER, "model=own", "data=own", f"hydra.searchpath=[file://{tmp_path / 'conf'}]")


def plan(*overrides):
    return planner.plan(compose.from_command_line(overrides))[0]


def test_where_all_samples_are_alike_a_part_of_a_batch_changes_nothing(padded):
    """Nor does the last batch of an evaluation, of 10 samples where others have 20."""
    facts = plan(*padded, "+data.size=250", "+data.long=-1")
    assert facts["certainty"] == "exact"


@pytest.mark.parametrize("number", [3, 25])  # in a whole batch of the evaluation, and in the rest
def test_a_longer_sample_of_the_evaluation_is_seen_wherever_it_is(tmp_path, padded, number):
    overrides = (*padded, "+data.size=250", "+data.long=-1", f"+data.val_long={number}")
    facts = plan(*overrides)
    peak = runs.run(tmp_path / "run", *overrides, "train.max_steps=2").peak_memory_bytes
    assert facts["certainty"] == "range"
    assert facts["range_bytes"][0] < peak <= facts["range_bytes"][1] == facts["peak_bytes"]


def test_samples_that_nobody_has_looked_at_may_be_longer(padded):
    """If the data set has a collate of its own: torch's stacks what is alike."""
    facts = plan(*padded, "+data.size=320", "+data.long=-1")
    assert facts["certainty"] == "range"
    assert any("after the first 256" in note for note in facts["notes"])


def micro(samples, *shape):
    data = {"inputs": torch.zeros(samples, *shape), "scale": torch.zeros(5)}
    return MicroBatch(data, False, True, samples, lambda start, end: None)


def test_what_stands_for_all():
    assert representative(iter([micro(8, 4), micro(8, 4), micro(3, 4)]), "longest") is None
    whole = representative(iter([micro(8, 4), micro(8, 9), micro(3, 4)]), "longest")
    assert whole.data["inputs"].shape == (8, 9)
    rest = representative(iter([micro(8, 4), micro(3, 20)]), "longest")
    assert rest.data["inputs"].shape == (3, 20)  # as it is: not all of its tensors are of samples


def test_a_rest_counts_as_a_full_batch():
    rows = torch.arange(3.0).reshape(3, 1).expand(3, 9)
    rest = MicroBatch({"inputs": rows}, True, True, 3, lambda start, end: None)
    full = MicroBatch({"inputs": torch.zeros(8, 4)}, False, True, 8, lambda start, end: None)
    found = representative(iter([full, rest]), "longest")
    assert found.samples == 8
    assert found.data["inputs"][:, 0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert found.piece(2, 5)["inputs"].shape == (3, 9)
