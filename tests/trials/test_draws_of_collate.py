"""Draws in the data's `collate`, such as mixup's, are those of a micro-batch: the recipe and the result name them."""

import json

import helpers
import pytest
import runs
import torch
from torch.utils.data import default_collate

from trainapp.data.sets.digits import Digits

HERE = "user_packages=[test_draws_of_collate]"


class Mixed(torch.utils.data.Dataset):
    """Digits, mixed with others of their batch by a permutation and one coefficient: a built-in loss and model do."""

    task = "classification"

    def __init__(self, split: str, mixes: bool = True):
        self.digits = Digits(split)
        self.spec = self.digits.spec
        self.mixes = mixes

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, index):
        return self.digits[index]

    def collate(self, samples):
        batch = default_collate(samples)
        if not self.mixes:
            return batch
        share = torch.distributions.Beta(1.0, 1.0).sample()
        others = torch.randperm(len(samples))
        inputs = share * batch["inputs"] + (1 - share) * batch["inputs"][others]
        targets = torch.nn.functional.one_hot(batch["targets"], 10).float()
        return {"inputs": inputs, "targets": share * targets + (1 - share) * targets[others]}


def settings(*more):
    data = ("data._target_=test_draws_of_collate.Mixed", "~data.augment", "data.num_workers=0")
    return (*runs.STEPS_ONLY, "model=mlp", "model.width=16", *data, HERE, "train.max_steps=1", *more)


def loss(run_dir, *more):
    runs.run(run_dir, *settings(*more))
    return helpers.metrics(run_dir)[0]["loss"]


def test_mixup_in_collate_is_named(tmp_path, caplog):
    with caplog.at_level("INFO"):
        (text,) = runs.run(tmp_path, *settings("batch.micro_size=4")).depends_on_micro_batch
    assert text.startswith("the data's `collate` draws random numbers for each micro-batch, not for the step")
    assert caplog.text.count(text) == 1
    assert json.loads((tmp_path / "recipe.json").read_text())["collate_draws"]
    assert "results depend on the micro-batch (draws of the data's `collate`)" in caplog.text


def test_a_collate_that_draws_nothing_is_not_named(tmp_path):
    result = runs.run(tmp_path, *settings("+data.mixes=false", "batch.micro_size=4"))
    assert not result.depends_on_micro_batch
    assert "collate_draws" not in json.loads((tmp_path / "recipe.json").read_text())


@pytest.mark.parametrize("mixes", [True, False])
def test_its_loss_depends_on_the_micro_batch(tmp_path, mixes):
    """What the message says, and the negative control."""
    own = f"+data.mixes={mixes}"
    whole = loss(tmp_path / "whole", own, "batch.micro_size=16")
    cut = loss(tmp_path / "cut", own, "batch.micro_size=4")
    assert (cut == pytest.approx(whole, rel=1e-5)) != mixes


def test_a_resumed_run_names_it_again(tmp_path):
    saved = ("checkpointing=standard", "batch.micro_size=4")
    runs.run(tmp_path, *settings(*saved))
    assert runs.run(tmp_path, *settings(*saved, "train.max_steps=2")).depends_on_micro_batch
    assert json.loads((tmp_path / "recipe.json").read_text())["collate_draws"]
