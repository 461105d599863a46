"""What a model returns for a batch, as rows."""

import pytest
import torch
from torch import nn

from trainapp.data.micro_batch import MicroBatch
from trainapp.inference.outputs import Predictor
from trainapp.train.losses import classification


def rows(logits, targets, task):
    """Of a model that returns its inputs."""
    batch = {"inputs": logits, "targets": targets}
    micro = MicroBatch(batch, True, True, len(logits), lambda start, end: {k: v[start:end] for k, v in batch.items()})
    return Predictor(task, "task", ()).rows(nn.Identity(), micro)


@pytest.mark.parametrize(("shape", "dim"), [((2, 4, 5, 3), -1), ((2, 3, 4, 5), 1)])
def test_images_keep_rows_that_do_not_count(shape, dim):
    logits = torch.randn(shape)
    targets = torch.zeros(2, 4, 5, dtype=torch.int64)
    targets[:, -2:] = -100
    found = rows(logits, targets, lambda model, batch: None)
    assert [row["prediction"] for row in found] == logits.argmax(dim).tolist()


def test_sequences_end_at_the_last_token_that_counts():
    logits, targets = torch.randn(2, 4, 3), torch.tensor([[0, 1, -100, -100], [-100, 1, 2, -100]])
    found = rows(logits, targets, lambda model, batch: None)
    assert [len(row["prediction"]) for row in found] == [2, 3]


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4), (2, 3, 4, 5)])
def test_targets_that_are_shares_of_classes(shape):
    logits = torch.randn(shape)
    found = rows(logits, torch.rand(shape).softmax(1), classification)
    assert [row["prediction"] for row in found] == logits.argmax(1).tolist()
