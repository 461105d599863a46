"""Architectures: sequences, images, experts, adapters, generated and complex weights, hooks, recomputation."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from trainapp.models.vit import ViT


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


class VisionTransformer(ViT):
    def __init__(self):
        super().__init__((1, 8, 8), 4, patch_size=4, depth=2, width=16, heads=2, dropout=0.1)


class Seq2Seq(nn.Module):
    """Reads the sequence, then writes it again; the coin of teacher forcing is torch's."""

    def __init__(self):
        super().__init__()
        self.embed, self.encoder = nn.Embedding(16, 8), nn.GRU(8, 16, batch_first=True)
        self.decoder, self.out = nn.GRUCell(8, 16), nn.Linear(16, 16)

    def forward(self, tokens):
        hidden, losses = self.encoder(self.embed(tokens))[1][0], 0
        given = torch.zeros_like(tokens[:, 0])
        for token in tokens.unbind(1):
            hidden = self.decoder(self.embed(given), hidden)
            logits = self.out(hidden)
            losses = losses + F.cross_entropy(logits, token, reduction="none")
            given = token if self.training and torch.rand(()) < 0.5 else logits.argmax(1)
        return losses / tokens.shape[1]


class TiedLanguageModel(nn.Module):
    """The output layer is the embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(16, 16), nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(4, 8, 3, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2, 2))
        self.up = nn.ConvTranspose2d(8, 1, 2, 2)

    def forward(self, images):
        half = self.down(images)
        rebuilt = self.up(torch.cat([half, self.deep(half)], 1))
        return (rebuilt - images).square().mean((1, 2, 3))


class Siamese(nn.Module):
    """One network sees each sample twice, and its neighbour once."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, inputs):
        one, two, other = self.shared(inputs), self.shared(inputs), self.shared(inputs.roll(1, 0))
        return F.triplet_margin_loss(one, two, other, reduction="none")


class Experts(nn.Module):
    """The two best of four experts; a loss balances their load, which a buffer counts."""

    def __init__(self, experts=4):
        super().__init__()
        self.router = nn.Linear(8, experts)
        self.experts = nn.ModuleList(nn.Linear(8, 4) for _ in range(experts))
        self.register_buffer("load", torch.zeros(experts))

    def forward(self, inputs):
        shares = self.router(inputs).softmax(1)
        best, chosen = shares.topk(2, 1)
        logits = torch.zeros(len(inputs), 4)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            logits = logits.index_add(0, rows, best[rows, place, None] * expert(inputs[rows]))
        used = F.one_hot(chosen, len(self.experts)).sum((0, 1)).float()
        if self.training:
            self.load += used
        return logits, (used / used.sum() * shares.mean(0)).sum() * len(self.experts)


class Adapted(nn.Module):
    """LoRA: the layers are frozen, low-rank corrections are trained."""

    def __init__(self):
        super().__init__()
        self.base = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).requires_grad_(False)
        self.down, self.up = nn.Parameter(0.1 * torch.randn(2, 8)), nn.Parameter(torch.zeros(4, 2))

    def forward(self, inputs):
        return self.base(inputs) + inputs @ self.down.T @ self.up.T


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(context, inputs):
        return inputs.view_as(inputs)

    @staticmethod
    def backward(context, gradient):
        return -gradient


class Adversarial(nn.Module):
    """Generator and discriminator in one loss: the gradient is reversed between them."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, inputs):
        fake = self.generator(torch.randn(len(inputs), 4))
        real, made = self.discriminator(inputs), self.discriminator(Reverse.apply(fake))
        return (F.softplus(-real) + F.softplus(made)).squeeze(1)


class Hypernetwork(nn.Module):
    """One network makes the weights of another."""

    def __init__(self):
        super().__init__()
        self.code, self.maker = nn.Parameter(torch.randn(4)), nn.Linear(4, 4 * 8 + 4)
        self.made = nn.Linear(8, 4).requires_grad_(False)

    def forward(self, inputs):
        values = self.maker(self.code)
        return functional_call(self.made, {"weight": values[:32].reshape(4, 8), "bias": values[32:]}, (inputs,))


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


class TwoTasks(nn.Module):
    """Two heads with learned uncertainties."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.classes, self.rebuild = nn.Linear(16, 4), nn.Linear(16, 8)
        self.log_variances = nn.Parameter(torch.zeros(2))

    def forward(self, inputs):
        features = self.trunk(inputs)
        return self.classes(features), self.rebuild(features), self.log_variances


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
