"""What a model returns for a batch, as rows."""

import json

import pytest
import torch
from torch import nn

from trainapp.data.batch import MicroBatch
from trainapp.errors import UserError
from trainapp.files import strict_json
from trainapp.inference.predict import Predictor
from trainapp.inference.rows import _plain_value
from trainapp.losses.losses import classification


def rows(logits, targets, task):
    """Of a model that returns its inputs."""
    batch = {"inputs": logits, "targets": targets}
    micro = MicroBatch(
        batch, True, True, range(len(logits)), lambda start, end: {k: v[start:end] for k, v in batch.items()}
    )
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


# What a task's own `predict` returns


class Own:
    """Predicts what `returned` makes of a batch's ids and values."""

    def __init__(self, returned):
        self.returned = returned

    def __call__(self, model, batch): ...

    def predict(self, model, batch):
        return self.returned(batch["id"], batch["value"])


def own_rows(returned, samples=4):
    batch = {"id": [f"photo_{number}" for number in range(samples)], "value": torch.arange(float(samples))}
    micro = MicroBatch(
        batch, True, True, range(samples), lambda start, end: {k: v[start:end] for k, v in batch.items()}
    )
    return [row["prediction"] for row in Predictor(Own(returned), "own.Task", ()).rows(nn.Identity(), micro)]


@pytest.mark.parametrize(
    ("returned", "second"),
    [
        (lambda ids, values: {"id": ids, "score": values}, {"id": "photo_1", "score": 1.0}),
        (lambda ids, values: ids, "photo_1"),
        (lambda ids, values: [None] * len(ids), None),
        (lambda ids, values: (values, ids), [1.0, "photo_1"]),  # several outputs, as tensors in a tuple always were
        (lambda ids, values: [{"id": i, 7: (1, [None])} for i in ids], {"id": "photo_1", "7": [1, [None]]}),
        (lambda ids, values: {"n": values.numpy(), "m": list(values.numpy())}, {"n": 1.0, "m": 1.0}),
    ],
)
def test_values_that_are_no_tensors(returned, second):
    found = own_rows(returned)
    assert len(found) == 4
    assert json.loads(strict_json(found, default=_plain_value))[1] == second


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (lambda ids, values: {"id": ids[0]}, r"\['id'\] for 4 samples is a str; give"),
        (lambda ids, values: ids[1:], " for 4 samples is a list of 3; give"),
        (lambda ids, values: (ids, [values.sum()]), r"\[1\]\[0\] for 4 samples has shape \[\]; give"),
    ],
)
def test_what_is_not_one_per_sample(returned, problem):
    with pytest.raises(UserError, match=rf"mode=predict with task=own\.Task: its output{problem}"):
        own_rows(returned)
