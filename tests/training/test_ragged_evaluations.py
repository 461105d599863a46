"""Evaluations whose last chunk is shorter, of data that training never meets: the error names the setting."""

import pytest
import runs
import torch
from torch import nn
from torch.utils.data import IterableDataset


class Chunks(IterableDataset):
    """Chunks of eight time steps, which torch stacks; the last one of the evaluation is shorter."""

    def __init__(self, split: str):
        self.lengths = [8] * 16 if split == "train" else [8, 8, 8, 5]

    def __iter__(self):
        return iter([{"inputs": torch.ones(length, 8)} for length in self.lengths])


class Row(nn.Linear):
    def __init__(self):
        super().__init__(8, 1)


CHUNKS = (
    *runs.TINY,
    *runs.own_model("test_ragged_evaluations.Row"),
    *("data._target_=test_ragged_evaluations.Chunks", "~data.augment", "data.num_workers=0"),
    *(
        "user_packages=[test_ragged_evaluations]",
        "objective=min loss",
        "every.eval=2",
        "train.max_steps=2",
        "batch.global_size=4",
    ),
)


def rows_of_eight(model, batch):
    return model(batch["inputs"].reshape(-1, 8, 8)).sum(), len(batch["inputs"]), {}


def rows_of_four_chunks(model, batch):
    return model(batch["inputs"]).reshape(4, -1).sum(), 4, {}


@pytest.mark.parametrize("number", [4, 2])
def test_a_shorter_chunk_that_cannot_be_stacked_is_named(tmp_path, number):
    """Also in the number of samples that training has."""
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size") as caught:
        runs.run(tmp_path, *CHUNKS, "task=test_ragged_evaluations.rows_of_eight", f"batch.eval_micro_size={number}")
    (note,) = [note for note in caught.value.__notes__ if "evaluation" in note]
    assert note.startswith(
        f"in an evaluation micro-batch of {number} samples (batch.eval_micro_size={number}, batch.gl"
    )
    assert "set batch.eval_micro_size=1, or pad them" in note


def test_a_task_that_refuses_a_number_of_samples_is_named(tmp_path):
    of_chunks = ("task=test_ragged_evaluations.rows_of_four_chunks", "train.check_loss=false", "train.draws=device")
    with pytest.raises(RuntimeError, match="invalid for input of size") as caught:
        runs.run(tmp_path, *CHUNKS, *of_chunks, "batch.eval_micro_size=3", "batch.micro_size=4")
    (note,) = [note for note in caught.value.__notes__ if "evaluation" in note]
    assert "set batch.eval_micro_size to one that divides" in note
