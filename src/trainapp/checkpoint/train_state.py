"""The state of a run between two steps: what a checkpoint holds."""

import dataclasses
import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trainapp.checkpoint import model_state, optimizer_state
from trainapp.checkpoint.model_state import Layout, Sizes
from trainapp.checkpoint.stateful import Stateful
from trainapp.data.progress import Progress
from trainapp.models import adapters
from trainapp.optim.ema import WeightAverage
from trainapp.optim.precision import Precision
from trainapp.rng import rng_state, seed_everything, set_rng_state

log = logging.getLogger(__name__)


@dataclass
class TrainState:
    """Exactly what a resume needs. The learning rate is a function of `progress.step` and needs no state."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    precision: Precision
    average: WeightAverage
    device: torch.device
    seed: int
    global_size: int
    keeps_gradients: bool = True  # until the update, which `optimizer.in_backward` makes part of the backward
    progress: Progress = field(default_factory=Progress)
    data_samples: int = 0  # in the training data that `progress.epoch` and `consumed` are counted in
    stateful: Stateful = field(default_factory=Stateful)  # what owns state outside of tensors
    # As they were built: what differs from it later is state, and not configuration.
    built: dict[str, Layout] = field(init=False)
    built_options: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.built = model_state.layout(self.model)
        self.built_options = optimizer_state.options(self.optimizer)

    def tensors(self) -> dict[str, Any]:
        """Model, optimizer and average by parameter name: the tensors themselves, whole or in shards. Of a model with
        adapters, not its frozen base.

        A tensor with several names, such as tied weights, is listed under the first. The optimizer's part has its other
        values, too.
        """
        return {
            "model": {name: tensor.detach() for name, tensor in model_state.saved_tensors(self.model).items()},
            "optimizer": optimizer_state.tensors(self.model, self.optimizer),
            "average": self.averages(),
        }

    def averages(self) -> dict[str, torch.Tensor]:
        """The weight average by parameter name; empty where none is kept."""
        return dict(zip(_trained_names(self.model), self.average.averages, strict=False))

    def rank_values(self) -> dict[str, Any]:
        """What every rank has of its own: its random generators, and entries that modules add to the state dict.

        Raises UserError for an entry that a checkpoint cannot hold.
        """
        return {"rng": rng_state(self.device), "added": model_state.save_added_entries(self.model)}

    def values(self, ranks: list[dict[str, Any]], stateful: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """Everything but `tensors`: plain values and small tensors.

        By rank: ranks, the `rank_values`; stateful, what else owns state (one for all where it is the same on every
        rank; None: this process's). Raises UserError for an optimizer's value that a checkpoint cannot hold.
        """
        base = adapters.base_of(self.model)
        return {
            "scaler": self.precision.scaler.state_dict(),
            "rng": [own["rng"] for own in ranks],
            "progress": dataclasses.asdict(self.progress),
            "stateful": [self.stateful.state_dict()] if stateful is None else stateful,
            "average_step": self.average.step,
            "sampler": {
                "seed": self.seed,
                "epoch": self.progress.epoch,
                "consumed": self.progress.consumed,
                "samples": self.data_samples,
            },
            "base": None if base is None else base.digest,
            "model_values": {
                "changed": model_state.changes(self.model, self.built),
                "added": [own["added"] for own in ranks],
            },
            "optimizer_values": optimizer_state.values(self.model, self.optimizer, self.built_options),
        }

    def follow(self, saved: dict[str, Any], sizes: Sizes, rank: int = 0, world: int = 1) -> list[str]:
        """Make room for the saved tensors: before they are read into `tensors`. saved: the `values` beside them.

        sizes: of the saved tensors. Returns names in the optimizer's state that differ from those of another one.
        Raises UserError for adapters that were trained on another base.
        """
        adapters.require_same_base(self.model, saved.get("base"))
        added = saved["model_values"]["added"]
        model_state.load_added_entries(self.model, added[rank if len(added) == world else 0])
        own_sizes = {name.removeprefix("model."): size for name, size in sizes.items() if name.startswith("model.")}
        model_state.follow(self.model, saved["model_values"]["changed"], own_sizes, self.device)
        return optimizer_state.follow(self.model, self.optimizer, saved["optimizer_values"], sizes, self.device)

    def load_values(self, saved: dict[str, Any], rank: int = 0, world: int = 1) -> None:
        """Continue from `saved`, the `values` of a run on any number of ranks."""
        if self.precision.scaler.is_enabled() and saved["scaler"]:
            self.precision.scaler.load_state_dict(saved["scaler"])
        self.progress = Progress(**saved["progress"])
        self.seed, self.data_samples = saved["sampler"]["seed"], saved["sampler"]["samples"]
        self.average.step, self.average.position = saved["average_step"], 0
        self._load_stateful(saved["stateful"], rank, world)
        if len(saved["rng"]) == world:
            set_rng_state(saved["rng"][rank], self.device)
        else:  # with another number of ranks none of the saved streams can continue
            seed_everything(hash((self.seed, self.progress.step, rank)) % 2**63)

    def _load_stateful(self, saved: list[dict[str, Any]], rank: int, world: int) -> None:
        if len(saved) not in (1, world):
            log.warning(
                "the checkpoint was written by %d ranks, with different states of %s: all %d continue with rank 0's",
                len(saved),
                ", ".join(saved[0]),
                world,
            )
        unknown = self.stateful.load_state_dict(saved[rank if len(saved) == world else 0])
        if unknown:
            log.warning(
                "only the checkpoint or only this run has a state of %s: it starts from its initial state",
                ", ".join(unknown),
            )


def _trained_names(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]
