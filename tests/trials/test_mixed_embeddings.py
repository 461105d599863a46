"""The embeddings of a sample must not depend on the others: compared before the first step, where losses are."""

import pytest
import runs
import torch
from test_recorded_checks import checks_of
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from trainapp.files import json_object
from trainapp.run import recipe, recipe_text
from trainapp.tasks import EmbeddingTask

HERE = "user_packages=[own_tasks,test_recorded_checks,test_mixed_embeddings]"
NET = (*runs.own_model("own_tasks.Net"), HERE, "data=digits", "objective=min loss")
ALIKE = "are the same for 4 samples as for parts of them, in {}"
MIXES = "its embed mixes samples"


def task(name):
    return f"task=test_mixed_embeddings.{name}"


def standardised(rows):
    return (rows - rows.mean(0)) / rows.std(0)


class Twins(EmbeddingTask):
    """The loss of Barlow Twins, which standardises over all samples of the step."""

    def embed(self, model, batch):
        images = batch["inputs"]
        return model(images), model(images.flip(-1))

    def loss_of_embeddings(self, embeddings):
        first, second = map(standardised, embeddings)
        correlation = first.T @ second / len(first)
        loss = (correlation - torch.eye(len(correlation))).square().sum()
        return loss * len(first), len(first), {}


class MixesInEmbed(Twins):
    def embed(self, model, batch):
        first, second = super().embed(model, batch)
        return standardised(first), standardised(second)


class Centres(Twins):
    """One of several embeddings alone, whose sum over a batch is zero in any way of splitting it."""

    def embed(self, model, batch):
        first, second = super().embed(model, batch)
        return {"first": first, "targets": batch["targets"], "second": second - second.mean(0)}

    def loss_of_embeddings(self, embeddings):
        return super().loss_of_embeddings((embeddings["first"], embeddings["second"]))


class CentresInFp32(Centres):
    """By a tensor that no copy in fp64 converts."""

    def embed(self, model, batch):
        return super().embed(lambda images: model(images.flatten(1) @ FP32), batch)


FP32 = torch.eye(64)


class InTrainingAlone(Twins):
    def embed(self, model, batch):
        first, second = super().embed(model, batch)
        return (standardised(first), second) if model.training else (first, second)


class Drops(Twins):
    """Each sample's own features."""

    def embed(self, model, batch):
        first, second = super().embed(model, batch)
        return F.dropout(first, 0.3, model.training), F.dropout(second, 0.3, model.training)


class WithoutStatistics(nn.Module, Twins):
    """BatchNorm that has no running statistics is excused in no mode."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(10, affine=False, track_running_stats=False)

    def embed(self, model, batch):
        first, second = Twins.embed(self, model, batch)
        return self.norm(first), self.norm(second)


class WithStatistics(WithoutStatistics):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(10, affine=False)


class NormInLoss(WithStatistics):
    """The same layer, but of all samples of the step."""

    embed = Twins.embed

    def loss_of_embeddings(self, embeddings):
        first, second = embeddings
        return super().loss_of_embeddings((self.norm(first), self.norm(second)))


class PlainWithNorm(nn.Module):
    """No embedding loss."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(10, affine=False)

    def forward(self, model, batch):
        logits = self.norm(model(batch["inputs"]))
        return F.cross_entropy(logits, batch["targets"], reduction="sum"), len(logits), {}


class Standardising(nn.Module):
    """The model mixes them."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.layer = nn.Linear(64, num_classes)

    def forward(self, images):
        return standardised(self.layer(images.flatten(1)))


class ChangesInPlace(Twins):
    def loss_of_embeddings(self, embeddings):
        for rows in embeddings:
            rows -= rows.mean(0)
        return super().loss_of_embeddings(embeddings)


class Sequences(torch.utils.data.Dataset):
    """Of different lengths."""

    def __init__(self, split):
        generator = torch.Generator().manual_seed(0)
        self.rows = [torch.randn(2 + number % 5, 3, generator=generator) for number in range(32)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]

    @staticmethod
    def collate(samples):
        lengths = torch.tensor([len(sample) for sample in samples])
        return {"inputs": pad_sequence(samples, batch_first=True), "lengths": lengths}


class MaskedSequences(Sequences):
    """Masked at random, for each batch anew."""

    @staticmethod
    def collate(samples):
        batch = Sequences.collate(samples)
        return {**batch, "inputs": batch["inputs"] * (torch.rand(batch["inputs"].shape) > 0.1)}


class OfSequences(EmbeddingTask):
    """The mean over real positions."""

    def embed(self, model, batch):
        mask = torch.arange(batch["inputs"].shape[1]) < batch["lengths"][:, None]
        features = model(batch["inputs"]) * mask[:, :, None]
        return features.sum(1) / batch["lengths"][:, None]

    def loss_of_embeddings(self, embeddings):
        return standardised(embeddings).pow(4).sum(), len(embeddings), {}


class OfPaddedSequences(OfSequences):
    def embed(self, model, batch):
        return model(batch["inputs"]).mean(1)


def linear():
    return nn.Linear(3, 4)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("MixesInEmbed", ""),
        ("Centres", ""),
        ("CentresInFp32", ""),
        ("WithoutStatistics", ""),
        ("InTrainingAlone", " in training mode"),
    ],
)
def test_an_embed_that_mixes_samples_is_refused(tmp_path, name, mode):
    message = runs.refusal(tmp_path, *NET, task(name))
    assert message.startswith(f"task=test_mixed_embeddings.{name}: {MIXES}{mode}: the embeddings of 4 samples are not ")
    assert "Normalise over the batch in loss_of_embeddings" in message


def test_a_model_that_mixes_samples_is_refused(tmp_path):
    model = (*runs.own_model("test_mixed_embeddings.Standardising"), HERE, "data=digits")
    assert MIXES in runs.refusal(tmp_path, *model, task("Twins"))


def test_what_was_compared_is_told(tmp_path):
    told = checks_of(tmp_path, *NET, task("Twins"))
    alike = ALIKE.format("fp64, with noise too")
    assert told == {
        "draws": "none",
        "draws in training": "none",
        "loss": "not compared: an embedding loss compares the samples of the whole step",
        "loss in training": "not compared: an embedding loss compares the samples of the whole step",
        "embeddings": alike,
        "embeddings in training": alike,
    }
    lines = recipe_text.lines_of(recipe.recipe_of(runs.closed(tmp_path, *NET, task("Twins"))))
    assert f"; the embeddings in evaluation and training {alike};" in lines[-1]


def test_draws_of_samples_are_no_mixing(tmp_path):
    told = checks_of(tmp_path, *NET, task("Drops"))
    assert told["embeddings in training"] == ALIKE.format("fp64, with noise too")
    assert told["draws in training"] == "all belong to samples"


def test_the_check_can_be_switched_off(tmp_path):
    """Negative control: the evaluation then depends on its micro-batch."""
    settings = (*runs.TINY, *NET, task("MixesInEmbed"), "train.check_loss=false", "train.max_steps=1", "every.eval=1")
    told = checks_of(tmp_path / "checks", *settings)
    assert told["embeddings"] == told["loss"] == "not compared: train.check_loss=false"
    values = []
    for size in (5, 60):
        result = runs.run(tmp_path / str(size), *settings, f"batch.eval_micro_size={size}")
        values.append(result.objective)
    assert abs(values[0] - values[1]) > 1e-2 * abs(values[0])


@pytest.mark.parametrize(("name", "depends"), [("OfSequences", False), ("OfPaddedSequences", True)])
def test_embeddings_that_depend_on_the_padding_are_named(tmp_path, caplog, name, depends):
    data = ("data._target_=test_mixed_embeddings.Sequences", "~data.augment", "data.num_workers=0")
    settings = (*runs.own_model("test_mixed_embeddings.linear"), HERE, *data, task(name), "objective=min loss")
    told = checks_of(tmp_path / "checks", *settings)
    start = "are not the same for 4 samples as in halves (" if depends else "are the same for 4 samples "
    assert told["padded_embeddings"].startswith(start) or told["embeddings"].startswith(start)
    result = runs.run(tmp_path / "run", *runs.STEPS_ONLY, *settings)
    text = f"task=test_mixed_embeddings.{name}: the embeddings depend on the padding"
    assert any(reason.startswith(text) for reason in result.depends_on_micro_batch) == depends


def test_what_says_nothing_about_embeddings_is_told(tmp_path):
    data = ("data._target_=test_mixed_embeddings.MaskedSequences", "~data.augment", "data.num_workers=0")
    settings = (*runs.own_model("test_mixed_embeddings.linear"), HERE, *data, task("OfSequences"), "objective=min loss")
    reason = "the data's `collate` draws random numbers"
    assert checks_of(tmp_path, *settings)["embeddings"].startswith(f"not compared: {reason}")


# --- BatchNorm of a task


@pytest.mark.parametrize(
    ("name", "layers"), [("WithStatistics", 1), ("PlainWithNorm", 1), ("NormInLoss", 0), ("Twins", 0)]
)
def test_batchnorm_of_a_task_is_counted_and_named(tmp_path, name, layers):
    """In an embedding loss, that of `embed` alone: the loss sees the whole step."""
    result = runs.run(tmp_path, *runs.STEPS_ONLY, *NET, task(name), "batch.micro_size=7")
    assert json_object(tmp_path / "recipe.json")["batchnorm_layers"] == layers
    start = "in training, BatchNorm of the task (task.norm) normalises each micro-batch (7) by its own mean"
    assert [text.startswith(start) for text in result.depends_on_micro_batch] == [True] * layers


# --- errors


def test_a_loss_that_changes_embeddings_in_place_is_explained(tmp_path):
    settings = (*runs.STEPS_ONLY, *NET, task("ChangesInPlace"))
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad") as caught:
        runs.run(tmp_path, *settings)
    assert any("loss_of_embeddings changes embeddings in place" in note for note in caught.value.__notes__)
