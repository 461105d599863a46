"""Prompts and answers, or conversations, for supervised fine-tuning: the loss is on answers only."""

import bisect
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from trainapp.data.sets.hf import Tokenized, cache_directory, digest_of, documents, open_rows, split_rows, tokenized
from trainapp.errors import UserError
from trainapp.validation import Bool, Fraction, PositiveInt, Str

log = logging.getLogger(__name__)

IGNORED = -100  # the target of tokens that do not count in the loss
ANSWER = 1 << 30  # flag in a stored token: it belongs to an answer
MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class SupervisedFineTuning(Tokenized):
    """Examples: inputs int64 [B, T], targets int64 [B, T] the same shifted by one token, -100 unless the next token
    belongs to an answer.

    files: JSON lines, or anything that `data=hf` reads as `data.path`. An example has texts under the keys `prompt` and
    `answer`, or under `messages` a list of `{role, content}`, which the tokenizer's chat template turns into text;
    answers are then the assistant's messages. pack: several examples share a sequence of exactly `context_length`
    tokens. `position_ids`, int64 [B, T], restart with each, so that Transformers models attend only within an example.
    Without packing, a batch is padded at the end to its longest example; a causal model needs no mask for that.
    chat_template: a file that replaces the tokenizer's own. val_fraction: fraction of the examples, from the end,
    unless the files have a validation split. Examples longer than `context_length` are cut at their end; those left
    without an answer are dropped. Each is logged once. Raises UserError for a row that is not an example, and if a
    split has none.
    """

    task = "next_token"

    def __init__(
        self,
        split: Literal["train", "val"],
        files: Str | list[Str] | None = None,
        tokenizer: Str | None = None,
        pack: Bool = False,
        context_length: PositiveInt = 512,
        prompt: Str = "prompt",
        answer: Str = "answer",
        messages: Str = "messages",
        chat_template: Str | None = None,
        val_fraction: Fraction = 0.1,
        cache_dir: Str | None = None,
    ):
        if tokenizer is None:
            raise UserError("data.tokenizer=null: name a folder, a tokenizer.json or a model of the hub, or model.path")
        super().__init__(tokenizer)
        if chat_template is not None:
            self.tokenizer.chat_template = _template(chat_template)
        if not files:
            raise UserError("data.files=null: name files of examples, such as chat.jsonl")
        directory = cache_directory(cache_dir)
        train, validation, _ = split_rows(open_rows(files, None, directory, "files"), "train", None, val_fraction)
        rows = train if split == "train" else validation
        self._keys, self._longest, self._pack = (prompt, answer, messages), context_length, pack
        self._has_messages = len(train) > 0 and train[0].get(messages) is not None
        template = str(getattr(self.tokenizer, "chat_template", None))
        parts = ("sft", digest_of(self.tokenizer), template, self._keys)
        self._examples = tokenized(rows, self._example, directory, *parts, numbers=("length", "first"))
        usable, lengths = self._usable(split)
        self._sequences = packed(lengths, usable, context_length + 1) if pack else [[index] for index in usable]
        self.spec: dict[str, Any] = {
            "vocab_size": len(self.tokenizer),
            "context_length": context_length,
            "pad_token_id": self.padding,
        } | ({"packed": True} if pack else {})

    def _example(self, row: dict[str, Any], number: int) -> dict[str, Any]:
        """The example's tokens, with `ANSWER` set in those of answers; their `length`; and the index of the `first`
        answer token that can be a target, or `length`. Raises UserError for a row that is not an example.
        """
        prompt, answer, messages = self._keys
        place, row = f"row {number}", _without_nulls(dict(row))
        if messages in row:
            tokens = _conversation(place, row[messages], self.tokenizer)
        elif isinstance(row.get(prompt), str) and isinstance(row.get(answer), str):
            tokens = _pair(row[prompt], row[answer], self.tokenizer)
        else:
            raise UserError(
                f"data.files: {place}: an example needs texts under {prompt!r} and {answer!r} (data.prompt, "
                f"data.answer), or a list under {messages!r} (data.messages); this one has "
                f"{', '.join(map(repr, row)) or 'nothing'}"
            )
        of_answers = np.flatnonzero(tokens[1:] & ANSWER) + 1
        return {"tokens": tokens, "length": len(tokens), "first": int(min(of_answers, default=len(tokens)))}

    def _usable(self, split: str) -> tuple[list[int], np.ndarray]:
        """The examples that still have an answer when cut, and the length of each example. Raises UserError if there
        are none.
        """
        count = len(self._examples)
        table = self._examples[:]
        lengths, first = (np.asarray(table[name] if count else [], np.int64) for name in ("length", "first"))
        cut = int((lengths > self._longest + 1).sum())  # the last token is only a target
        usable = np.flatnonzero(first < np.minimum(lengths, self._longest + 1)).tolist()
        if cut or len(usable) < count:
            log.warning(
                "data.context_length=%d: of %d examples of the %s split %d are longer and cut, and %d are left out, "
                "since nothing of an answer is left",
                self._longest,
                count,
                split,
                cut,
                count - len(usable),
            )
        if not usable and (count or split == "train"):
            raise UserError(
                f"data.context_length={self._longest}: no example of the {split} split has an answer that fits; use a "
                "longer context, or other files"
            )
        return usable, lengths

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt, as before an `answer`; if the first example has messages, as the chat template writes
        a user's message before the assistant's.
        """
        if not self._has_messages:
            return prompt_tokens(text, self.tokenizer)
        written = _templated("a prompt", [{"role": "user", "content": text}], self.tokenizer, True)
        return list(self.tokenizer(written, add_special_tokens=False)["input_ids"])

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """The batch of these sequences, collated. Raises IndexError for an index outside the data."""
        chosen = [self._sequences[position] for position in self._positions(indices)]
        fetched = iter(documents(self._examples, [index for sequence in chosen for index in sequence]))
        examples = [[next(fetched)[: self._longest + 1] for _ in sequence] for sequence in chosen]
        lengths = [sum(len(document) - 1 for document in sequence) for sequence in examples]
        shape = (len(chosen), self._longest if self._pack else max(lengths, default=1))
        inputs, targets = np.full(shape, self.padding, np.int64), np.full(shape, IGNORED, np.int64)
        positions = np.zeros(shape, np.int64)
        for row, sequence in enumerate(examples):
            start = 0
            for document in sequence:
                end = start + len(document) - 1
                ids, next_ids = document[:-1] & ~ANSWER, document[1:]
                inputs[row, start:end] = ids
                targets[row, start:end] = np.where(next_ids & ANSWER, next_ids & ~ANSWER, IGNORED)
                positions[row, start:end] = np.arange(end - start)
                start = end
            positions[row, start:] = np.arange(shape[1] - start)  # padding is a separate document
        batch = {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}
        return batch | ({"position_ids": torch.from_numpy(positions)} if self._pack else {})


def packed(lengths: np.ndarray, indices: Sequence[int], room: int) -> list[list[int]]:
    """Pack documents into sequences of `room` - 1 inputs, best-fit decreasing: at most 11/9 of the optimum, plus 1.

    lengths: tokens of each document; n tokens give n - 1 inputs. Documents in a sequence, and sequences, are in the
    order of the data.
    """
    sequences: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # free room and number of each sequence, sorted
    for index in sorted(indices, key=lambda index: (-lengths[index], index)):
        size = min(int(lengths[index]), room) - 1
        place = bisect.bisect_left(rooms, (size, 0))
        if place == len(rooms):
            left, number = room - 1, len(sequences)
            sequences.append([])
        else:
            left, number = rooms.pop(place)
        sequences[number].append(index)
        if left > size:
            bisect.insort(rooms, (left - size, number))
    return sorted(sorted(sequence) for sequence in sequences)


def _template(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.chat_template={path}: cannot be read ({error}); name a file with a template") from None


# --- examples as tokens with marked answers


def _without_nulls(value: Any) -> Any:
    """The value without keys that are None: Arrow gives all objects of a column the same keys."""
    if isinstance(value, dict):
        return {key: _without_nulls(own) for key, own in value.items() if own is not None}
    return [_without_nulls(own) for own in value] if isinstance(value, list) else value


def _pair(prompt: str, answer: str, tokenizer: Any) -> np.ndarray:
    """The prompt with the model's start-of-text tokens, then the answer and the end of the text. Tokenised separately,
    so that no token spans both: when the model is used, only the prompt is given.
    """
    given, end = prompt_tokens(prompt, tokenizer), tokenizer.eos_token_id
    own = list(tokenizer(answer, add_special_tokens=False)["input_ids"]) + ([] if end is None else [end])
    return _marked(given + own, [False] * len(given) + [True] * len(own))


def prompt_tokens(prompt: str, tokenizer: Any) -> list[int]:
    """The tokens before an answer: the prompt, with the model's start-of-text tokens."""
    given = list(tokenizer(prompt, add_special_tokens=True)["input_ids"])
    ends = bool(given) and given[-1] == tokenizer.eos_token_id  # the end token goes after the answer
    return given[:-1] if ends else given


def _conversation(place: str, turns: Any, tokenizer: Any) -> np.ndarray:
    """All messages as the chat template writes them; the text added for an assistant's message is an answer."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) and _is_message(turn) for turn in turns):
        raise UserError(
            f"data.files: {place}: messages must be a list of objects with a role and a content, or tool_calls; give "
            'each message a text ("" for none), or leave the example out'
        )
    if MARKS_ANSWERS.search(str(tokenizer.chat_template)):
        as_tokens = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        coded = _by_template(place, turns, tokenizer, **as_tokens)
        return _marked(list(coded["input_ids"]), [bool(own) for own in coded["assistant_masks"]])
    whole = _templated(place, turns, tokenizer, False)
    answers = []  # ranges of characters
    for number, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        before = _templated(place, turns[:number], tokenizer, True) if number else ""
        after = _templated(place, turns[: number + 1], tokenizer, False)
        if not (whole.startswith(before) and whole.startswith(after)):
            raise UserError(
                f"data.files: {place}: the chat template writes message {number + 1} differently once others follow, "
                "so that its answer cannot be told apart; use a template without that (data.chat_template)"
            )
        answers.append((len(before), len(after)))
    if not tokenizer.is_fast:
        raise UserError(
            f"data.tokenizer: {type(tokenizer).__name__} is not fast, which data.messages need; use a fast one"
        )
    coded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    places = coded["offset_mapping"]
    return _marked(
        list(coded["input_ids"]), [any(a <= start and end <= b for a, b in answers) for start, end in places]
    )


def _is_message(turn: dict[str, Any]) -> bool:
    """Whether a turn is a message. A tool call has no text, which templates with support for tools expect."""
    return "role" in turn and not turn.keys().isdisjoint(("content", "tool_calls"))


def _templated(place: str, turns: list[dict[str, Any]], tokenizer: Any, prompts: bool) -> str:
    return str(_by_template(place, turns, tokenizer, tokenize=False, add_generation_prompt=prompts))


def _by_template(place: str, turns: list[dict[str, Any]], tokenizer: Any, **options: bool) -> Any:
    try:
        return tokenizer.apply_chat_template(turns, **options)
    except Exception as error:  # templates raise various errors, such as for roles that do not alternate
        raise UserError(f"data.files: {place}: the chat template refuses the messages: {error}") from None


def _marked(ids: list[int], is_answer: list[bool]) -> np.ndarray:
    return np.asarray(ids, np.int32) | np.where(is_answer, ANSWER, 0).astype(np.int32)
