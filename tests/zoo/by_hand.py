"""The loop that a user would write: no micro-batches, no recovery, the data set's own collate."""

from typing import NamedTuple

import torch
from torch.utils.data import default_collate

from trainapp.data.sampler import Permutation

from . import catalogue
from .harness import Training


class ByHand(NamedTuple):
    losses: list[float]  # the mean of each step
    evaluation: float  # the mean after the last one
    parameters: list[torch.Tensor]


def train_by_hand(training: Training) -> ByHand:
    """The same cell, seed, optimizer and clipping as `training`, each step as one batch."""
    run, cell = training.run, training.cell
    config = run.config
    torch.manual_seed(config.train.seed)
    model = catalogue.find(cell.model)()
    task, kind = catalogue.find(cell.task), catalogue.find(cell.data)
    train, val = kind("train", seed=config.train.seed), kind("val", seed=config.train.seed)
    settings = run.state.optimizer.param_groups
    decays = {p.ndim: group["weight_decay"] for group in settings for p in group["params"]}
    groups = [{"params": [p], "weight_decay": decays[p.ndim]} for p in model.parameters()]
    optimizer = torch.optim.AdamW(groups, lr=config.optimizer.lr, betas=settings[0]["betas"], eps=settings[0]["eps"])
    losses = []
    for (epoch, consumed), _ in sorted(training.trained.items()):
        order = Permutation(config.train.seed, len(train)).indices(epoch, 0, len(train))
        batch = collated(train, order[consumed:][: config.batch.global_size])
        optimizer.zero_grad()
        loss, count, _ = task(model, batch)
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.grad_clip)
        optimizer.step()
        losses.append((loss / count).item())
    model.eval()
    with torch.no_grad():
        loss, count, _ = task(model, collated(val, range(len(val))))
    return ByHand(losses, float(loss / count), [p.detach() for p in model.parameters()])


def collated(dataset, indices):
    """A batch of these samples."""
    return getattr(dataset, "collate", default_collate)([dataset[index] for index in indices])
