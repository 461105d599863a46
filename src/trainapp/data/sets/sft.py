"""Prompts and answers, or conversations, for supervised fine-tuning: the loss is on answers only."""

import bisect
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from trainapp.data.sets.hf import Tokenized, open_rows, split_rows
from trainapp.errors import UserError
from trainapp.files import cache_directory
from trainapp.validation import Bool, Fraction, PositiveInt, Str

log = logging.getLogger(__name__)

IGNORED = -100  # the target of tokens that do not count in the loss
ANSWER = 1 << 30  # flag in a stored token: it belongs to an answer
MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class SupervisedFineTuning(Tokenized):
    """Examples: inputs int64 [B, T], targets int64 [B, T] the same shifted by one token, -100 unless the next token
    belongs to an answer.

    conf/data/sft.yaml describes the arguments. An example has texts under the keys `prompt` and `answer`, or under
    `messages` a list of `{role, content}`, which the tokenizer's chat template turns into text; answers are then the
    assistant's messages. pack: several examples share a sequence of exactly `context_length` tokens. `position_ids`,
    int64 [B, T], restart with each, so that Transformers models attend only within an example. Without packing, a batch
    is padded at the end to its longest example; a causal model needs no mask for that. Longer examples are cut at their
    end; those left without an answer are dropped. Raises UserError for a row that is no example, and if there are none.
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
            raise UserError("data.tokenizer=null: name a folder, a tokenizer.json or a model on the hub, or model.path")
        if not files:
            raise UserError("data.files=null: name files of examples, such as chat.jsonl")
        super().__init__(tokenizer)
        if chat_template is not None:
            try:
                self.tokenizer.chat_template = Path(chat_template).expanduser().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(
                    f"data.chat_template={chat_template}: cannot be read ({error}); name a file with a template"
                ) from None
        self._keys, self._longest, self._pack = (prompt, answer, messages), context_length, pack
        directory = cache_directory(cache_dir)
        rows, train = split_rows(open_rows(files, None, directory, "files"), split, "train", None, val_fraction)
        self._has_messages = len(train) > 0 and train[0].get(messages) is not None
        template = str(getattr(self.tokenizer, "chat_template", None))
        self._tokenize(rows, self._examples, directory, "sft", template, self._keys, context_length)
        sizes = self._sizes(split, len(rows))
        self._sequences = packed(sizes, context_length) if pack else [[index] for index in range(len(sizes))]
        self.spec: dict[str, Any] = {
            "vocab_size": len(self.tokenizer),
            "context_length": context_length,
            "pad_token_id": self.padding,
        } | ({"packed": True} if pack else {})

    def _examples(self, batch: dict[str, list[Any]], numbers: list[int]) -> dict[str, Any]:
        """The tokens of the rows whose answer begins within the context, with `ANSWER` set in those of answers.

        Cut to one more than a sequence and its last target need, which shows that an example was longer. Raises
        UserError for a row that is not an example.
        """
        rows = (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))
        examples = [
            self._example(f"row {number}", _without_nulls(row)) for number, row in zip(numbers, rows, strict=True)
        ]
        fitting = [tokens for tokens in examples if (tokens[1 : self._longest + 1] & ANSWER).any()]
        return {"tokens": [tokens[: self._longest + 2] for tokens in fitting]}

    def _example(self, place: str, row: dict[str, Any]) -> np.ndarray:
        prompt, answer, messages = self._keys
        if messages in row:
            return self._conversation(place, row[messages])
        if isinstance(row.get(prompt), str) and isinstance(row.get(answer), str):
            # Tokenised separately, so that no token spans both: when the model is used, only the prompt is given.
            given, end = self._prompt(row[prompt]), self.end_of_text
            own = super().encode(row[answer]) + ([] if end is None else [end])
            return _marked(given + own, [False] * len(given) + [True] * len(own))
        raise UserError(
            f"data.files: {place}: an example needs texts under {prompt!r} and {answer!r} (data.prompt, data.answer), "
            f"or a list under {messages!r} (data.messages); this one has {', '.join(map(repr, row)) or 'nothing'}"
        )

    def _prompt(self, text: str) -> list[int]:
        """The tokens of a prompt, with the model's start-of-text tokens."""
        given = list(self.tokenizer(text, add_special_tokens=True)["input_ids"])
        ends = bool(given) and given[-1] == self.end_of_text  # the end token goes after the answer
        return given[:-1] if ends else given

    def _conversation(self, place: str, turns: Any) -> np.ndarray:
        """All messages as the chat template writes them; the text added for an assistant's message is an answer."""
        content = {"content", "tool_calls"}  # a tool call has no text, which templates with support for tools expect
        if not isinstance(turns, list) or not all(
            isinstance(turn, dict) and "role" in turn and content & turn.keys() for turn in turns
        ):
            raise UserError(
                f"data.files: {place}: messages must be a list of objects with a role and a content, or tool_calls; "
                'give each message a text ("" for none), or drop the example'
            )
        if MARKS_ANSWERS.search(str(self.tokenizer.chat_template)):
            coded = self._written(place, turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
            return _marked(coded["input_ids"], coded["assistant_masks"])
        whole = self._written(place, turns)
        answers = []  # ranges of characters
        for number, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            before = self._written(place, turns[:number], add_generation_prompt=True) if number else ""
            after = self._written(place, turns[: number + 1])
            if not (whole.startswith(before) and whole.startswith(after)):
                raise UserError(
                    f"data.files: {place}: the chat template writes message {number + 1} differently once others "
                    "follow, so its answer cannot be located; use a template that does not (data.chat_template)"
                )
            answers.append((len(before), len(after)))
        coded = self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        places = coded["offset_mapping"]
        is_answer = [any(a <= start and end <= b for a, b in answers) for start, end in places]
        return _marked(coded["input_ids"], is_answer)

    def _written(self, place: str, turns: list[dict[str, Any]], tokenize: bool = False, **options: bool) -> Any:
        try:
            return self.tokenizer.apply_chat_template(turns, tokenize=tokenize, **options)
        except Exception as error:  # templates raise various errors, such as for roles that do not alternate
            raise UserError(f"data.files: {place}: the chat template refuses the messages: {error}") from None

    def _sizes(self, split: str, rows: int) -> np.ndarray:
        """The number of inputs of each example. Logs what is cut and left out. Raises UserError if nothing is left."""
        # Of Arrow's chunks only the offsets are read.
        chunks = self._documents[:]["tokens"].chunks if len(self._documents) else []
        lengths = np.concatenate([np.empty(0, np.int64), *(chunk.value_lengths().to_numpy() for chunk in chunks)])
        cut, left_out = int((lengths > self._longest + 1).sum()), rows - len(lengths)
        if cut or left_out:
            log.warning(
                "data.context_length=%d: of %d examples of the %s split %d are longer and cut, and %d are left out "
                "(their answer begins after the end)",
                self._longest,
                rows,
                split,
                cut,
                left_out,
            )
        if not len(lengths) and (rows or split == "train"):
            raise UserError(
                f"data.context_length={self._longest}: no example of the {split} split has an answer that fits; use a "
                "longer context, or other files"
            )
        return np.minimum(lengths - 1, self._longest)

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt, as before an `answer`; if the first example has messages, as the chat template writes
        a user's message before the assistant's.
        """
        if not self._has_messages:
            return self._prompt(text)
        turns = [{"role": "user", "content": text}]
        return super().encode(self._written("a prompt", turns, add_generation_prompt=True))

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        chosen = [self._sequences[position] for position in self._positions(indices)]
        fetched = iter(self._tokens([index for sequence in chosen for index in sequence]))
        examples = [[next(fetched)[: self._longest + 1] for _ in sequence] for sequence in chosen]
        width = self._longest if self._pack else max(len(tokens) - 1 for (tokens,) in examples)
        columns = zip(*(self._row(sequence, width) for sequence in examples), strict=True)
        inputs, targets, positions = (torch.from_numpy(np.stack(rows)) for rows in columns)
        return {"inputs": inputs, "targets": targets} | ({"position_ids": positions} if self._pack else {})

    def _row(self, examples: list[np.ndarray], width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The inputs, targets and positions, int64 [width] each, of the examples and of padding after them."""
        free = width - sum(len(tokens) - 1 for tokens in examples)
        documents = [*examples, np.full(free + 1, self.padding)]
        tokens, following = (np.concatenate([own[part] for own in documents]) for part in (slice(-1), slice(1, None)))
        positions = np.concatenate([np.arange(len(own) - 1) for own in documents])
        return tokens & ~ANSWER, np.where(following & ANSWER, following & ~ANSWER, IGNORED), positions


def packed(sizes: np.ndarray, room: int) -> list[list[int]]:
    """Pack documents of these sizes into sequences of `room`, best-fit decreasing: at most 11/9 of the optimum, plus 1.

    Documents in a sequence, and sequences, are in the order of the data.
    """
    sequences: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # free room and number of each sequence, sorted
    for index in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[index])
        place = bisect.bisect_left(rooms, (size, 0))
        if place == len(rooms):
            left, number = room, len(sequences)
            sequences.append([])
        else:
            left, number = rooms.pop(place)
        sequences[number].append(index)
        if left > size:
            bisect.insort(rooms, (left - size, number))
    return sorted(sorted(sequence) for sequence in sequences)


def _without_nulls(value: Any) -> Any:
    """The value without keys that are None: Arrow gives all objects of a column the same keys."""
    if isinstance(value, dict):
        return {key: _without_nulls(own) for key, own in value.items() if own is not None}
    return [_without_nulls(own) for own in value] if isinstance(value, list) else value


def _marked(ids: list[int], is_answer: list[bool]) -> np.ndarray:
    return np.asarray(ids, np.int32) | np.where(is_answer, ANSWER, 0).astype(np.int32)
