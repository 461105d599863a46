"""A model in the manner of nanoGPT: its sizes stand in a configuration with defaults of its own."""

from dataclasses import dataclass

from torch import nn


@dataclass
class GPTConfig:
    """As nanoGPT's, with its vocabulary: GPT-2's 50,257 tokens, padded to a multiple of 64."""

    vocab_size: int = 50304
    n_embd: int = 8
    n_layer: int = 1


class Head(nn.Linear):
    """Logits of the tokens."""

    def __init__(self, width: int, vocab_size: int = 50304):
        super().__init__(width, vocab_size, bias=False)


class GPT(nn.Module):
    """Logits [B, T, vocab_size] of tokens [B, T]. head: builds the last layer from the width."""

    def __init__(self, config: GPTConfig, head=None):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(nn.Linear(config.n_embd, config.n_embd) for _ in range(config.n_layer))
        self.head = Head(config.n_embd, config.vocab_size) if head is None else head(config.n_embd)

    def forward(self, tokens):
        features = self.wte(tokens)
        for block in self.blocks:
            features = features + block(features).relu()
        return self.head(features)


class Sized(nn.Module):
    """Logits of images, with the number of classes as the model's own parameter and, unused, in its parts."""

    def __init__(self, num_classes: int = 3, image_shape=None, parts=()):
        super().__init__()
        self.parts = parts
        self.head = nn.LazyLinear(num_classes)

    def forward(self, images):
        return self.head(images.flatten(1))


class Part:
    """A part with a number of classes."""

    def __init__(self, num_classes: int = 3):
        self.num_classes = num_classes


def mean_logits(model, batch):
    """A task of one's own, for which any number of logits does. Returns (sum, count, sums of metrics)."""
    logits = model(batch["inputs"])
    return logits.square().flatten(1).mean(1).sum(), len(logits), {}
