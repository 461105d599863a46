"""`mode=generate`: continues prompts, and writes one JSON line for each, in their order.

A batch holds prompts of any length without padding: its sequences are read position by position, and where a prompt is
longer than the shortest, its own tokens are read instead of drawn ones. So every model that predicts next tokens can
generate, whether or not it knows masks, and a prompt's logits do not depend on its neighbours.
"""

import functools
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainapp.config.schema import Generate
from trainapp.data.batch import MicroBatch, ranges
from trainapp.errors import UserError
from trainapp.inference.batches import begin, facts_of, output_path, write_in_batches
from trainapp.inference.decoder import Decoder, context_of, decoder_of
from trainapp.inference.drawing import Uniform, draw
from trainapp.inference.lines import opened, require_replaceable
from trainapp.inference.tokens import Codec, ends_of_text
from trainapp.train.losses import classification, has_embeddings
from trainapp.train.run import Run
from trainapp.train.task_attributes import unchecked

log = logging.getLogger(__name__)

SHOWN = 16  # prompts: of more, the terminal shows the first ones


def generate(run: Run) -> None:
    """Continue the prompts, from where an error or an earlier process has left them, and print them.

    Raises UserError for prompts that cannot be continued, and for models that do not predict next tokens.
    """
    begin(run)
    settings, data, model = run.config.generate, run.batches.dataset, run.strategy.model
    task = unchecked(run.task)
    if task is classification or has_embeddings(task):
        what = "predicts classes" if task is classification else "makes embeddings of its inputs"
        raise UserError(
            f"mode=generate with task={run.config.task}: the run's model {what}; use mode=predict, or a run whose "
            "model predicts next tokens"
        )
    codec, ends = Codec(data), ends_of_text(settings, data, model)
    prompts = [codec.encode(prompt, number) for number, prompt in enumerate(settings.prompts)]
    _require_room(prompts, settings.max_new_tokens, context_of(model))

    def rows_of(micro: MicroBatch) -> list[dict[str, Any]]:
        chosen: Sequence[int] = micro.data["numbers"].tolist()
        own = [prompts[number] for number in chosen]
        decoder = decoder_of(model, max(map(len, own)) + settings.max_new_tokens)
        uniforms = [Uniform(settings.seed, number) for number in chosen]
        texts = continued(decoder, own, uniforms, settings, ends, run.state.device)
        return [_row(codec, settings, number, tokens, ends) for number, tokens in zip(chosen, texts, strict=True)]

    path = output_path(run, settings.output, "generations.jsonl")
    facts = facts_of(run.config) | {"generate": _what_decides(run.config.to_dict()["generate"])}
    require_replaceable(path, "generate.output")
    with opened(path, facts, "generate.output") as lines:
        fetched = batches_of(prompts, settings.max_new_tokens, lines.done, run.sizes.evaluation.size, run.state.device)
        write_in_batches(run, fetched, lines, rows_of)
        if not run.stop.agreed:
            lines.publish()
    if not run.stop.agreed:
        _show(path, len(prompts))


def _what_decides(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in ("output", "batch_size")}


def batches_of(
    prompts: Sequence[Sequence[int]], new: int, done: int, size: int, device: torch.device
) -> Iterator[MicroBatch]:
    """The prompts after the first `done`, `size` at a time: their numbers, int64 [B], and zeros, int64 [B, T].

    The zeros have the shape of the texts with `new` tokens, by which sizes are searched.
    """

    def batch(numbers: Sequence[int], start: int, end: int) -> dict[str, Tensor]:
        chosen = list(numbers)[start:end]
        longest = max(len(prompts[number]) for number in chosen) + new
        return {"numbers": torch.tensor(chosen), "room": torch.zeros(len(chosen), longest, dtype=torch.int64)}

    for start, end in ranges(done, len(prompts), size):
        piece = functools.partial(batch, range(start, end))
        yield MicroBatch(piece(0, end - start), end == len(prompts), True, end - start, piece)


def continued(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    uniforms: Sequence[Uniform],
    settings: Generate,
    ends: frozenset[int],
    device: torch.device,
) -> list[list[int]]:
    """The new tokens of each prompt: at most `max_new_tokens`, the last of which may be one that ends a text."""
    texts, finished = [list(prompt) for prompt in prompts], [False] * len(prompts)
    limits = [len(prompt) + settings.max_new_tokens for prompt in prompts]
    position, begun = min(map(len, prompts)), 0
    while not all(finished):
        # Sequences that have ended are read on, for the others' sake: what comes is not kept.
        rows = [text[begun:position] if len(text) >= position else [0] * (position - begun) for text in texts]
        logits = decoder(torch.tensor(rows, device=device))
        draws = [not ended and len(text) == position for text, ended in zip(texts, finished, strict=True)]
        numbers = [uniform() if own else 0.0 for uniform, own in zip(uniforms, draws, strict=True)]
        # Waits for the device once per token: what is drawn decides what is read.
        tokens = draw(logits.float().cpu(), torch.tensor(numbers, dtype=torch.float64), settings).tolist()
        for row, token in enumerate(tokens):
            if draws[row]:
                texts[row].append(token)
                finished[row] = token in ends or len(texts[row]) == limits[row]
        begun, position = position, position + 1
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def _row(codec: Codec, settings: Generate, number: int, tokens: list[int], ends: frozenset[int]) -> dict[str, Any]:
    """A prompt's line. Its text is without the token that ends it."""
    has_ended = bool(tokens) and tokens[-1] in ends
    text = codec.decode(tokens[:-1] if has_ended else tokens)
    shown = {} if text is None else {"text": text}
    ended = "end_of_text" if has_ended else "max_new_tokens"
    return {"prompt": settings.prompts[number], **shown, "tokens": tokens, "ended": ended}


def _require_room(prompts: Sequence[Sequence[int]], new: int, context: int | None) -> None:
    """Raises UserError where a text would become longer than the model reads. The last token is not read."""
    if context is None:
        return
    for number, prompt in enumerate(prompts):
        room = context + 1 - len(prompt)
        if room < new:
            advice = f"use at most {room}, or a shorter prompt" if room > 0 else "use a shorter prompt"
            raise UserError(
                f"generate.max_new_tokens={new}: generate.prompts[{number}] has {len(prompt)} tokens, and the model "
                f"reads {context}; {advice}"
            )


def printable(text: str) -> str:
    """Without control characters, which a terminal would follow."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def _show(path: Path, prompts: int) -> None:
    with open(path) as file:
        for number, line in enumerate(file):
            if number == SHOWN:
                print(f"... {prompts - SHOWN} more in {path}")
                break
            row = json.loads(line)
            text = row.get("text")
            shown = f"{row['prompt']} {row['tokens']}" if text is None else f"{row['prompt']}{text}"
            print(printable(shown), flush=True)
    log.info("generations of %d prompts: %s", prompts, path)
