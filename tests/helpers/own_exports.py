"""Models whose state dict is not that of their parameters, as those that keep an old layout."""

import torch
from torch import Tensor, nn


class Renamed(nn.Linear):
    """Other names."""

    def __init__(self) -> None:
        super().__init__(64, 10)
        self.register_state_dict_post_hook(self._renamed)
        self.register_load_state_dict_pre_hook(self._named)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.flatten(1))

    @staticmethod
    def _renamed(module, state, prefix, _):
        for name in ("weight", "bias"):
            state[f"{prefix}old_{name}"] = state.pop(prefix + name)

    @staticmethod
    def _named(module, state, prefix, *_):
        for name in ("weight", "bias"):
            if f"{prefix}old_{name}" in state:
                state[prefix + name] = state.pop(f"{prefix}old_{name}")


class Transposed(Renamed):
    """And the weight in another layout."""

    @staticmethod
    def _renamed(module, state, prefix, metadata):
        Renamed._renamed(module, state, prefix, metadata)
        state[f"{prefix}old_weight"] = state[f"{prefix}old_weight"].T.contiguous()

    @staticmethod
    def _named(module, state, prefix, *others):
        if f"{prefix}old_weight" in state:
            state[f"{prefix}old_weight"] = state[f"{prefix}old_weight"].T
        Renamed._named(module, state, prefix, *others)


class Counting(nn.Module):
    """Its first layer gets its shape from the data; a forward counts in a buffer outside of the state dict."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.inside, self.head = nn.LazyLinear(8), nn.Linear(8, num_classes)
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.calls = 0

    def get_extra_state(self):
        return self.calls

    def set_extra_state(self, state):
        self.calls = state

    def forward(self, inputs):
        """Logits."""
        if self.training:
            self.seen += 1
            self.calls += 1
        return self.head(self.inside(inputs.flatten(1)).relu())
