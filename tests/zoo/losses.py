"""Losses: (model, batch) -> (sum over the samples, number of samples, sums of metrics)."""

import torch.nn.functional as F


def classify(model, batch):
    """Cross-entropy of the model's logits."""
    logits = model(batch["inputs"])
    right = (logits.argmax(-1) == batch["targets"]).sum()
    return F.cross_entropy(logits, batch["targets"], reduction="sum"), len(logits), {"accuracy": right}


def classify_passing(model, batch):
    """The same, for metrics that get logits and targets."""
    logits = model(batch["inputs"])
    loss = F.cross_entropy(logits, batch["targets"], reduction="sum")
    return loss, len(logits), {"own": (logits.detach(), batch["targets"])}


def own(model, batch):
    """The model returns one loss per sample."""
    losses = model(batch["inputs"])
    return losses.sum(), len(losses), {}


def next_token(model, batch):
    """Cross-entropy of each token given those before it; padding (0) does not count."""
    logits = model(batch["inputs"])[:, :-1]
    targets = batch["inputs"][:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")
    return loss, (targets != 0).sum(), {}


def next_token_of_outputs(model, batch):
    """The same of a model of Transformers, which may be given positions."""
    positions = {"position_ids": batch["position_ids"]} if "position_ids" in batch else {}
    logits = model(batch["inputs"], **positions).logits[:, :-1]
    targets = batch["inputs"][:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")
    return loss, (targets != 0).sum(), {}
