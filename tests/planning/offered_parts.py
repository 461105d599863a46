"""Parts of a user's: an optimizer that takes a rate only, and a model, both without a YAML file that lists more."""

import torch
from torch import Tensor, nn


class Plain(torch.optim.Optimizer):
    """Gradient descent with a state of one tensor per parameter."""

    updates_parameters_alone = True

    def __init__(self, params, lr: float, decay: float = 0.9):
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "mean" not in state:
                    state["mean"] = torch.zeros_like(parameter)
                state["mean"].mul_(group["decay"]).add_(parameter.grad)
                parameter.add_(state["mean"], alpha=-group["lr"])


class Net(nn.Module):
    """Two layers, whose blocks can be recomputed."""

    def __init__(self, num_classes: int, width: int = 64, leak: float = 0.0):
        super().__init__()
        self.first = nn.Linear(64, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.LeakyReLU(leak)) for _ in range(2))
        self.head = nn.Linear(width, num_classes)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs.flatten(1))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)
