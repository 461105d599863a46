"""A model of Transformers, and sequences that hold two documents."""

import torch

from trainapp.models.huggingface import build

from .data import Tokens


def llama():
    """Two layers, for 16 tokens."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return build("causal_lm", {"model_type": "llama", "vocab_size": 16, "attention_dropout": 0.1, **sizes})


class PackedTokens(Tokens):
    """What is padding in the others is a document of its own: `position_ids` restart where it begins."""

    def __getitem__(self, index):
        places, length = torch.arange(12), self.lengths[index]
        filled = torch.where(places < length, self.inputs[index], (places + index) % 15 + 1)
        positions = torch.where(places < length, places, places - length)
        return {**super().__getitem__(index), "inputs": filled, "position_ids": positions}
