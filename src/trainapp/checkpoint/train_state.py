"""What a run is made of between two steps, and how to return there."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trainapp.data.micro_batch_sizes import MicroBatchSizes
from trainapp.data.progress import Progress
from trainapp.optim.ema import WeightAverage
from trainapp.optim.precision import Precision
from trainapp.parallel.dtensor import copy_into
from trainapp.rng import seed_everything, set_rng_state


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
    progress: Progress = field(default_factory=Progress)

    def optimizer_parameters(self) -> list[torch.Tensor]:
        """What the optimizer trains."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def tensors(self) -> dict[str, Any]:
        """Model, optimizer and average by parameter name: the tensors themselves, whole or in shards."""
        return {
            "model": self.model.state_dict(),
            "optimizer": optimizer_state(self.model, self.optimizer),
            "average": dict(zip(_trained_names(self.model), self.average.averages, strict=False)),
        }

    def values(self, rng: list[dict[str, Any]]) -> dict[str, Any]:
        """All else: primitives and small tensors. rng: the generators of every rank."""
        return {
            "scaler": self.precision.scaler.state_dict(),
            "rng": rng,
            "progress": dataclasses.asdict(self.progress),
            "average_step": self.average.step,
            "sampler": {"seed": self.seed, "epoch": self.progress.epoch, "consumed": self.progress.consumed},
            "sizes": {
                "micro": self.micro.state_dict(),
                "eval_micro": self.eval_micro.state_dict(),
                "global": self.global_size,
                "budget": self.budget,
            },
        }

    @torch.no_grad()
    def load_whole(self, saved: dict[str, Any]) -> None:
        """Copy whole tensors, as one process saved them, into this state's own, which may be shards."""
        own, missing = self.tensors(), []
        for part in ("model", "optimizer"):
            flat, saved_flat = dict(_flat(own[part])), dict(_flat(saved[part]))
            missing += sorted(set(flat) ^ set(saved_flat))
            for name in sorted(set(flat) & set(saved_flat)):
                if flat[name].shape != saved_flat[name].shape:
                    missing.append(f"{name} {tuple(saved_flat[name].shape)} instead of {tuple(flat[name].shape)}")
                else:
                    copy_into(flat[name], saved_flat[name])
        if missing:
            raise ValueError(f"{len(missing)} tensors differ: {', '.join(missing[:4])}")
        for name, average in own["average"].items():
            copy_into(average, saved["average"].get(name, own["model"][name]))

    def load_values(self, saved: dict[str, Any], rank: int = 0, world: int = 1) -> None:
        """Continue from `saved`. Sizes are taken by whoever resumes: they may differ from the saved run's."""
        if self.precision.scaler.is_enabled() and saved["scaler"]:
            self.precision.scaler.load_state_dict(saved["scaler"])
        self.progress = Progress(**saved["progress"])
        self.seed = saved["sampler"]["seed"]
        self.average.step, self.average.position = saved["average_step"], 0
        if len(saved["rng"]) == world:
            set_rng_state(saved["rng"][rank], self.device)
        else:  # another number of ranks: none of the streams that there were can go on
            seed_everything(hash((self.seed, self.progress.step, rank)) % 2**63)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """The optimizer's state by parameter name: names outlast another grouping or sharding of the parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)]: state for parameter, state in optimizer.state.items()}


def _trained_names(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif torch.is_tensor(value):
            yield prefix + name, value
