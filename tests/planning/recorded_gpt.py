"""The GPT and the AdamW whose training steps public memory snapshots of a GPU have recorded, in their own operations.

After github.com/Wedsonlin/assignment2-systems (MIT; commit 87b0864, cs336-basics). See data/README.md.
"""

import math

import torch
from torch import nn


def softmax(x):
    powers = torch.exp(x - torch.max(x, dim=-1, keepdim=True)[0])
    return powers / torch.sum(powers, dim=-1, keepdim=True)


def cross_entropy(logits, targets):
    x = logits - torch.max(logits, dim=-1, keepdim=True)[0]
    negative = -(x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True)))
    return torch.mean(torch.gather(negative, -1, targets.unsqueeze(-1)))


class Linear(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in))

    def forward(self, x):
        return torch.einsum("...i,oi->...o", x, self.weight)


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        dtype, x = x.dtype, x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (self.weight * x).to(dtype)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.output = (Linear(width, width) for _ in range(4))

    def forward(self, x, rotation):
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = self.rotated(q, rotation), self.rotated(k, rotation)
        positions = torch.arange(x.size(1), device=x.device)
        mask = (positions[:, None] >= positions)[None, None]
        scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(q.size(-1))
        weights = softmax(torch.where(mask, scores, float("-inf")))
        attended = torch.einsum("...qk,...kd->...qd", weights, v)
        return self.output(attended.transpose(1, 2).flatten(2).contiguous())

    def rotated(self, x, rotation):
        (x1, x2), (cos, sin) = x.unflatten(-1, (-1, 2)).unbind(-1), rotation.unbind(0)
        return torch.concat((cos * x1 - sin * x2, sin * x1 + cos * x2), dim=-1)


class Block(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.attention, self.ln1, self.ln2 = Attention(width, heads), RMSNorm(width), RMSNorm(width)
        self.w1, self.w2, self.w3 = Linear(width, hidden), Linear(hidden, width), Linear(width, hidden)

    def forward(self, x, rotation):
        x = x + self.attention(self.ln1(x), rotation)
        inner = self.ln2(x)
        gate = self.w1(inner)
        return x + self.w2(gate * torch.sigmoid(gate) * self.w3(inner))


class RecordedGPT(nn.Module):
    def __init__(self, vocabulary, context, width, layers, heads, hidden):
        super().__init__()
        self.embeddings = nn.Parameter(torch.empty(vocabulary, width))
        self.register_buffer("rotation", torch.empty(2, context, width // heads // 2))
        self.layers = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm, self.head = RMSNorm(width), Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embeddings[tokens, :]
        for layer in self.layers:
            x = layer(x, self.rotation)
        return self.head(self.norm(x))


class RecordedAdamW(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                gradient, state = p.grad.data, self.state[p]
                p.data -= 1e-5 * p.data
                first = state.get("m", torch.zeros_like(gradient))
                second = state.get("v", torch.zeros_like(gradient))
                m = 0.9 * first + (0.1 * gradient)
                v = 0.999 * second + (0.001 * torch.square(gradient))
                p.data -= group["lr"] * m / (torch.sqrt(v) + 1e-8)
                state["m"], state["v"] = m, v
