"""Batches with a list of samples, as in detection, are their halves joined: losses are compared, and draws learnt."""

import helpers
import pytest
import runs
import torch
from test_recorded_checks import IN_DOUBLE, checks_of
from torch import nn
from torch.nn import functional as F

CLASSES = 5  # and samples in a batch: their dimensions cannot be told apart by a batch
HERE = "user_packages=[test_lists_of_samples]"


class Images(torch.utils.data.Dataset):
    """Images of one size, and boxes of any number, as a list of tensors or, as in torchvision, of dicts."""

    def __init__(self, split: str, as_dicts: bool = False, sizes: int = 1):
        self.as_dicts = as_dicts
        self.sizes = sizes  # of the images: a list of them, if there are several

    def __len__(self):
        return 20

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = torch.rand(1, 6 + index % self.sizes, 6, generator=generator)
        return image, torch.rand(1 + index % 3, 4, generator=generator)

    def collate(self, samples):
        images, boxes = zip(*samples, strict=True)
        batch = {"images": torch.stack(images) if self.sizes == 1 else list(images), "boxes": list(boxes)}
        if self.as_dicts:
            batch["boxes"] = [{"boxes": own, "name": f"{len(own)} boxes"} for own in boxes]
        return batch


class Detector(nn.Module):
    """Four numbers for each of the classes."""

    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(1, 8, 3)
        self.head = nn.Linear(8, 4 * CLASSES)

    def forward(self, images):
        features = [self.body(image).relu().mean((1, 2)) for image in images]
        return self.head(torch.stack(features)).unflatten(1, (CLASSES, 4))


def distances(model, batch):
    """The distance of each box from the nearest prediction."""
    predictions = model(batch["images"])  # [B, C, 4]
    predictions = F.dropout(predictions.transpose(0, 1), 0.2, model.training).transpose(0, 1)  # over [C, B, 4]
    distances_by_image = []
    for predicted, target in zip(predictions, batch["boxes"], strict=True):
        boxes = target["boxes"] if isinstance(target, dict) else target
        distances_by_image.append((predicted[None] - boxes[:, None]).abs().sum(2).amin(1))
    return torch.cat(distances_by_image)


def summed(model, batch):
    boxes = distances(model, batch)
    return boxes.sum(), len(boxes), {}


def averaged(model, batch):
    """The halves have other numbers of boxes, so that neither equal weights nor the counts give it from theirs."""
    boxes = distances(model, batch)
    return boxes.mean(), len(batch["boxes"]), {}


def settings(task, *overrides):
    data = ("data._target_=test_lists_of_samples.Images", "~data.augment", "objective=min loss")
    model = (
        "model._target_=test_lists_of_samples.Detector",
        *(f"~model.{name}" for name in ("width", "depth", "dropout")),
    )
    return ("model=mlp", "data=digits", *model, *data, HERE, f"task=test_lists_of_samples.{task}", *overrides)


KINDS = pytest.mark.parametrize("kind", ["+data.as_dicts=false", "+data.as_dicts=true", "+data.sizes=3"])


@KINDS
def test_a_sum_is_compared_and_its_draws_are_learnt(tmp_path, kind):
    told = checks_of(tmp_path, *settings("summed", kind))
    assert told["loss"] == told["loss in training"] == IN_DOUBLE
    assert told["draws in training"] == "all belong to samples"


@KINDS
def test_a_mean_is_refused(tmp_path, kind):
    message = runs.refusal(tmp_path, *settings("averaged", kind))
    assert message.startswith("task=test_lists_of_samples.averaged: the loss is a mean, but a sum is required: for 4 ")


def test_draws_over_as_many_classes_as_samples_do_not_depend_on_the_micro_batch(tmp_path):
    losses = {}
    for size in (2, 3, CLASSES):
        run_dir = tmp_path / str(size)
        overrides = (f"batch.global_size={CLASSES}", f"batch.micro_size={size}", "train.max_steps=3", "every.log=1")
        result = runs.run(run_dir, *settings("summed", *overrides))
        assert result.depends_on_micro_batch == []
        losses[size] = [line["loss"] for line in helpers.metrics(run_dir)]
    assert losses[2] == pytest.approx(losses[CLASSES], rel=1e-5)
    assert losses[3] == pytest.approx(losses[CLASSES], rel=1e-5)
