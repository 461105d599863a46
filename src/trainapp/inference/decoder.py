"""The logits of the next token, from the tokens before it, with a cache of keys and values where the model has one."""

import inspect
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainapp.errors import UserError
from trainapp.models import transformers_models


class Decoder(Protocol):
    """Reads sequences of one batch, some tokens at a time."""

    def __call__(self, tokens: Tensor) -> Tensor:
        """The logits [B, V] of what comes after `tokens`, int64 [B, T], which come after those of earlier calls."""


class Cached:
    """A model with `new_cache(length)` and a forward that takes `cache`."""

    def __init__(self, model: Any, length: int):
        self._model = model
        self._cache = model.new_cache(length)

    def __call__(self, tokens: Tensor) -> Tensor:
        return _last(self._model(tokens, cache=self._cache), tokens)


class CachedByTransformers:
    """A model of Transformers that returns `past_key_values`.

    Rotary embeddings of the kind `longrope` (Phi-3) have other factors beyond a length. What was read before is then
    read again: keys of both kinds in one cache would make a text depend on where its batch began to read.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._past: Any = None
        self._uncached: Uncached | None = None
        self._tokens: Tensor | None = None  # all that was read, where it may have to be read again
        self._borders = _lengths_of_other_factors(model)
        named = inspect.signature(model.forward).parameters
        self._options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in named else {}

    def __call__(self, tokens: Tensor) -> Tensor:
        if self._borders:
            done = 0 if self._tokens is None else self._tokens.shape[1]
            self._tokens = tokens if self._tokens is None else torch.cat((self._tokens, tokens), dim=1)
            if any(done <= border < self._tokens.shape[1] for border in self._borders):
                self._past, tokens = None, self._tokens
        if self._uncached is not None:
            return self._uncached(tokens)
        output = self._model(tokens, past_key_values=self._past, use_cache=True, **self._options)
        self._past = getattr(output, "past_key_values", None)
        if self._past is None:  # it takes a cache and returns none, such as RecurrentGemma, whose modules keep states
            self._uncached = Uncached(self._model)
            return self._uncached(tokens)
        return _last(output.logits, tokens)


class Uncached:
    """Any other model: each token is a forward of all tokens."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._tokens: Tensor | None = None

    def __call__(self, tokens: Tensor) -> Tensor:
        self._tokens = tokens if self._tokens is None else torch.cat((self._tokens, tokens), dim=1)
        output = self._model(self._tokens)
        return _last(getattr(output, "logits", output), self._tokens)


def _lengths_of_other_factors(model: Any) -> set[int]:
    """Up to these many tokens a model has other rotary factors than beyond them."""
    settings = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = [settings, *(own for own in settings.values() if isinstance(own, dict))]  # or one for each kind of layer
    return {own["original_max_position_embeddings"] for own in kinds if own.get("rope_type") == "longrope"}


def decoder_of(model: nn.Module, length: int) -> Decoder:
    """For sequences of at most `length` tokens."""
    named = inspect.signature(model.forward).parameters
    if transformers_models.is_one(model) and {"past_key_values", "use_cache"} <= named.keys():
        return CachedByTransformers(model)
    if callable(getattr(model, "new_cache", None)) and "cache" in named:
        return Cached(model, length)
    return Uncached(model)


def context_of(model: nn.Module) -> int | None:
    """The longest sequence that the model reads, where it says so."""
    if transformers_models.is_one(model):
        given: Any = model
        return transformers_models.positions_of(given.config)
    length = getattr(model, "context_length", None)
    return length if isinstance(length, int) else None


def _last(logits: Any, tokens: Tensor) -> Tensor:
    """Those of the last position, [B, V]. Raises UserError for a model of another kind."""
    if not isinstance(logits, Tensor) or logits.ndim != 3 or len(logits) != len(tokens):
        shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise UserError(
            f"mode=generate: the model returns {shape} for tokens {list(tokens.shape)}, not logits [B, T, vocabulary]; "
            "use a run whose model predicts next tokens"
        )
    return logits[:, -1]
