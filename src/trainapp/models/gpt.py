"""A decoder-only transformer for next-token prediction.

Pre-norm blocks with RMSNorm (arXiv:1910.07467), rotary positions (arXiv:2104.09864), SwiGLU
(arXiv:2002.05202) and grouped-query attention (arXiv:2305.13245).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainapp.errors import UserError
from trainapp.optim.precision import at_least_fp32
from trainapp.validation import Bool, Fraction, PositiveFloat, PositiveInt

INIT_STD = 0.02  # with unit-normal tied embeddings, denormals make the backward on a CPU 50 times slower


class LayerCache:
    """One layer's cache, [B, kv_heads, capacity, head_size], of which `length` positions are filled."""

    def __init__(self, capacity: int):
        self.capacity, self.length = capacity, 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extended(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append [B, kv_heads, T, head_size]. Returns all keys and values so far, [B, kv_heads, length, head_size]."""
        end = self.length + key.shape[2]
        if self._keys is None or self._values is None:
            # Allocated once: growing would need memory for both the old and the new tensor.
            self._keys = key.new_empty(*key.shape[:2], self.capacity, key.shape[3])
            self._values = value.new_empty(*value.shape[:2], self.capacity, value.shape[3])
        self._keys[:, :, self.length : end] = key
        self._values[:, :, self.length : end] = value
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]


class Rotary(nn.Module):
    """Rotates the two halves of each head by angles that grow with the position, in float32.

    Scores of rotated queries and keys depend only on the distance between positions. `model.to(bfloat16)` rounds the
    tables, in which many neighbouring positions would then be equal: the next forward recomputes them.
    """

    def __init__(self, head_size: int, context_length: int, base: float):
        super().__init__()
        self.head_size, self.base = head_size, base
        shape = (context_length, head_size // 2)
        self.register_buffer("cos", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("sin", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.init_tables()

    def init_tables(self) -> None:
        # float64, which not every device supports: float32 angles are off by up to 5e-4 at position 10,000
        steps = torch.arange(0, self.head_size, 2, dtype=torch.float64, device="cpu")
        positions = torch.arange(len(self.cos), dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, self.base ** (-steps / self.head_size))
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """Rotate [B, heads, T, head_size] at positions start to start + T - 1. Returns the same shape and dtype."""
        if self.cos.dtype is not torch.float32:
            with torch.inference_mode(False):
                self.float().init_tables()
        end = start + x.shape[-2]
        cos, sin = self.cos[start:end], self.sin[start:end]
        first, second = at_least_fp32(x).chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _native_gqa(query: Tensor) -> bool:
    """Whether the fused kernels read shared keys and values without copies.

    On CUDA only flash attention does, and it has no float32: there `enable_gqa` would fall back to a kernel
    that stores all T x T scores, which is far more than copies of K and V.
    """
    return query.device.type == "cpu" or query.dtype in (torch.float16, torch.bfloat16)


class Attention(nn.Module):
    """Causal self-attention, [B, T, width] to the same shape; `heads` share `kv_heads` keys and values.

    With a cache, the T positions follow the cached ones and are appended to it.
    """

    def __init__(self, width: int, heads: int, kv_heads: int, dropout: float, rotary: Rotary):
        super().__init__()
        self.heads, self.kv_heads, self.head_size = heads, kv_heads, width // heads
        self.dropout = dropout
        self.rotary = rotary
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head_size, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        batch, length, width = x.shape
        projected = self.qkv(x).view(batch, length, -1, self.head_size).transpose(1, 2)
        query, key, value = projected.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        start = 0 if cache is None else cache.length
        query, key = self.rotary(query, start), self.rotary(key, start)
        if cache is not None:
            key, value = cache.extended(key, value)
        mask = None
        if start and length > 1:  # position start + i sees positions up to its own; `is_causal` aligns upper left
            mask = torch.ones(length, start + length, dtype=torch.bool, device=x.device).tril(start)
        grouped = self.kv_heads != self.heads
        if grouped and not _native_gqa(query):
            group = self.heads // self.kv_heads
            key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
            grouped = False
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=start == 0,
            enable_gqa=grouped,
        )
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))


class SwiGLU(nn.Module):
    """A gated feed-forward layer, [B, T, width] to the same shape."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and feed-forward, each with a norm before it and a residual connection around it. Also ViT's."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, width: int, dropout: float, norm: Any = nn.RMSNorm):
        super().__init__()
        self.attention_norm = norm(width, eps=1e-6)
        self.attention = attention
        self.mlp_norm = norm(width, eps=1e-6)
        self.mlp = mlp
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *cache: LayerCache) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), *cache))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Maps token ids, int64 [B, T], to next-token logits, [B, T, vocab_size].

    context_length: the maximum sequence length; T may be less.
    kv_heads: keys and values that the heads share in groups; None gives every head its own.
    mlp_ratio: hidden features of SwiGLU over width, rounded to a multiple of 32. The default, 8/3, has the
    parameters of a plain feed-forward layer of ratio 4.
    dropout: dropout of attention weights, of each branch before it is added, and of the embeddings.
    tie_embeddings: whether the output layer shares the embedding's weights.
    Raises ValueError for sizes that do not divide evenly, and for more tokens than context_length.
    """

    def __init__(
        self,
        vocab_size: PositiveInt,
        context_length: PositiveInt,
        depth: PositiveInt = 4,
        width: PositiveInt = 128,
        heads: PositiveInt = 4,
        kv_heads: PositiveInt | None = None,
        mlp_ratio: PositiveFloat = 8 / 3,
        dropout: Fraction = 0.0,
        tie_embeddings: Bool = True,
        rotary_base: PositiveFloat = 10000.0,
    ):
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if width % heads:
            raise ValueError(f"model.width={width} must be divisible by model.heads={heads}")
        if heads % kv_heads:
            raise ValueError(f"model.heads={heads} must be divisible by model.kv_heads={kv_heads}")
        if width // heads % 2:
            raise ValueError(
                f"model.width={width} over model.heads={heads} gives heads of size {width // heads}; rotary "
                "positions rotate pairs and need an even size"
            )
        self.context_length, self.tie_embeddings = context_length, tie_embeddings
        hidden = 32 * max(1, round(mlp_ratio * width / 32))

        self.embedding = nn.Embedding(vocab_size, width)
        self.dropout = nn.Dropout(dropout)
        # shared, so that the tables exist once; a submodule rather than an argument of the blocks, because FSDP's mixed
        # precision casts the inputs of a block
        self.rotary = Rotary(width // heads, context_length, rotary_base)
        self.layers = nn.ModuleList(
            Block(Attention(width, heads, kv_heads, dropout, self.rotary), SwiGLU(width, hidden), width, dropout)
            for _ in range(depth)
        )
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Ties the embeddings, reinitialises every parameter and fills the rotary tables.

        Standard deviation 0.02, and 0.02 / sqrt(2 * depth) for the layers that write to the residual stream
        (GPT-2), so that its variance does not grow with depth.
        """
        if self.tie_embeddings:
            self.head.weight = self.embedding.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)
            elif isinstance(module, nn.RMSNorm):
                module.reset_parameters()
        for layer in self.layers:
            for projection in (layer.attention.output, layer.mlp.down):
                nn.init.normal_(projection.weight, std=INIT_STD / math.sqrt(2 * len(self.layers)))
        self.rotary.init_tables()

    def blocks(self) -> list[nn.Module]:
        """The transformer blocks, first to last."""
        return list(self.layers)

    def new_cache(self, length: int) -> list[LayerCache]:
        """An empty cache of keys and values for up to `length` tokens."""
        return [LayerCache(length) for _ in self.layers]

    def features(self, inputs: Tensor, cache: list[LayerCache] | None = None) -> Tensor:
        """The features [B, T, width] that `head` turns into logits: for a loss that computes them in chunks.

        cache: see `forward`.
        """
        length = inputs.shape[1] + (0 if cache is None else cache[0].length)
        if length > self.context_length:
            raise UserError(
                f"model.context_length={self.context_length}: the batch has sequences of {length} tokens; raise it, or "
                "lower data.context_length"
            )
        x = self.dropout(self.embedding(inputs))
        for number, layer in enumerate(self.layers):
            x = layer(x) if cache is None else layer(x, cache[number])
        return self.norm(x)

    def forward(self, inputs: Tensor, cache: list[LayerCache] | None = None) -> Tensor:
        """cache: from `new_cache`, with the preceding tokens; these are appended."""
        return self.head(self.features(inputs, cache))
