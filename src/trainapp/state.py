"""What a run is made of between two steps, and how to return there."""

import contextlib
import ctypes
import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from trainapp.ema import WeightAverage
from trainapp.parallel.placement import copy_into
from trainapp.precision import Precision
from trainapp.search import Sizes


@dataclass
class Progress:
    """How far the run is. `consumed` counts samples trained in this epoch; with the seed it is the sampler's state."""

    step: int = 0  # applied optimizer steps
    epoch: int = 0
    consumed: int = 0
    samples: int = 0  # trained in all epochs
    skipped: int = 0  # steps given up for a non-finite gradient
    evaluated_at: int = 0  # the step of the last evaluation, so that a restart does not repeat it
    objective: float | None = None  # of the last evaluation
    best: float | None = None
    best_step: int | None = None


@dataclass
class TrainState:
    """Exactly what a resume needs. The learning rate is a function of `progress.step` and needs no state."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    precision: Precision
    average: WeightAverage
    micro: Sizes
    eval_micro: Sizes
    device: torch.device
    seed: int
    global_size: int
    budget: int  # bytes of memory that the sizes were found in
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


def has_batchnorm(model: nn.Module) -> bool:
    """Whether the model normalises over the samples of a micro-batch."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def seed_everything(seed: int) -> None:
    """Python, NumPy and torch on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state(device: torch.device) -> dict[str, Any]:
    """The generators of Python, NumPy, torch's CPU and the device, as primitives and tensors."""
    kind, keys, *rest = np.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
    }
    return state | device_rng_state(device)


def device_rng_state(device: torch.device) -> dict[str, Any]:
    """Torch's part of `rng_state`."""
    state: dict[str, Any] = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """The inverse of `rng_state`. A state that was taken on another kind of device sets what both have."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    elif device.type == "mps" and "mps" in state:
        torch.mps.set_rng_state(state["mps"])


@contextlib.contextmanager
def preserved_rng(device: torch.device):
    """What draws random numbers inside the block leaves no trace outside it."""
    state = rng_state(device)
    try:
        yield
    finally:
        set_rng_state(state, device)


class Generators:
    """The random generators at the start of a step.

    `rng_state` costs 80 microseconds in a training loop, nearly all of it for copying NumPy's 624 words one by one,
    which nobody has touched in most runs. So they are copied as raw memory to see that they stand where they stood.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._words = b""
        self._full: dict[str, Any] | None = None

    def take(self) -> None:
        """Remember this moment."""
        words = self._numpy_words()
        if self._full is None or not words or words != self._words or self._full["numpy"][3]:
            self._full = rng_state(self.device)  # a cached Gaussian may be used up without moving the words
        else:
            self._full["python"] = random.getstate()
            self._full |= device_rng_state(self.device)
        self._words = words

    def restore(self) -> None:
        """Back to the last `take`."""
        assert self._full is not None, "restore() before take()"
        set_rng_state(self._full, self.device)

    @staticmethod
    def _numpy_words() -> bytes:
        """The Mersenne twister's words and its position; nothing where another generator has been put in its place."""
        generator = np.random.get_bit_generator()
        if type(generator) is not np.random.MT19937:
            return b""
        return ctypes.string_at(generator.ctypes.state_address, 625 * 4)  # uint32 key[624]; int pos


class RestorePoint:
    """The start of a step: random generators and module buffers (BatchNorm's statistics and the like).

    Parameters and optimizer state are not in it: nothing before the commit touches them.
    """

    def __init__(self, model: nn.Module, device: torch.device):
        self.device = device
        found = [(m, name) for m in model.modules() for name, b in m._buffers.items() if b is not None]
        self._places = [(m._buffers, name) for m, name in found]
        # BatchNorm's kernels write its statistics without counting up their version: only what is no part of the
        # state (rotary tables, masks) may be judged by it.
        self._constant = [name in m._non_persistent_buffers_set for m, name in found]
        self._buffers: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._generators = Generators(device)

    def take(self) -> None:
        """Remember this moment. Buffers outside the state dict are copied again only where their version has moved."""
        self._generators.take()
        buffers = [owner[name] for owner, name in self._places]
        same = len(self._buffers) == len(buffers) and all(a is b for a, b in zip(self._buffers, buffers, strict=True))
        if not same:
            self._copies = [b.detach().clone() for b in buffers]
        else:
            known = zip(buffers, self._copies, self._versions, self._constant, strict=True)
            moved = [
                (copy, buffer)
                for buffer, copy, version, constant in known
                if not constant or buffer._version != version
            ]
            if moved:
                with torch.no_grad():
                    torch._foreach_copy_(*map(list, zip(*moved, strict=True)))
        self._buffers, self._versions = buffers, [b._version for b in buffers]

    @torch.no_grad()
    def restore(self) -> None:
        """Back to the moment of the last `take`."""
        self._generators.restore()
        self.restore_buffers()

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """The buffers alone, for a step that is left out for good."""
        for (owner, name), buffer, copy in zip(self._places, self._buffers, self._copies, strict=True):
            owner[name] = buffer
            buffer.copy_(copy)
