"""Text as the tokens of a run's data, and back."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from trainapp.config.schema import Generate
from trainapp.errors import UserError
from trainapp.models import transformers_models


class Codec:
    """Of a data set with `encode(text)` and `decode(tokens)`; without them, prompts are tokens and there is no text."""

    def __init__(self, data: Any):
        methods = getattr(data, "encode", None), getattr(data, "decode", None)
        self._encode, self._decode = methods if all(map(callable, methods)) else (None, None)
        self._size: int | None = getattr(data, "spec", {}).get("vocab_size")

    def encode(self, prompt: str | Sequence[int], number: int) -> list[int]:
        """The tokens of a prompt. number: its place, for messages. Raises UserError for one that has none."""
        setting = f"generate.prompts[{number}]={prompt!r}"
        if isinstance(prompt, str):
            if self._encode is None:
                raise UserError(
                    f"{setting}: the data has no text (no `encode` and `decode`); give tokens, as in [[1,2,3]]"
                )
            tokens = list(self._encode(prompt))
        else:
            tokens = list(prompt)
        if not tokens:
            raise UserError(f"{setting}: has no token to continue")
        if self._size is not None and max(tokens) >= self._size:
            raise UserError(f"{setting}: token {max(tokens)} is not one of the vocabulary's {self._size}, from 0")
        return tokens

    def decode(self, tokens: Sequence[int]) -> str | None:
        """Their text; None where the data has none."""
        return None if self._decode is None else str(self._decode(list(tokens)))


def ends_of_text(settings: Generate, data: Any, model: nn.Module) -> frozenset[int]:
    """The tokens that end a text: as set, else the data's `end_of_text`, else those of a model of Transformers."""
    if settings.end_of_text != "auto":
        return frozenset() if settings.end_of_text is None else frozenset({settings.end_of_text})
    found = getattr(data, "end_of_text", None)
    if found is None and transformers_models.is_one(model):
        given: Any = model
        found = getattr(getattr(given, "generation_config", None), "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, (list, tuple)) else [found])
