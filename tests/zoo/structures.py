"""Architectures: sequences, experts, complex weights, hooks, recomputation, second derivatives."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(16, 8), nn.LSTM(8, 16, 2, True, True, 0.1), nn.Linear(16, 4)

    def forward(self, tokens):
        lengths = (tokens != 0).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(tokens), lengths, True, enforce_sorted=False)
        return self.head(self.lstm(packed)[1][0][-1])


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 4)
        self.register_buffer("positions", torch.randn(12, 16), persistent=False)

    def forward(self, tokens):
        padding = tokens == 0
        encoded = self.encoder(self.embed(tokens) + self.positions, src_key_padding_mask=padding)
        return self.head(encoded.masked_fill(padding[..., None], 0).sum(1) / (~padding).sum(1, keepdim=True))


class TiedLanguageModel(nn.Module):
    """The output layer is the embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(16, 16), nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


class Recomputing(nn.Module):
    """Activation checkpointing inside the model, around dropout and a counted buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, inputs):
        for part in (self.first, self.second):
            inputs = inputs + checkpoint(part, inputs, use_reentrant=False)
        return self.head(inputs)


class Complex(nn.Module):
    """Complex weights on the Fourier transform of the inputs."""

    def __init__(self):
        super().__init__()
        self.filters = nn.Parameter(torch.randn(3, 5, dtype=torch.complex64))
        self.head = nn.Linear(24, 4)

    def forward(self, inputs):
        spectrum = torch.fft.rfft(inputs)
        return self.head(torch.fft.irfft(spectrum[:, None] * self.filters, n=8).flatten(1).tanh())


class Hooked(nn.Module):
    """Forward hooks collect features for the head; a tensor hook scales a gradient."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.head = nn.Linear(16, 4)
        self.collected = []
        for layer in (self.layers[1], self.layers[3]):
            layer.register_forward_hook(lambda module, args, output: self.collected.append(output))

    def forward(self, inputs):
        self.collected.clear()
        self.layers(inputs)
        features = torch.cat(self.collected, 1)
        self.collected.clear()
        if features.requires_grad:
            features.register_hook(lambda gradient: 0.5 * gradient)
        return self.head(features)


class GradientPenalty(nn.Module):
    """The loss holds a gradient: second derivatives in backward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Softplus(), nn.Linear(16, 1))

    def forward(self, inputs):
        with torch.enable_grad():
            inputs = inputs.requires_grad_()
            energy = self.layers(inputs)
            (slope,) = torch.autograd.grad(energy.sum(), inputs, create_graph=True)
        return energy.squeeze(1).square() + (slope.norm(dim=1) - 1).square()


class NestedLists(nn.Module):
    """Unused branches: some parameters never get a gradient."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleDict({"used": nn.Linear(8, 4), "unused": nn.Linear(8, 4)})

    def forward(self, inputs):
        return self.branches["used"](inputs)
