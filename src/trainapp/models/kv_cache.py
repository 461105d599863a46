"""Keys and values of the tokens so far: a new token is then a forward of one position instead of all."""

import torch
from torch import Tensor


class LayerCache:
    """Of one layer: room for `capacity` positions, [B, kv_heads, capacity, head_size], of which `length` are filled."""

    def __init__(self, capacity: int):
        self.capacity, self.length = capacity, 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extended(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add [B, kv_heads, T, head_size]. Returns all keys and values so far, [B, kv_heads, length, head_size].

        Raises ValueError where there is no room for them.
        """
        end = self.length + key.shape[2]
        if end > self.capacity:
            raise ValueError(f"the cache has room for {self.capacity} tokens, and {end} were given")
        if self._keys is None or self._values is None:
            # At once: to grow it would need memory for both the old and the new.
            self._keys = key.new_empty(*key.shape[:2], self.capacity, key.shape[3])
            self._values = value.new_empty(*value.shape[:2], self.capacity, value.shape[3])
        self._keys[:, :, self.length : end] = key
        self._values[:, :, self.length : end] = value
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]


class KeyValueCache:
    """Of all layers of a model."""

    def __init__(self, layers: int, capacity: int):
        self.layers = [LayerCache(capacity) for _ in range(layers)]

    @property
    def length(self) -> int:
        """How many tokens it holds."""
        return self.layers[0].length


def lower_right_causal(query: Tensor, start: int) -> Tensor:
    """bool [T, start + T]: position start + i sees positions up to its own. `is_causal` would align it upper left."""
    length = query.shape[-2]
    return torch.ones(length, start + length, dtype=torch.bool, device=query.device).tril(start)
