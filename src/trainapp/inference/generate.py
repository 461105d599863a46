"""`mode=generate`: continues prompts, and writes one JSON line per prompt, in order."""

import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.config.schema import Generate
from trainapp.data.batch import MicroBatch, ranges
from trainapp.errors import UserError
from trainapp.inference.decoding import continue_by_position, continue_by_transformers
from trainapp.inference.rows import Row, write_rows
from trainapp.models.inspect import is_of_transformers, positions_of
from trainapp.training.session import Session

MOST_SHOWN = 16  # prompts shown on the terminal


def generate(session: Session) -> None:
    """Continue the prompts, resuming after an error or an earlier process, and print them.

    Raises UserError for prompts that cannot be continued, and for models that do not predict next tokens.
    """
    # What is continued, until which tokens.
    model: Any = session.strategy.model
    settings = session.config.generate
    data = session.batches.dataset
    end_tokens = tokens_that_end_text(settings, data, model)
    prompts = [encode_prompt(data, prompt, number) for number, prompt in enumerate(settings.prompts)]
    _require_room(prompts, settings.max_new_tokens, context_length(model))

    # By which of the two ways.
    if is_of_transformers(model) and model.can_generate():
        continue_prompts = continue_by_transformers
    else:
        output = getattr(session.task, "output", None)
        continue_prompts = functools.partial(continue_by_position, output=output)

    def fetch_batches(written: int) -> Iterator[MicroBatch]:
        for start, end in ranges(written, len(prompts), session.sizes.evaluation.size):
            slice_samples = functools.partial(_build_batch, prompts, settings.max_new_tokens, start)
            is_last = end == len(prompts)
            yield MicroBatch(slice_samples(0, end - start), is_last, True, range(start, end), slice_samples)

    def compute_rows(micro: MicroBatch) -> list[Row]:
        numbers = micro.data["numbers"].tolist()
        batch_prompts = {number: prompts[number] for number in numbers}
        texts = continue_prompts(model, batch_prompts, settings, end_tokens, session.state.device)
        rows = []
        for number, tokens in zip(numbers, texts, strict=True):
            rows.append(_row(data, settings.prompts[number], tokens, end_tokens))
        return rows

    path = write_rows(session, "generations", fetch_batches, compute_rows)
    if path is not None:
        _print_rows(path, len(prompts))


def tokens_that_end_text(settings: Generate, data: Any, model: nn.Module) -> frozenset[int]:
    """Return the tokens that end a text: as set, otherwise by the data's `end_of_text`, or by a Transformers model."""
    tokens: Any = settings.end_of_text
    if tokens == "auto":
        tokens = getattr(data, "end_of_text", None)
        if tokens is None and is_of_transformers(model):
            tokens = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if tokens is None:
        return frozenset()
    if not isinstance(tokens, (list, tuple)):
        tokens = [tokens]
    return frozenset(tokens)


def encode_prompt(data: Any, prompt: str | Sequence[int], number: int) -> list[int]:
    """Return the tokens of a prompt. Raises UserError for a prompt without tokens.

    Args:
        data: encodes a text by its `encode`.
        prompt: a text, or tokens.
        number: the prompt's index, for messages.
    """
    setting = f"generate.prompts[{number}]={prompt!r}"
    if not isinstance(prompt, str):
        tokens = list(prompt)
    elif has_text(data):
        tokens = list(data.encode(prompt))
    else:
        raise UserError(f"{setting}: the data has no text (no `encode` and `decode`); give tokens, as in [[1,2,3]]")
    if not tokens:
        raise UserError(f"{setting}: has no token to continue")
    vocab_size = getattr(data, "spec", {}).get("vocab_size")
    if vocab_size is not None and max(tokens) >= vocab_size:
        raise UserError(f"{setting}: token {max(tokens)} is not one of the vocabulary's {vocab_size}, from 0")
    return tokens


def has_text(data: Any) -> bool:
    """Return whether the data set has `encode(text)` and `decode(tokens)`."""
    return all(callable(getattr(data, name, None)) for name in ("encode", "decode"))


def context_length(model: Any) -> int | None:
    """Return the length of the longest sequence that the model reads, if it declares one."""
    if is_of_transformers(model):
        return positions_of(model.config)
    length = getattr(model, "context_length", None)
    return length if isinstance(length, int) else None


def _require_room(prompts: Sequence[Sequence[int]], max_new_tokens: int, context: int | None) -> None:
    """Raise UserError for a prompt that is too long to be continued within the model's context; None: no limit."""
    if context is None:
        return
    for number, prompt in enumerate(prompts):
        room = context + 1 - len(prompt)  # the last token is not read
        if room < max_new_tokens:
            advice = "use a shorter prompt"
            if room > 0:
                advice = f"use at most {room}, or a shorter prompt"
            raise UserError(
                f"generate.max_new_tokens={max_new_tokens}: generate.prompts[{number}] has {len(prompt)} tokens, and "
                f"the model reads {context}; {advice}"
            )


def _build_batch(
    prompts: Sequence[Sequence[int]], max_new_tokens: int, first: int, start: int, end: int
) -> dict[str, Tensor]:
    """Return a batch of prompts: their numbers, int64 [B], and zeros in the shape of the texts, [B, T], which determine
    the bucket of sizes.

    Args:
        prompts: of the run.
        max_new_tokens: per prompt.
        first: number of the first prompt of the fetched batch.
        start: of the prompts in the fetched batch.
        end: likewise, exclusive.
    """
    numbers = range(first + start, first + end)
    longest = max(len(prompts[number]) for number in numbers) + max_new_tokens
    return {"numbers": torch.tensor(numbers), "room": torch.zeros(len(numbers), longest)}


def _row(data: Any, prompt: Any, tokens: list[int], end_tokens: frozenset[int]) -> Row:
    """Return a prompt's row. Its text does not include the token that ends it.

    Args:
        data: decodes the tokens, if it has text.
        prompt: as in the settings.
        tokens: the new ones.
        end_tokens: tokens that end a text.
    """
    has_ended = bool(tokens) and tokens[-1] in end_tokens
    row: Row = {"prompt": prompt}
    if has_text(data):
        shown_tokens = tokens[:-1] if has_ended else tokens
        row["text"] = str(data.decode(shown_tokens))
    row["tokens"] = tokens
    row["ended"] = "end_of_text" if has_ended else "max_new_tokens"
    return row


def _print_rows(path: Path, prompts: int) -> None:
    """Print the first texts of a file of rows.

    Args:
        path: of the file.
        prompts: the number of all prompts.
    """
    with open(path) as file:
        for line in itertools.islice(file, MOST_SHOWN):
            row = json.loads(line)
            if "text" in row:
                text = f"{row['prompt']}{row['text']}"
            else:
                text = f"{row['prompt']} {row['tokens']}"
            print(printable(text), flush=True)
    if prompts > MOST_SHOWN:
        print(f"... {prompts - MOST_SHOWN} more in {path}")


def printable(text: str) -> str:
    """Return the text without control characters, which a terminal would interpret."""
    characters = []
    for character in text:
        is_harmless = character.isprintable() or character in "\n\t"
        characters.append(character if is_harmless else "\ufffd")
    return "".join(characters)
