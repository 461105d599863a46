"""Tasks and data for predictions, as users write them."""

import os

from torch.nn import functional as F

from trainapp.data.digits import Digits


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


class Square(Parts):
    """Ten rows, whatever the batch: as many as its samples when these are ten."""

    def predict(self, model, batch):
        output = model(batch["inputs"])
        return output.T @ output


class Verdicts:
    """Of a GAN's discriminator on real vectors."""

    def __call__(self, model, batch):
        _, real, _ = model(batch["inputs"], False)
        return real.sum(), len(real), {}

    def predict(self, model, batch):
        return model.discriminator(batch["inputs"])[:, 0]
