"""Drawing tokens: temperature, top-k and top-p (Holtzman et al. 2020, arXiv:1904.09751), one generator per prompt."""

import hashlib

import torch
from torch import Tensor

from trainapp.config.schema import Generate
from trainapp.errors import TrainingStopped


class Uniform:
    """Numbers in [0, 1) for one prompt: a function of the seed and the prompt's number alone."""

    def __init__(self, seed: int, number: int):
        digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
        self._generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)

    def __call__(self) -> float:
        return torch.rand((), dtype=torch.float64, generator=self._generator).item()


def draw(logits: Tensor, numbers: Tensor, settings: Generate) -> Tensor:
    """A token for each row, int64 [B].

    logits: float [B, V] on the CPU. numbers: float64 [B], uniform in [0, 1): where in its row's distribution the token
    lies, by falling probability. A row's token depends on that row alone. Raises TrainingStopped for logits of nan.
    """
    if logits.isnan().any():
        raise TrainingStopped("mode=generate: the model's logits are nan; choose an earlier checkpoint")
    if settings.temperature == 0:
        return logits.argmax(-1)
    ordered, tokens = logits.double().sort(dim=-1, descending=True, stable=True)
    probabilities = torch.softmax((ordered / settings.temperature)[:, : settings.top_k], -1)
    if settings.top_p < 1:
        before = probabilities.cumsum(-1) - probabilities  # of likelier tokens: 0 for the first, which stays
        probabilities = probabilities.where(before < settings.top_p, 0.0)
    until = probabilities.cumsum(-1)
    places = (until <= numbers[:, None] * until[:, -1:]).sum(-1, keepdim=True)
    return tokens.gather(-1, places).squeeze(-1)
