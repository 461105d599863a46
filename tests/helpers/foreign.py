"""Models and optimizers as users write them, with state in unusual places."""

from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from writing_models import Base


class Linear(Base):
    """One linear layer; subclasses change something in training that changes the output."""

    def change(self, inputs: Tensor) -> Tensor | float:
        return 0.0


class RegisteredByTheFirstForward(Linear):
    """A buffer that a fresh model does not know of, in a module inside it."""

    def build(self, num_classes: int) -> None:
        self.inner = nn.Module()

    def change(self, inputs: Tensor) -> Tensor:
        if not hasattr(self.inner, "seen"):
            self.inner.register_buffer("seen", torch.zeros(3, dtype=torch.float64))
        self.inner.seen += inputs.mean().double()
        return self.inner.seen.sum().float()


class Counting(Linear):
    """A number in a plain attribute."""

    calls = 0

    def change(self, inputs: Tensor) -> float:
        self.calls += 1
        return 1e-3 * self.calls


class Carrying(Linear):
    """A recurrent state, in a tuple."""

    states: tuple[Tensor, ...] = ()

    def change(self, inputs: Tensor) -> Tensor | float:
        before = self.states
        self.states = (self.linear(inputs).detach().mean(0), inputs.mean())
        return 0.1 * before[0] * before[1] if before else 0.0


class Expanded(Linear):
    """A buffer whose elements share memory."""

    def build(self, num_classes: int) -> None:
        self.register_buffer("scale", torch.full((1,), 0.5).expand(8))

    def change(self, inputs: Tensor) -> Tensor:
        return self.scale.sum()


class SparseBuffers(Linear):
    """The edges of a graph, and one with a weight that every forward changes."""

    def build(self, num_classes: int) -> None:
        self.register_buffer("edges", torch.eye(64).to_sparse_csr())
        self.register_buffer("weighted", torch.eye(64).to_sparse())

    def change(self, inputs: Tensor) -> Tensor:
        self.weighted = self.weighted * 0.9
        return (self.edges @ (self.weighted @ inputs.T)).sum()


class OwnEntries(Linear):
    """A tensor and a number of its own in the state dict, with the methods that torch asks for."""

    def build(self, num_classes: int) -> None:
        self.queue, self.calls = torch.zeros(4), 0

    def change(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        self.queue = torch.cat([self.queue[1:], inputs.mean().reshape(1)])
        return self.queue.sum() * self.calls

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "queue"] = self.queue
        destination[prefix + "calls"] = self.calls

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.queue, self.calls = state.pop(prefix + "queue").clone(), state.pop(prefix + "calls")
        super()._load_from_state_dict(state, prefix, *rest)


class NonPersistent(Linear):
    """A buffer outside of the state dict that every forward changes."""

    def build(self, num_classes: int) -> None:
        self.register_buffer("mean", torch.zeros(64), persistent=False)
        self.register_buffer("constant", torch.ones(64), persistent=False)

    def change(self, inputs: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(inputs.mean(0), alpha=0.1)
        return (self.mean * self.constant)[20:30]


class Viewed(Linear):
    """Its state dict has a view of a parameter under another name."""

    def build(self, num_classes: int) -> None:
        self.register_state_dict_post_hook(self._add_view)

    @staticmethod
    def _add_view(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[prefix + "first_row"] = state[prefix + "linear.weight"].detach()[0]


class Unused(Linear):
    """A layer that gets no gradient, and a result that a forward leaves for the loss."""

    def build(self, num_classes: int) -> None:
        self.unused = nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        self.left = super().forward(inputs)
        self.parts = [{"logits": self.left}, (self.left.detach(), 1)]
        return self.left


class OwnProtocol(torch.optim.SGD):
    """State beside `state` and `param_groups`, in a state_dict of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rounds": 3}


class PlainState(torch.optim.Optimizer):
    """Momentum whose state is not made of tensors alone, nor kept for each parameter alone."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum, "rounds": 0, "factors": np.ones(3)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Every value of the state enters the update."""
        shared = self.state.setdefault("shared", {"norms": []})
        for group in self.param_groups:
            group["rounds"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {"step": 0, "late": None, "last": [], "inner": {"sign": 1.0}, "seen": Counter()}
                state["step"] += 1
                if state["step"] == 3:  # allocated late
                    state["late"] = torch.zeros_like(parameter)
                    state["inner"]["square"] = torch.ones(3)
                if state["late"] is not None:
                    state["late"].mul_(group["momentum"]).add_(parameter.grad)
                    state["inner"]["square"] += 1
                state["last"] = [*state["last"][-2:], float(parameter.grad.sum())]
                state["inner"]["sign"] = -state["inner"]["sign"]
                shared["norms"] = [*shared["norms"][-3:], sum(state["last"])]
                state["seen"][len(state["last"])] += 1
                rate = group["lr"] * float(group["factors"][2]) / (state["seen"][3] + state["step"] + group["rounds"])
                parameter.sub_(parameter.grad, alpha=rate)
                if state["late"] is not None:
                    parameter.sub_(state["late"], alpha=rate * float(state["inner"]["square"][0]))
                parameter.add_(1e-4 * state["inner"]["sign"] + 1e-5 * sum(shared["norms"]))


class ObjectState(PlainState):
    """A state that no checkpoint can hold."""

    def step(self, closure: Any = None) -> None:
        """As before, and an object."""
        super().step(closure)
        for group in self.param_groups:
            self.state[group["params"][0]]["object"] = object()


class Replacing(Linear):
    """A forward that puts a new parameter in the place of the one that the optimizer trains, after the first step."""

    calls = 0

    def change(self, inputs: Tensor) -> float:
        self.calls += 1
        if self.calls > 1:
            self.linear.weight = nn.Parameter(self.linear.weight.detach().clone())
        return 0.0


class LateMomentum(torch.optim.Optimizer):
    """Counts its steps in a plain number and allocates its momentum in the third."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Plain steps, then momentum, at a rate that falls with the count."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                change = parameter.grad
                if state["step"] >= 3:
                    change = state.setdefault("momentum", torch.zeros_like(parameter)).mul_(0.9).add_(change)
                parameter.sub_(change, alpha=group["lr"] / state["step"])


class ListsByDefault(torch.optim.NAdam):
    """With kernels over lists of tensors, as torch's optimizers without fused kernels have them on a GPU."""

    def __init__(self, params, lr: float = 2e-3, foreach: bool = True):
        super().__init__(params, lr=lr, foreach=foreach)
