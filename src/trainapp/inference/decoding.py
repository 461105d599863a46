"""Continuing a batch of prompts: the new tokens of each, at most `max_new_tokens`, the last of which may end the text.

Transformers models use their own `generate`, with padding on the left. Other models are read position by position:
while a prompt is longer than the shortest of its batch, its own tokens are read instead of sampled ones. Every model
that predicts next tokens can therefore generate without padding and masks, and a prompt's logits do not depend on the
others.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.config.schema import Generate
from trainapp.draws.sample_draws import SampleDraws
from trainapp.errors import TrainingStopped, UserError
from trainapp.losses.losses import Output, tensor_of_output
from trainapp.rng import seed_from

Decoder = Callable[[Tensor], Tensor]  # next-token logits [B, V] after tokens [B, T], which follow earlier calls'


def continue_by_transformers(
    model: Any, prompts: dict[int, list[int]], settings: Generate, end_tokens: frozenset[int], device: torch.device
) -> list[list[int]]:
    """Continue prompts by the model's own `generate`. Return the new tokens of each.

    With `train.draws=device`, sampled tokens depend on the batch, whose seed is its first prompt's.

    Args:
        model: of Transformers.
        prompts: their tokens, by number.
        settings: of the mode.
        end_tokens: tokens that end a text.
        device: of the model.
    """
    # Padding on the left: all prompts end at the same position, where the new tokens begin.
    longest = max(map(len, prompts.values()))
    padding_token = min(end_tokens, default=0)
    padding_lengths = [longest - len(prompt) for prompt in prompts.values()]
    padded = []
    for prompt, padding_length in zip(prompts.values(), padding_lengths, strict=True):
        padded.append([padding_token] * padding_length + prompt)
    first_positions = torch.tensor(padding_lengths, device=device)[:, None]
    is_token = torch.arange(longest, device=device) >= first_positions

    # The seed, and how a token is drawn.
    if SampleDraws.active is None:
        seed_from(device, settings.seed, min(prompts))
    else:  # tokens are drawn per prompt, whatever its batch
        seed_from(device, settings.seed)
    sampling = {}
    if settings.temperature > 0:
        sampling = {"temperature": settings.temperature, "top_k": settings.top_k or 0, "top_p": settings.top_p}

    texts = model.generate(
        torch.tensor(padded, device=device),
        attention_mask=is_token.long(),
        max_new_tokens=settings.max_new_tokens,
        do_sample=settings.temperature > 0,
        **sampling,
        eos_token_id=sorted(end_tokens) or [-1],  # not a token; None would mean the model's own
        pad_token_id=padding_token,
        use_cache=True,
    )
    new_tokens = texts[:, longest:].tolist()
    return [_cut_after_end(tokens, end_tokens) for tokens in new_tokens]


def _cut_after_end(tokens: list[int], end_tokens: frozenset[int]) -> list[int]:
    """Return the tokens up to the one that ends the text, if any; padding follows it."""
    for length, token in enumerate(tokens, start=1):
        if token in end_tokens:
            return tokens[:length]
    return tokens


def continue_by_position(
    model: nn.Module,
    prompts: dict[int, list[int]],
    settings: Generate,
    end_tokens: frozenset[int],
    device: torch.device,
    output: Output = None,
) -> list[list[int]]:
    """Continue prompts token by token. Return the new tokens of each.

    Each prompt has its own generator, so its text does not depend on the batch.

    Args:
        model: predicts next tokens.
        prompts: their tokens, by number.
        settings: of the mode.
        end_tokens: tokens that end a text.
        device: of the model.
        output: the part of what the model returns, see `losses.part_of_output`.
    """
    texts = [list(prompt) for prompt in prompts.values()]
    prompt_lengths = [len(text) for text in texts]
    generators = [_generator_of_prompt(settings.seed, number) for number in prompts]
    longest = max(prompt_lengths) + settings.max_new_tokens
    decoder = build_decoder(model, longest, output)

    # Each call of the decoder reads the tokens [start, end) of all texts, which have been sampled or are the prompt's.
    unfinished = set(range(len(texts)))
    start = 0
    end = min(prompt_lengths)
    while unfinished:
        tokens = [_tokens_to_read(text, start, end) for text in texts]
        logits = decoder(torch.tensor(tokens, device=device)).float().cpu()  # waits: the sampled tokens are read next

        # Of a longer prompt, the next token is read instead.
        rows_to_sample = [row for row in unfinished if len(texts[row]) == end]
        for row in rows_to_sample:
            token = sample_token(logits[row], generators[row], settings)
            texts[row].append(token)
            new_tokens = len(texts[row]) - prompt_lengths[row]
            if token in end_tokens or new_tokens == settings.max_new_tokens:
                unfinished.remove(row)

        start = end
        end += 1
    return [text[length:] for text, length in zip(texts, prompt_lengths, strict=True)]


def _generator_of_prompt(seed: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash((seed, number)) % 2**63)


def _tokens_to_read(text: list[int], start: int, end: int) -> list[int]:
    """Return the tokens [start, end) of a text. A finished one is continued by zeros until all are finished."""
    if len(text) < end:
        return [0] * (end - start)
    return text[start:end]


def build_decoder(model: Any, length: int, output: Output = None) -> Decoder:
    """Return a decoder for sequences of at most `length` tokens.

    It uses the model's cache if it has `new_cache`; otherwise each token is a forward of all tokens.

    Args:
        model: predicts next tokens.
        length: of the longest sequence.
        output: see `continue_by_position`.
    """
    if callable(getattr(model, "new_cache", None)):
        cache = model.new_cache(length)

        def decode_with_cache(tokens: Tensor) -> Tensor:
            return _last_logits(model(tokens, cache=cache), tokens, output)

        return decode_with_cache

    calls: list[Tensor] = []  # the tokens of each call

    def decode(tokens: Tensor) -> Tensor:
        calls.append(tokens)
        all_tokens = torch.cat(calls, dim=1)
        return _last_logits(model(all_tokens), all_tokens, output)

    return decode


def _last_logits(returned: Any, tokens: Tensor, output: Output) -> Tensor:
    """Return the logits of the last position, [B, V]. Raises UserError for a model that does not predict next tokens.

    Args:
        returned: by the model.
        tokens: which it has read, [B, T].
        output: see `continue_by_position`.
    """
    logits = tensor_of_output(returned, output, "mode=generate")
    if logits.ndim != 3 or len(logits) != len(tokens):
        raise UserError(
            f"mode=generate: the model returns {list(logits.shape)} for tokens {list(tokens.shape)}, not logits "
            "[B, T, vocabulary]; use a run whose model predicts next tokens"
        )
    return logits[:, -1]


def sample_token(logits: Tensor, generator: torch.Generator, settings: Generate) -> int:
    """Sample a token by temperature, top-k and top-p (Holtzman et al. 2020, arXiv:1904.09751).

    Raises TrainingStopped for nan logits.

    Args:
        logits: float [V] on the CPU.
        generator: draws the token.
        settings: of the mode. Temperature 0: the likeliest token, without a draw.
    """
    if logits.isnan().any():
        raise TrainingStopped("mode=generate: the model's logits are nan; choose an earlier checkpoint")
    if settings.temperature == 0:
        return int(logits.argmax())

    # Top-k: the first ones of the tokens in order of their probability.
    ordered, tokens = logits.double().sort(descending=True, stable=True)
    scaled = ordered / settings.temperature
    probabilities = torch.softmax(scaled[: settings.top_k], -1)

    # Top-p: those for which likelier ones do not add up to p. The likeliest always stays: it has none before it.
    if settings.top_p < 1:
        probability_before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.where(probability_before < settings.top_p, 0.0)

    position = torch.multinomial(probabilities, 1, generator=generator)
    return int(tokens[position])
