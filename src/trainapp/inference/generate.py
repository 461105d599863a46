"""`mode=generate`: continues prompts, and writes one JSON line per prompt, in order.

Transformers models use their own `generate`, with padding on the left. Other models are read position by position:
while a prompt is longer than the shortest of its batch, its own tokens are read instead of sampled ones. Every model
that predicts next tokens can therefore generate without padding and masks, and a prompt's logits do not depend on the
others.
"""

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.config.schema import Generate
from trainapp.data.batch import MicroBatch, ranges
from trainapp.errors import TrainingStopped, UserError
from trainapp.inference.rows import Row, write_rows
from trainapp.losses.losses import Output, tensor_of_output
from trainapp.models.inspect import is_of_transformers, positions_of
from trainapp.rng import SampleDraws, seed_from
from trainapp.training.session import Session

SHOWN = 16  # maximum number of prompts shown on the terminal
Decoder = Callable[[Tensor], Tensor]  # next-token logits [B, V] after tokens [B, T], which follow earlier calls'


def generate(session: Session) -> None:
    """Continue the prompts, resuming after an error or an earlier process, and print them.

    Raises UserError for prompts that cannot be continued, and for models that do not predict next tokens.
    """
    model: Any = session.strategy.model
    settings, data = session.config.generate, session.batches.dataset
    ends = ends_of_text(settings, data, model)
    prompts = [encoded(data, prompt, number) for number, prompt in enumerate(settings.prompts)]
    context, new = context_of(model), settings.max_new_tokens
    for number, prompt in enumerate(prompts):
        room = new if context is None else context + 1 - len(prompt)  # the last token is not read
        if room < new:
            advice = f"use at most {room}, or a shorter prompt" if room > 0 else "use a shorter prompt"
            raise UserError(
                f"generate.max_new_tokens={new}: generate.prompts[{number}] has {len(prompt)} tokens, and the model "
                f"reads {context}; {advice}"
            )
    itself = is_of_transformers(model) and model.can_generate()
    output = getattr(session.task, "output", None)
    continued = by_transformers if itself else functools.partial(by_position, output=output)

    def rows_of(micro: MicroBatch) -> list[Row]:
        chosen = micro.data["numbers"].tolist()
        own = {number: prompts[number] for number in chosen}
        texts = continued(model, own, settings, ends, session.state.device)
        return [_row(data, settings, number, tokens, ends) for number, tokens in zip(chosen, texts, strict=True)]

    def batch(begin: int, start: int, end: int) -> dict[str, Tensor]:
        """Numbers of prompts, int64 [B], and zeros, [B, T], in the shape of the texts: it determines the size's
        bucket.
        """
        numbers = range(begin + start, begin + end)
        longest = max(len(prompts[number]) for number in numbers) + settings.max_new_tokens
        return {"numbers": torch.tensor(numbers), "room": torch.zeros(len(numbers), longest)}

    def fetched(done: int) -> Iterator[MicroBatch]:
        for start, end in ranges(done, len(prompts), session.sizes.evaluation.size):
            piece = functools.partial(batch, start)
            yield MicroBatch(piece(0, end - start), end == len(prompts), True, range(start, end), piece)

    if (path := write_rows(session, "generations", fetched, rows_of)) is not None:
        _show(len(prompts), path)


# Continuing a batch: the new tokens of each prompt, at most `max_new_tokens`, the last of which may end the text.


def by_transformers(
    model: Any, prompts: dict[int, list[int]], settings: Generate, ends: frozenset[int], device: torch.device
) -> list[list[int]]:
    """Generate by the model's own `generate`. With `train.draws=device`, sampled tokens depend on the batch, whose seed
    is its first prompt's.
    """
    longest, pad = max(map(len, prompts.values())), min(ends, default=0)
    tokens = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts.values()], device=device)
    starts = torch.tensor([[longest - len(prompt)] for prompt in prompts.values()], device=device)
    seed_from(device, settings.seed, *([min(prompts)] if SampleDraws.active is None else []))
    drawn = {"temperature": settings.temperature, "top_k": settings.top_k or 0, "top_p": settings.top_p}
    texts = model.generate(
        tokens,
        attention_mask=(torch.arange(longest, device=device) >= starts).long(),
        max_new_tokens=settings.max_new_tokens,
        do_sample=settings.temperature > 0,
        **(drawn if settings.temperature > 0 else {}),
        eos_token_id=sorted(ends) or [-1],  # not a token; None would mean the model's own
        pad_token_id=pad,
        use_cache=True,
    )
    new = texts[:, longest:].tolist()
    lengths = [next((n for n, token in enumerate(text, start=1) if token in ends), len(text)) for text in new]
    return [text[:length] for text, length in zip(new, lengths, strict=True)]  # padding follows a text's end


def by_position(
    model: nn.Module,
    prompts: dict[int, list[int]],
    settings: Generate,
    ends: frozenset[int],
    device: torch.device,
    output: Output = None,
) -> list[list[int]]:
    """Generate token by token. Each prompt has its own generator, so its text does not depend on the batch.

    output: the part of what the model returns, see `losses.part_of_output`.
    """
    texts = [list(prompt) for prompt in prompts.values()]
    lengths = [len(text) for text in texts]
    generators = [torch.Generator().manual_seed(hash((settings.seed, number)) % 2**63) for number in prompts]
    decoder = decoder_of(model, max(lengths) + settings.max_new_tokens, output)
    unfinished, begun, position = set(range(len(texts))), 0, min(lengths)
    while unfinished:
        # Finished sequences continue until all are finished.
        rows = [text[begun:position] if len(text) >= position else [0] * (position - begun) for text in texts]
        logits = decoder(torch.tensor(rows, device=device)).float().cpu()  # waits: the sampled tokens are read next
        for row in [row for row in unfinished if len(texts[row]) == position]:
            texts[row].append(draw(logits[row], generators[row], settings))
            if texts[row][-1] in ends or len(texts[row]) == lengths[row] + settings.max_new_tokens:
                unfinished.remove(row)
        begun, position = position, position + 1
    return [text[length:] for text, length in zip(texts, lengths, strict=True)]


def decoder_of(model: Any, length: int, output: Output = None) -> Decoder:
    """A decoder for sequences of at most `length` tokens: uses the model's cache if it has `new_cache`; otherwise each
    token is a forward of all tokens. output: see `by_position`.
    """
    if callable(getattr(model, "new_cache", None)):
        cache = model.new_cache(length)
        return lambda tokens: _last(model(tokens, cache=cache), tokens, output)
    read: list[Tensor] = []

    def decode(tokens: Tensor) -> Tensor:
        read.append(tokens)
        whole = torch.cat(read, dim=1)
        return _last(model(whole), whole, output)

    return decode


def _last(returned: Any, tokens: Tensor, output: Output) -> Tensor:
    """The logits of the last position, [B, V]. Raises UserError for a model that does not predict next tokens."""
    logits = tensor_of_output(returned, output, "mode=generate")
    if logits.ndim != 3 or len(logits) != len(tokens):
        raise UserError(
            f"mode=generate: the model returns {list(logits.shape)} for tokens {list(tokens.shape)}, not logits "
            "[B, T, vocabulary]; use a run whose model predicts next tokens"
        )
    return logits[:, -1]


def draw(logits: Tensor, generator: torch.Generator, settings: Generate) -> int:
    """Sample a token by temperature, top-k and top-p (Holtzman et al. 2020, arXiv:1904.09751).

    logits: float [V] on the CPU. Raises TrainingStopped for nan logits.
    """
    if logits.isnan().any():
        raise TrainingStopped("mode=generate: the model's logits are nan; choose an earlier checkpoint")
    if settings.temperature == 0:
        return int(logits.argmax())
    ordered, tokens = logits.double().sort(descending=True, stable=True)
    probabilities = torch.softmax((ordered / settings.temperature)[: settings.top_k], -1)
    if settings.top_p < 1:
        before = probabilities.cumsum(-1) - probabilities  # of likelier tokens: 0 for the likeliest, which always stays
        probabilities = probabilities.where(before < settings.top_p, 0.0)
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])


# Converting between text and the tokens of a run's data


def encoded(data: Any, prompt: str | Sequence[int], number: int) -> list[int]:
    """The tokens of a prompt; for a text, by the data's `encode`. number: the prompt's index, for messages. Raises
    UserError for a prompt without tokens.
    """
    setting, size = f"generate.prompts[{number}]={prompt!r}", getattr(data, "spec", {}).get("vocab_size")
    if isinstance(prompt, str) and not has_text(data):
        raise UserError(f"{setting}: the data has no text (no `encode` and `decode`); give tokens, as in [[1,2,3]]")
    tokens = list(data.encode(prompt) if isinstance(prompt, str) else prompt)
    if not tokens:
        raise UserError(f"{setting}: has no token to continue")
    if size is not None and max(tokens) >= size:
        raise UserError(f"{setting}: token {max(tokens)} is not one of the vocabulary's {size}, from 0")
    return tokens


def has_text(data: Any) -> bool:
    """Whether the data set has `encode(text)` and `decode(tokens)`."""
    return all(callable(getattr(data, name, None)) for name in ("encode", "decode"))


def ends_of_text(settings: Generate, data: Any, model: nn.Module) -> frozenset[int]:
    """The tokens that end a text: as set, otherwise the data's `end_of_text`, otherwise a Transformers model's."""
    found: Any = settings.end_of_text
    if found == "auto":
        found = getattr(data, "end_of_text", None)
        if found is None and is_of_transformers(model):
            found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return frozenset(found if isinstance(found, (list, tuple)) else () if found is None else (found,))


def context_of(model: Any) -> int | None:
    """The longest sequence that the model reads, if it declares one."""
    if is_of_transformers(model):
        return positions_of(model.config)
    length = getattr(model, "context_length", None)
    return length if isinstance(length, int) else None


def _row(data: Any, settings: Generate, number: int, tokens: list[int], ends: frozenset[int]) -> Row:
    """A prompt's row. Its text does not include the token that ends it."""
    has_ended = bool(tokens) and tokens[-1] in ends
    text = {"text": str(data.decode(tokens[:-1] if has_ended else tokens))} if has_text(data) else {}
    ended = "end_of_text" if has_ended else "max_new_tokens"
    return {"prompt": settings.prompts[number], **text, "tokens": tokens, "ended": ended}


def printable(text: str) -> str:
    """The text without control characters, which a terminal would interpret."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def _show(prompts: int, path: Path) -> None:
    with open(path) as file:
        for line in itertools.islice(file, SHOWN):
            row = json.loads(line)
            shown = f"{row['prompt']}{row['text']}" if "text" in row else f"{row['prompt']} {row['tokens']}"
            print(printable(shown), flush=True)
    if prompts > SHOWN:
        print(f"... {prompts - SHOWN} more in {path}")
