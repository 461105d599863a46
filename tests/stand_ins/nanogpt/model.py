"""In the shape of nanoGPT: a model that computes its own loss, the last position alone without targets."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class GPTConfig:
    block_size: int = 32
    vocab_size: int = 65
    n_layer: int = 1
    n_head: int = 2
    n_embd: int = 32
    dropout: float = 0.0
    bias: bool = False


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.n_embd
        self.embed, self.positions = nn.Embedding(config.vocab_size, width), nn.Embedding(config.block_size, width)
        layer = nn.TransformerEncoderLayer(width, config.n_head, 2 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, config.n_layer, enable_nested_tensor=False)
        self.head = nn.Linear(width, config.vocab_size, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, targets=None):
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        inputs = self.embed(tokens) + self.positions(torch.arange(length))
        logits = self.head(self.layers(inputs, mask, is_causal=True))
        if targets is None:
            return logits[:, -1:], None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay, rate, betas, device_type):
        parameters = list(self.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=rate, betas=betas)
