"""The state of a run between two steps: what a checkpoint holds."""

import dataclasses
import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trainapp.checkpoint.stateful import Stateful
from trainapp.data.progress import Progress
from trainapp.optim.ema import WeightAverage
from trainapp.optim.precision import Precision
from trainapp.rng import seed_everything, set_rng_state
from trainapp.torch_private import EXTRA_STATE

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
    progress: Progress = field(default_factory=Progress)
    stateful: Stateful = field(default_factory=Stateful)  # what owns state outside of tensors

    def optimizer_parameters(self) -> list[torch.Tensor]:
        """The parameters that the optimizer trains."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def tensors(self) -> dict[str, Any]:
        """Model, optimizer and average by parameter name: the tensors themselves, whole or in shards.

        A tensor with several names, such as tied weights, is listed under the first.
        """
        model: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            is_extra = name.rpartition(".")[2] == EXTRA_STATE  # `stateful` has it
            if torch.is_tensor(tensor) and id(tensor) not in seen and not is_extra:
                seen.add(id(tensor))
                model[name] = tensor.detach()
        return {
            "model": model,
            "optimizer": optimizer_state(self.model, self.optimizer),
            "average": dict(zip(_trained_names(self.model), self.average.averages, strict=False)),
        }

    def values(self, rng: list[dict[str, Any]], stateful: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """Everything else: plain values and tensors. By rank: rng, the generators; stateful, what else owns state (one
        for all where it is the same on every rank; None: this process's).
        """
        return {
            "scaler": self.precision.scaler.state_dict(),
            "rng": rng,
            "progress": dataclasses.asdict(self.progress),
            "stateful": [self.stateful.state_dict()] if stateful is None else stateful,
            "average_step": self.average.step,
            "sampler": {"seed": self.seed, "epoch": self.progress.epoch, "consumed": self.progress.consumed},
        }

    def load_values(self, saved: dict[str, Any], rank: int = 0, world: int = 1) -> None:
        """Continue from `saved`, the `values` of a run on any number of ranks."""
        if self.precision.scaler.is_enabled() and saved["scaler"]:
            self.precision.scaler.load_state_dict(saved["scaler"])
        self.progress = Progress(**saved["progress"])
        self.seed = saved["sampler"]["seed"]
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
            log.warning("only the checkpoint or only this run has a state of %s: it begins anew", ", ".join(unknown))


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """The optimizer's state by parameter name: names survive regrouping or resharding."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)]: state for parameter, state in optimizer.state.items()}


def _trained_names(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]
