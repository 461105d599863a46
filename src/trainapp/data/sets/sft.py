"""Prompts and answers, or conversations, for supervised fine-tuning: the loss is on the answers alone."""

import bisect
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from trainapp.data.sets import tokenizer as tokenizers
from trainapp.data.sets.examples import ANSWER, message_tokens, prompt_tokens, read_examples, tokenized
from trainapp.data.sets.token_store import cache_directory, find_files, key_of, stamps, token_store
from trainapp.errors import UserError
from trainapp.validation import Bool, Fraction, PositiveInt, Str

log = logging.getLogger(__name__)

IGNORED = -100  # the target of a token that no loss counts


class SupervisedFineTuning(tokenizers.Tokenized):
    """Examples from JSON lines: inputs int64 [B, T], targets int64 [B, T] the same shifted by one token, -100 where the
    next token is not one of an answer.

    files: paths or globs of .jsonl files, or of .json files that hold a list. An example has a text under the keys
    `prompt` and `answer`, or under `messages` a list of `{role, content}`, which the tokenizer's chat template turns
    into text; answers are then the assistant's messages.
    pack: several examples share a sequence of exactly `context_length` tokens. `position_ids`, int64 [B, T], restart
    with each: models of Transformers then attend within an example only. Without it a batch is padded at its end to its
    longest example; a causal model needs no mask for that.
    chat_template: a file in place of the tokenizer's own. val_fraction: of the examples, the last ones.
    Examples longer than `context_length` are cut at their end; those that then have no answer are left out. Both are
    said once. Raises UserError for a line that is no example, and where a split has none.
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
        paths, keys = find_files(files), (prompt, answer, messages)
        template = str(getattr(self.tokenizer, "chat_template", None))
        key = key_of("sft", stamps(paths), tokenizers.digest_of(self.tokenizer), template, keys)
        documents = lambda: tokenized(read_examples(paths), self.tokenizer, keys)  # noqa: E731
        store = token_store(cache_directory(cache_dir), key, documents)
        border = len(store) - int(len(store) * val_fraction)
        chosen = range(border, len(store)) if split == "val" else range(border)
        self._store, self._longest, self._pack = store, context_length, pack
        first = next(read_examples(paths), None)
        self._has_messages = first is not None and messages in first.row
        self._padding = tokenizers.padding_of(self.tokenizer)
        usable = self._usable(chosen, split)
        self._sequences = packed(store.lengths, usable, context_length + 1) if pack else [[index] for index in usable]
        self.spec: dict[str, Any] = {
            "vocab_size": len(self.tokenizer),
            "context_length": context_length,
            "pad_token_id": self._padding,
        } | ({"packed": True} if pack else {})

    def _usable(self, chosen: range, split: str) -> list[int]:
        """The examples of which an answer is left when they are cut. Raises UserError where there are none."""
        longest = self._longest + 1  # tokens: the last one is a target only
        cut = int((self._store.lengths[chosen.start : chosen.stop] > longest).sum())
        lost = {index for index in chosen if not (self._store.document(index)[1:longest] & ANSWER).any()}
        if cut or lost:
            log.warning(
                "data.context_length=%d: of %d examples of the %s split %d are longer and cut, and %d are left out, "
                "since nothing of an answer is left",
                self._longest,
                len(chosen),
                split,
                cut,
                len(lost),
            )
        if len(lost) == len(chosen) and (chosen or split == "train"):
            raise UserError(
                f"data.context_length={self._longest}: no example of the {split} split has an answer that fits; use a "
                "longer context, or other files"
            )
        return [index for index in chosen if index not in lost]

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt, as before an `answer`; where the first example has messages, as the chat template
        writes a user's message before the assistant's.
        """
        if self._has_messages:
            return message_tokens(text, self.tokenizer)
        return prompt_tokens(text, self.tokenizer)

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """The batch of these sequences, collated. Raises IndexError for an index outside the data."""
        chosen = [self._sequences[position] for position in self._positions(indices)]
        documents = [[self._store.document(index)[: self._longest + 1] for index in sequence] for sequence in chosen]
        lengths = [sum(len(document) - 1 for document in sequence) for sequence in documents]
        shape = (len(chosen), self._longest if self._pack else max(lengths, default=1))
        inputs, targets = np.full(shape, self._padding, np.int64), np.full(shape, IGNORED, np.int64)
        positions = np.zeros(shape, np.int64)
        for row, sequence in enumerate(documents):
            start = 0
            for document in sequence:
                end = start + len(document) - 1
                ids, next_ids = document[:-1] & ~ANSWER, document[1:]
                inputs[row, start:end] = ids
                targets[row, start:end] = np.where(next_ids & ANSWER, next_ids & ~ANSWER, IGNORED)
                positions[row, start:end] = np.arange(end - start)
                start = end
            positions[row, start:] = np.arange(shape[1] - start)  # padding is a document of its own
        batch = {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}
        return batch | ({"position_ids": torch.from_numpy(positions)} if self._pack else {})


def packed(lengths: np.ndarray, indices: Sequence[int], room: int) -> list[list[int]]:
    """The documents in sequences of `room` - 1 inputs: each goes where it leaves the least room, the longest first.

    lengths: tokens of each; one of n tokens has n - 1 inputs. Within a sequence, and of sequences, in the order of the
    data. (Best-fit decreasing: at most 11/9 of the fewest sequences possible, and 1.)
    """
    sequences: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # numbers of sequences
    rooms: list[int] = []  # the keys of `by_room`, sorted
    for index in sorted(indices, key=lambda index: (-lengths[index], index)):
        size = min(int(lengths[index]), room) - 1
        place = bisect.bisect_left(rooms, size)
        if place == len(rooms):
            left, number = room - 1, len(sequences)
            sequences.append([])
        else:
            left = rooms[place]
            number = by_room[left].pop()
            if not by_room[left]:
                del by_room[left], rooms[place]
        sequences[number].append(index)
        left -= size
        if left and left not in by_room:
            bisect.insort(rooms, left)
        if left:
            by_room.setdefault(left, []).append(number)
    return sorted(sorted(sequence) for sequence in sequences)


def _template(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.chat_template={path}: cannot be read ({error}); name a file with a template") from None
