"""Texts read with the package `datasets` and tokenised with Transformers: `data=hf`."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch.nn.utils.rnn import pad_sequence

from trainapp.data.sets.hf_rows import Classes, number_classes, open_rows, split_rows
from trainapp.data.sets.tokenized import Tokenized, cache_key, train_bpe
from trainapp.errors import UserError
from trainapp.files import cache_directory
from trainapp.units import listed
from trainapp.validation import Fraction, PositiveInt, Str


def open_dataset(
    split: Literal["train", "val"],
    path: Str | list[Str] | None = None,
    name: Str | None = None,
    train_split: Str = "train",
    val_split: Str | None = None,
    text: Str = "text",
    label: Str | None = None,
    classes: list[Str] | None = None,
    tokenizer: Str | None = None,
    vocab_size: Annotated[int, Field(ge=257, strict=True)] = 4096,  # the bytes and the end-of-text token
    context_length: PositiveInt = 128,
    val_fraction: Fraction = 0.1,
    cache_dir: Str | None = None,
) -> "Blocks | Labelled":
    """Open texts for next-token prediction in blocks, or, with a column of labels, for classification.

    conf/data/hf.yaml describes the arguments. Rows with `classes` but no label column can only be predicted. Tokens and
    tokenizers are cached in `cache_dir`. Raises UserError for a path, split or column that does not exist, and for text
    too short for one block.
    """
    if path is None:
        raise UserError("data.path=null: name a data set: files, a folder, or a name on the hub")
    directory = cache_directory(cache_dir)
    splits = open_rows(path, name, directory)
    rows, train_rows = split_rows(splits, split, train_split, val_split, val_fraction)
    _require_column(rows, "text", text)
    if label:
        _require_column(rows, "label", label)

    # Without a tokenizer, one is trained on the training texts.
    if tokenizer is None:
        fingerprint = cache_key(train_rows._fingerprint, len(train_rows), text)
        bpe_folder = train_bpe(lambda: _texts(train_rows[text], text), fingerprint, vocab_size, directory)
        tokenizer = str(bpe_folder)

    if label is None and classes is None:
        return Blocks(rows, text, tokenizer, context_length, directory, split)
    if label is None:
        numbered_classes: Classes = (list(classes or ()), None)
    else:
        numbered_classes = number_classes(rows, train_rows, label, classes)
    return Labelled(rows, text, tokenizer, context_length, directory, numbered_classes)


def _require_column(rows: Any, setting: str, column: str) -> None:
    """Raise UserError unless the rows have the column that a setting names."""
    if column not in rows.column_names:
        raise UserError(f"data.{setting}={column}: there is no such column; columns: {listed(rows.column_names)}")


def _texts(values: Iterable[Any], column: str, first_row: int = 0) -> Iterator[str]:
    """Yield the values of a column. Raises UserError for one that is no text."""
    for number, value in enumerate(values, first_row):
        if not isinstance(value, str):
            raise UserError(f"data.text={column}: row {number} holds a {type(value).__name__}, not a text")
        yield value


class Blocks(Tokenized):
    """Windows of the joined texts: inputs int64 [B, context_length], targets the same shifted by one token.

    Texts are separated by the end-of-text token, if the tokenizer has one. A block may hold several texts, which see
    each other, as is usual for training from scratch.
    """

    task = "next_token"

    def __init__(self, rows: Any, text: str, tokenizer: str, context_length: int, directory: Path, split: str):
        super().__init__(tokenizer)
        self.spec: dict[str, Any] = {"vocab_size": len(self.tokenizer), "context_length": context_length}
        separator = [] if self.end_of_text is None else [self.end_of_text]
        pending: list[int] = []  # tokens after the last full block, whose last target is the first input of the next

        def split_into_blocks(batch: dict[str, Any], row_numbers: list[int]) -> dict[str, Any]:
            # Append the tokens of these texts to what earlier ones have left.
            texts = list(_texts(batch[text], text, row_numbers[0]))
            coded = self.tokenizer(texts, add_special_tokens=False, verbose=False)
            for ids in coded["input_ids"]:
                pending.extend(ids)
                pending.extend(separator)

            # Cut off the full blocks.
            starts = range(0, len(pending) - context_length, context_length)
            blocks = [pending[start : start + context_length + 1] for start in starts]
            del pending[: len(starts) * context_length]
            return {"tokens": blocks}

        self._tokenize(rows, split_into_blocks, directory, "blocks", text, context_length)
        if not len(self) and (split == "train" or len(rows)):
            raise UserError(
                f"data.context_length={context_length}: the texts of the {split} split are shorter than one block, "
                f"{context_length + 1} tokens; give more text, a shorter context or another data.val_fraction"
            )

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        documents = self._tokens(self._positions(indices).tolist())
        blocks = torch.from_numpy(np.stack(documents))
        return {"inputs": blocks[:, :-1].contiguous(), "targets": blocks[:, 1:].contiguous()}


class Labelled(Tokenized):
    """Texts and classes: inputs int64 [B, T], padded to the batch's longest text; attention_mask int64 [B, T], 0 for
    padding; targets int64 [B] if the rows have labels.

    Texts longer than `context_length` tokens are cut, as by Transformers. The classes are the column's names if it has
    any, otherwise the values in the training rows, sorted.
    """

    task = "classification"

    def __init__(self, rows: Any, text: str, tokenizer: str, context_length: int, directory: Path, classes: Classes):
        super().__init__(tokenizer)
        self.class_names, self._targets = classes

        def truncate(batch: dict[str, Any], row_numbers: list[int]) -> dict[str, Any]:
            texts = list(_texts(batch[text], text, row_numbers[0]))
            coded = self.tokenizer(texts, truncation=True, max_length=context_length)
            tokens = [ids or [self.padding] for ids in coded["input_ids"]]  # a model needs at least one token
            return {"tokens": tokens}

        self._tokenize(rows, truncate, directory, "labelled", text, context_length)
        self.spec: dict[str, Any] = {
            "vocab_size": len(self.tokenizer),
            "context_length": context_length,
            "num_classes": len(self.class_names),
            "classes": self.class_names,
            "pad_token_id": self.padding,
        }

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        positions = self._positions(indices).tolist()
        texts = [torch.from_numpy(tokens) for tokens in self._tokens(positions)]
        masks = [torch.ones_like(text) for text in texts]
        inputs = pad_sequence(texts, batch_first=True, padding_value=self.padding)
        mask = pad_sequence(masks, batch_first=True)
        batch = {"inputs": inputs, "attention_mask": mask}
        if self._targets is not None:
            batch["targets"] = self._targets[positions]
        return batch
