"""A decoder-only transformer for next-token prediction.

Pre-norm blocks with RMSNorm (arXiv:1910.07467), rotary positions (arXiv:2104.09864), SwiGLU
(arXiv:2002.05202) and grouped-query attention (arXiv:2305.13245).

Shapes: B samples of T tokens, each a vector of `width` features. Attention divides them among `heads` of `head_size`.
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
    """The keys and values of one layer for the tokens so far, for generation.

    Two tensors of shape [B, kv_heads, capacity, head_size], of which `length` positions are filled.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append [B, kv_heads, T, head_size]. Returns all keys and values so far, [B, kv_heads, length, head_size]."""
        if self._keys is None or self._values is None:
            # Allocated once: growing would need memory for both the old and the new tensor.
            self._keys = self._allocate_like(key)
            self._values = self._allocate_like(value)
        start = self.length
        end = start + key.shape[2]
        self._keys[:, :, start:end] = key
        self._values[:, :, start:end] = value
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def _allocate_like(self, tensor: Tensor) -> Tensor:
        batch, kv_heads, _, head_size = tensor.shape
        return tensor.new_empty(batch, kv_heads, self.capacity, head_size)


class Rotary(nn.Module):
    """Rotation of the two halves of each head by angles that grow with the position, in float32.

    Scores of rotated queries and keys depend only on the distance between positions. `model.to(bfloat16)` rounds the
    tables, in which many neighbouring positions would then be equal: the next forward recomputes them.
    """

    def __init__(self, head_size: int, context_length: int, base: float):
        super().__init__()
        self.head_size = head_size
        self.base = base
        shape = (context_length, head_size // 2)
        self.register_buffer("cos", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("sin", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.init_tables()

    def init_tables(self) -> None:
        """Fill the tables: cosine and sine of each position's angle for each pair of features."""
        # float64, which not every device supports: float32 angles are off by up to 5e-4 at position 10,000
        pairs = torch.arange(0, self.head_size, 2, dtype=torch.float64, device="cpu")
        positions = torch.arange(len(self.cos), dtype=torch.float64, device="cpu")
        frequencies = self.base ** (-pairs / self.head_size)
        angles = torch.outer(positions, frequencies)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """Rotate [B, heads, T, head_size] at positions start to start + T - 1. Returns the same shape and dtype."""
        # Recompute tables that a cast of the model has rounded.
        if self.cos.dtype is not torch.float32:
            with torch.inference_mode(False):
                self.float()
                self.init_tables()

        # Rotate each pair of features, one from each half, by the angle of its position.
        end = start + x.shape[-2]
        cos = self.cos[start:end]
        sin = self.sin[start:end]
        first, second = at_least_fp32(x).chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return rotated.to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention, [B, T, width] to the same shape; `heads` share `kv_heads` keys and values.

    With a cache, the T positions follow the cached ones and are appended to it.
    """

    def __init__(self, width: int, heads: int, kv_heads: int, dropout: float, rotary: Rotary):
        super().__init__()
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_size = width // heads
        self.dropout = dropout
        self.rotary = rotary
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head_size, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        batch, length, width = x.shape

        # Queries, keys and values of all heads in one product, [B, heads + 2 * kv_heads, T, head_size].
        qkv = self.qkv(x).view(batch, length, -1, self.head_size).transpose(1, 2)
        query, key, value = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)

        # Rotate to the tokens' positions, and put the cached tokens before them.
        start = 0 if cache is None else cache.length  # position of the first token
        query = self.rotary(query, start)
        key = self.rotary(key, start)
        if cache is not None:
            key, value = cache.append(key, value)

        mask = None
        if start > 0 and length > 1:  # position start + i sees positions up to its own; `is_causal` aligns upper left
            mask = torch.ones(length, start + length, dtype=torch.bool, device=x.device).tril(start)

        # Copy shared keys and values for each head where the kernel cannot read them several times.
        is_grouped = self.kv_heads != self.heads
        if is_grouped and not _native_gqa(query, mask):
            group_size = self.heads // self.kv_heads
            key = key.repeat_interleave(group_size, dim=1)
            value = value.repeat_interleave(group_size, dim=1)
            is_grouped = False

        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=start == 0,
            enable_gqa=is_grouped,
        )
        heads_side_by_side = mixed.transpose(1, 2).reshape(batch, length, width)
        return self.output(heads_side_by_side)


def _native_gqa(query: Tensor, mask: Tensor | None) -> bool:
    """Return whether the fused kernels read shared keys and values without copies.

    On CUDA only flash attention does: in 16 bits, without a mask, from Ampere on. Elsewhere `enable_gqa` would fall
    back to a kernel that stores all T x T scores, which is far more than copies of K and V.
    """
    if query.device.type != "cuda":
        return query.device.type == "cpu"
    takes_these = query.dtype in (torch.float16, torch.bfloat16) and mask is None
    return takes_these and torch.cuda.get_device_capability(query.device) >= (8, 0)


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
    """A transformer from token ids, int64 [B, T], to the logits of each next token, [B, T, vocab_size].

    Args:
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
        if kv_heads is None:
            kv_heads = heads
        _require_whole_heads(width, heads, kv_heads)
        self.context_length = context_length
        self.tie_embeddings = tie_embeddings
        multiples_of_32 = max(1, round(mlp_ratio * width / 32))
        hidden = 32 * multiples_of_32

        self.embedding = nn.Embedding(vocab_size, width)
        self.dropout = nn.Dropout(dropout)
        # shared, so that the tables exist once; a submodule rather than an argument of the blocks, because FSDP's mixed
        # precision casts the inputs of a block
        self.rotary = Rotary(width // heads, context_length, rotary_base)
        self.layers = nn.ModuleList()
        for _ in range(depth):
            attention = Attention(width, heads, kv_heads, dropout, self.rotary)
            mlp = SwiGLU(width, hidden)
            self.layers.append(Block(attention, mlp, width, dropout))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Tie the embeddings, reinitialise every parameter and fill the rotary tables.

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

        # Two layers of each block write to the residual stream.
        residual_std = INIT_STD / math.sqrt(2 * len(self.layers))
        for layer in self.layers:
            nn.init.normal_(layer.attention.output.weight, std=residual_std)
            nn.init.normal_(layer.mlp.down.weight, std=residual_std)
        self.rotary.init_tables()

    def blocks(self) -> list[nn.Module]:
        """Return the transformer blocks, first to last."""
        return list(self.layers)

    def new_cache(self, length: int) -> list[LayerCache]:
        """Return an empty cache of keys and values for up to `length` tokens."""
        return [LayerCache(length) for _ in self.layers]

    def features(self, inputs: Tensor, cache: list[LayerCache] | None = None) -> Tensor:
        """Return the features [B, T, width] that `head` turns into logits: for a loss that computes them in chunks.

        Args:
            inputs: see `forward`.
            cache: see `forward`.
        """
        length = inputs.shape[1]
        if cache is not None:
            length += cache[0].length  # the same in all layers
        if length > self.context_length:
            raise UserError(
                f"model.context_length={self.context_length}: the batch has sequences of {length} tokens; raise it, or "
                "lower data.context_length"
            )
        x = self.dropout(self.embedding(inputs))
        for number, layer in enumerate(self.layers):
            if cache is None:
                x = layer(x)
            else:
                x = layer(x, cache[number])
        return self.norm(x)

    def forward(self, inputs: Tensor, cache: list[LayerCache] | None = None) -> Tensor:
        """Return the logits [B, T, vocab_size].

        Args:
            inputs: token ids, int64 [B, T].
            cache: from `new_cache`, with the preceding tokens; these are appended.
        """
        return self.head(self.features(inputs, cache))


def _require_whole_heads(width: int, heads: int, kv_heads: int) -> None:
    """Raise ValueError unless heads divide the width into even sizes, and the shared ones divide the heads."""
    if width % heads:
        raise ValueError(f"model.width={width} must be divisible by model.heads={heads}")
    if heads % kv_heads:
        raise ValueError(f"model.heads={heads} must be divisible by model.kv_heads={kv_heads}")
    head_size = width // heads
    if head_size % 2:
        raise ValueError(
            f"model.width={width} over model.heads={heads} gives heads of size {head_size}; rotary "
            "positions rotate pairs and need an even size"
        )
