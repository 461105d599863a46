"""Tasks and data for predictions, as users write them."""

import os

import torch
from torch import nn
from torch.nn import functional as F

from trainapp.data.sets.digits import Digits


class Named(Digits):
    """Classes with names."""

    class_names = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class Unlabelled(Digits):
    """Only what the model takes."""

    def __getitems__(self, indices):
        return super().__getitems__(indices)["inputs"]


class Interrupted(Digits):
    """The process gets the signal SIGNAL while it reads sample SIGNAL_AT, both from the environment."""

    def __getitems__(self, indices):
        if int(os.environ.get("SIGNAL_AT", -1)) in indices:
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))
        return super().__getitems__(indices)


def squares(model, batch):
    """Regression of ten values."""
    loss = ((model(batch["inputs"]) - F.one_hot(batch["targets"], 10).float()) ** 2).sum()
    return loss, len(batch["targets"]), {}


class Parts:
    """Says itself what it predicts."""

    def __call__(self, model, batch):
        return squares(model, batch)

    def predict(self, model, batch):
        output = model(batch["inputs"])
        return {"first": output[:, 0], "rest": (output[:, 1:5], output[:, 5:])}


class Mean(Parts):
    """Not of single samples."""

    def predict(self, model, batch):
        return model(batch["inputs"]).mean(0)


class TimeFirst(Parts):
    """Eight time steps, before the samples."""

    def predict(self, model, batch):
        return torch.stack([model(batch["inputs"]) * step for step in range(8)])


class Pixels:
    """Images [1, height, 8] whose targets are the class of each pixel, and -100 in the last rows."""

    def __init__(self, split: str, seed: int = 0, height: int = 6):
        self.images = torch.randn(
            32 if split == "train" else 12, 1, height, 8, generator=torch.Generator().manual_seed(3)
        )
        self.targets = (self.images[:, 0] > 0).long() + (self.images[:, 0] > 1).long()
        self.targets[:, -2:] = -100
        self.spec = {"num_classes": 3}

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"inputs": self.images[index], "targets": self.targets[index]}


class UNet(nn.Module):
    """Logits [B, classes, H, W]."""

    def __init__(self, classes: int = 3):
        super().__init__()
        self.down, self.up = nn.Conv2d(1, 4, 3, 2, 1), nn.ConvTranspose2d(4, 4, 2, 2)
        self.head = nn.Conv2d(5, classes, 1)

    def forward(self, images):
        return self.head(torch.cat((images, self.up(self.down(images).relu())), 1))


def per_pixel(model, batch):
    """The same as `classification`, in a task of one's own."""
    logits, targets = model(batch["inputs"]), batch["targets"]
    loss = F.cross_entropy(logits, targets, reduction="sum")
    return loss, (targets != -100).sum(), {"*": lambda: (logits.detach(), targets)}


class ShownTimeFirst(Parts):
    """Shows what it predicts with the samples behind as many time steps as a whole batch has."""

    def __init__(self, steps: int = 8):
        self.steps = steps

    def __call__(self, model, batch):
        loss, count, _ = squares(model, batch)
        outputs = torch.stack([model(batch["inputs"]) * step for step in range(1, self.steps + 1)])
        targets = batch["targets"].expand(self.steps, -1)
        return loss, count, {"predictions": (outputs.detach(), targets)}


def shown(model, batch):
    """A classification that draws in evaluation, too, and shows its logits."""
    logits = model(F.dropout(batch["inputs"], 0.1, training=True))
    loss = F.cross_entropy(logits, batch["targets"], reduction="sum")
    return loss, len(logits), {"*": (logits.detach(), batch["targets"])}
