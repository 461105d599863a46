"""Prompts and answers, or conversations, for supervised fine-tuning: the loss is on answers only."""

import bisect
import itertools
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from trainapp.data.sets.hf_rows import open_rows, split_rows
from trainapp.data.sets.tokenized import Tokenized
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

    An example has texts under the keys `prompt` and `answer`, or under `messages` a list of `{role, content}`, which
    the tokenizer's chat template turns into text; answers are then the assistant's messages. Longer examples are cut at
    their end; those left without an answer are dropped.

    With `pack`, several examples share a sequence of exactly `context_length` tokens. `position_ids`, int64 [B, T],
    restart with each, so that Transformers models attend only within an example. Without it, a batch is padded at the
    end to its longest example; a causal model needs no mask for that.

    Args: conf/data/sft.yaml describes them.

    Raises UserError for a row that is no example, and if there are none.
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
            self.tokenizer.chat_template = _read_template(chat_template)
        self._prompt_key = prompt
        self._answer_key = answer
        self._messages_key = messages
        self._longest = context_length
        self._pack = pack

        # Read the rows, and tokenize them once: the cache is keyed by all that determines the tokens.
        directory = cache_directory(cache_dir)
        splits = open_rows(files, None, directory, "files")
        rows, train_rows = split_rows(splits, split, "train", None, val_fraction)
        self._has_messages = len(train_rows) > 0 and train_rows[0].get(messages) is not None
        template = str(getattr(self.tokenizer, "chat_template", None))
        keys = (prompt, answer, messages)
        self._tokenize(rows, self._examples, directory, "sft", template, keys, context_length)

        # The indices of the examples in each sequence.
        sizes = self._example_sizes(split, len(rows))
        if pack:
            self._sequences = pack_documents(sizes, context_length)
        else:
            self._sequences = [[index] for index in range(len(sizes))]
        self.spec: dict[str, Any] = {
            "vocab_size": len(self.tokenizer),
            "context_length": context_length,
            "pad_token_id": self.padding,
        }
        if pack:
            self.spec["packed"] = True

    def _examples(self, batch: dict[str, list[Any]], row_numbers: list[int]) -> dict[str, Any]:
        """Return the tokens of the rows whose answer begins within the context, with `ANSWER` set in those of answers.

        Cut to one more than a sequence and its last target need, which shows that an example was longer. Raises
        UserError for a row that is not an example.
        """
        examples = []
        rows = zip(*batch.values(), strict=True)
        for number, values in zip(row_numbers, rows, strict=True):
            row = _without_nulls(dict(zip(batch, values, strict=True)))
            tokens = self._example(f"row {number}", row)
            has_answer_in_context = (tokens[1 : self._longest + 1] & ANSWER).any()
            if has_answer_in_context:
                examples.append(tokens[: self._longest + 2])
        return {"tokens": examples}

    def _example(self, row_name: str, row: dict[str, Any]) -> np.ndarray:
        """Return the tokens of a row, with `ANSWER` set in those of answers. Raises UserError if it is no example."""
        if self._messages_key in row:
            return self._conversation(row_name, row[self._messages_key])
        prompt = row.get(self._prompt_key)
        answer = row.get(self._answer_key)
        if not (isinstance(prompt, str) and isinstance(answer, str)):
            keys = ", ".join(map(repr, row))
            raise UserError(
                f"data.files: {row_name}: an example needs texts under {self._prompt_key!r} and {self._answer_key!r} "
                f"(data.prompt, data.answer), or a list under {self._messages_key!r} (data.messages); this one has "
                f"{keys or 'nothing'}"
            )

        # Tokenised separately, so that no token spans both: when the model is used, only the prompt is there.
        prompt_ids = self._prompt_tokens(prompt)
        answer_ids = super().encode(answer)
        if self.end_of_text is not None:
            answer_ids.append(self.end_of_text)
        is_answer = [False] * len(prompt_ids) + [True] * len(answer_ids)
        return _mark_answers(prompt_ids + answer_ids, is_answer)

    def _prompt_tokens(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt, with the model's start-of-text tokens."""
        ids = list(self.tokenizer(prompt, add_special_tokens=True)["input_ids"])
        if ids and ids[-1] == self.end_of_text:  # it belongs after the answer
            del ids[-1]
        return ids

    def _conversation(self, row_name: str, messages: Any) -> np.ndarray:
        """Return the tokens of all messages as the chat template writes them; the text added for an assistant's message
        is an answer.
        """
        _check_messages(row_name, messages)

        # Some templates mark the answers themselves.
        if MARKS_ANSWERS.search(str(self.tokenizer.chat_template)):
            coded = self._written(
                row_name, messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            return _mark_answers(coded["input_ids"], coded["assistant_masks"])

        # For all others, a token belongs to an answer if its characters lie inside it.
        text = self._written(row_name, messages)
        answers = self._locate_answers(row_name, messages, text)
        coded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        is_answer = []
        for start, end in coded["offset_mapping"]:
            lies_in_answer = any(first <= start and end <= last for first, last in answers)
            is_answer.append(lies_in_answer)
        return _mark_answers(coded["input_ids"], is_answer)

    def _locate_answers(self, row_name: str, messages: list[dict[str, Any]], text: str) -> list[tuple[int, int]]:
        """Return the ranges of characters that are answers in the text of a conversation."""
        answers = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue

            # The answer is what the template adds for it to the text up to the message before.
            before = ""
            if number > 0:
                before = self._written(row_name, messages[:number], add_generation_prompt=True)
            after = self._written(row_name, messages[: number + 1])
            if not (text.startswith(before) and text.startswith(after)):
                raise UserError(
                    f"data.files: {row_name}: the chat template writes message {number + 1} differently once others "
                    "follow, so its answer cannot be located; use a template that does not (data.chat_template)"
                )
            answers.append((len(before), len(after)))
        return answers

    def _written(self, row_name: str, messages: list[dict[str, Any]], tokenize: bool = False, **options: bool) -> Any:
        """Return what the chat template makes of the messages: text, or tokens."""
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=tokenize, **options)
        except Exception as error:  # templates raise various errors, such as for roles that do not alternate
            raise UserError(f"data.files: {row_name}: the chat template refuses the messages: {error}") from None

    def _example_sizes(self, split: str, rows: int) -> np.ndarray:
        """Return the number of inputs of each example. Logs what is cut and left out. Raises UserError if there are
        none.
        """
        # Of Arrow's chunks only the offsets are read.
        chunks = self._documents[:]["tokens"].chunks if len(self._documents) else []
        lengths_by_chunk = [chunk.value_lengths().to_numpy() for chunk in chunks]
        lengths = np.concatenate([np.empty(0, np.int64), *lengths_by_chunk])

        cut = int((lengths > self._longest + 1).sum())
        left_out = rows - len(lengths)
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
        """Return the tokens of a prompt, as before an `answer`; if the first example has messages, as the chat template
        writes a user's message before the assistant's.
        """
        if not self._has_messages:
            return self._prompt_tokens(text)
        messages = [{"role": "user", "content": text}]
        return super().encode(self._written("a prompt", messages, add_generation_prompt=True))

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        # Fetch the examples of all sequences at once, and divide them among the sequences again.
        sequences = [self._sequences[position] for position in self._positions(indices)]  # each: examples' indices
        example_indices = list(itertools.chain.from_iterable(sequences))
        examples = [tokens[: self._longest + 1] for tokens in self._tokens(example_indices)]
        remaining = iter(examples)
        examples_by_sequence = [list(itertools.islice(remaining, len(sequence))) for sequence in sequences]

        # Inputs are one shorter than the tokens, whose last is only a target.
        if self._pack:
            width = self._longest
        else:
            width = max(len(tokens) - 1 for tokens in examples)

        rows = [self._row(row_examples, width) for row_examples in examples_by_sequence]
        batch = {}
        for key in rows[0]:
            batch[key] = torch.from_numpy(np.stack([row[key] for row in rows]))
        return batch

    def _row(self, examples: list[np.ndarray], width: int) -> dict[str, np.ndarray]:
        """Return the inputs, the targets and, if packed, the positions of the examples and of padding after them, int64
        [width] each.
        """
        # Padding is one more document, after the examples.
        used = sum(len(tokens) - 1 for tokens in examples)
        padding = np.full(width - used + 1, self.padding)
        documents = [*examples, padding]

        # Each token's target is the next one of its document, if that belongs to an answer.
        tokens = np.concatenate([document[:-1] for document in documents])
        next_tokens = np.concatenate([document[1:] for document in documents])
        targets = np.where(next_tokens & ANSWER, next_tokens & ~ANSWER, IGNORED)
        row = {"inputs": tokens & ~ANSWER, "targets": targets}
        if self._pack:
            positions = [np.arange(len(document) - 1) for document in documents]
            row["position_ids"] = np.concatenate(positions)
        return row


def pack_documents(sizes: np.ndarray, capacity: int) -> list[list[int]]:
    """Pack documents of these sizes into sequences of `capacity`, best-fit decreasing: at most 11/9 of the optimum,
    plus 1.

    Documents in a sequence, and sequences, are in the order of the data.
    """
    sequences: list[list[int]] = []
    open_sequences: list[tuple[int, int]] = []  # free tokens and number of each sequence that is not full, sorted
    largest_first = np.argsort(-sizes, kind="stable").tolist()
    for index in largest_first:
        size = int(sizes[index])

        # Of the sequences with enough free tokens, the one with the fewest; otherwise a new one.
        tightest = bisect.bisect_left(open_sequences, (size, 0))
        if tightest < len(open_sequences):
            free, number = open_sequences.pop(tightest)
        else:
            free = capacity
            number = len(sequences)
            sequences.append([])

        sequences[number].append(index)
        if free > size:
            bisect.insort(open_sequences, (free - size, number))
    return sorted(sorted(sequence) for sequence in sequences)


def _read_template(path: str) -> str:
    """Read a chat template. Raises UserError."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.chat_template={path}: cannot be read ({error}); name a file with a template") from None


def _without_nulls(value: Any) -> Any:
    """Return the value without keys that are None: Arrow gives all objects of a column the same keys."""
    if isinstance(value, dict):
        return {key: _without_nulls(child) for key, child in value.items() if child is not None}
    if isinstance(value, list):
        return [_without_nulls(child) for child in value]
    return value


def _check_messages(row_name: str, messages: Any) -> None:
    """Raise UserError unless the value is a list of messages."""
    if isinstance(messages, list) and all(_is_message(message) for message in messages):
        return
    raise UserError(
        f"data.files: {row_name}: messages must be a list of objects with a role and a content, or tool_calls; "
        'give each message a text ("" for none), or drop the example'
    )


def _is_message(value: Any) -> bool:
    # A tool call has no text, which templates with support for tools expect.
    return isinstance(value, dict) and "role" in value and ("content" in value or "tool_calls" in value)


def _mark_answers(ids: list[int], is_answer: list[bool]) -> np.ndarray:
    """Return the tokens, int32 [n], with `ANSWER` set in those of answers."""
    flags = np.where(is_answer, ANSWER, 0).astype(np.int32)
    return np.asarray(ids, np.int32) | flags
