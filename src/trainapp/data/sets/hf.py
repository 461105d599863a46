"""Data sets through the package `datasets`: parquet, json, csv and text files, saved ones, and those of the hub."""

import glob
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from trainapp.config.targets import require_package
from trainapp.data.sets import tokenizer as tokenizers
from trainapp.data.sets.batched import Windows
from trainapp.data.sets.text import TokenStore, cache_directory, key_of, token_store
from trainapp.errors import UserError
from trainapp.units import listed
from trainapp.validation import Fraction, PositiveInt, Str

log = logging.getLogger(__name__)

BUILDERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".txt": "text", ".arrow": "arrow"}
VALIDATION = ("validation", "valid", "val", "dev", "eval")  # usual names of the split


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
    vocab_size: PositiveInt = 4096,
    context_length: PositiveInt = 128,
    val_fraction: Fraction = 0.1,
    cache_dir: Str | None = None,
) -> "Blocks | Labelled":
    """Texts for next-token prediction in blocks, or, with a column of labels, for classification.

    path: a folder that `save_to_disk` wrote, files or globs of them, a folder of files, or a name on the hub; name: its
    configuration there. val_split: None takes the split with a usual name, else the last `val_fraction` of the
    training rows. classes: their names in the order of a model; None: that of the column, or sorted; with names and
    without a label the rows can only be predicted. tokenizer: a
    folder, a tokenizer.json or a name on the hub; None trains a byte-level BPE of `vocab_size` tokens on the training
    rows. Tokens and tokenizers are kept in `cache_dir`; see `files.user_cache_dir` for the default.
    Raises UserError for a path, split or column that does not exist, and for a text too short for one block.
    """
    if path is None:
        raise UserError("data.path=null: name a data set: files, a folder, or a name on the hub")
    directory = cache_directory(cache_dir)
    train, validation, held_out = _split_rows(open_rows(path, name, directory), train_split, val_split, val_fraction)
    rows = train if split == "train" else validation
    if held_out and split == "val":
        log.info(
            "data.path=%s has no split for validation: the last %d of its %d rows (data.val_fraction=%s); all of them "
            "with data.val_split=%s", path, len(rows), len(train) + len(rows), val_fraction, train_split,
        )  # fmt: skip
    _require_columns(rows, text, label)
    if tokenizer is None:
        folder = tokenizers.trained_bpe(lambda: _texts(train, text), _fingerprint(train, text), vocab_size, directory)
        tokenizer = str(folder)

    def store(tokenizer: Any, special: bool, ending: list[int]) -> TokenStore:
        """The texts as tokens, each with `ending`. special: with those that begin and end a text for this model."""
        key = key_of(_fingerprint(rows, text), tokenizers.digest_of(tokenizer), special, ending)
        coded = lambda: tokenizers.encoded(tokenizer, _texts(rows, text), special)  # noqa: E731
        return token_store(directory, key, lambda: (ids + ending for ids in coded()))

    if label is None and classes is None:
        return Blocks(store, tokenizer, context_length, split)
    names, targets = list(classes or ()), None
    if label is not None:
        names, numbers = numbered_classes(rows, train, label, classes)
        targets = np.array([numbers[value] for value in rows[label]], np.int64)
    return Labelled(store, tokenizer, context_length, names, targets)


def open_rows(path: str | Sequence[str], name: str | None, directory: Path) -> dict[str, Any]:
    """The splits, by name. Raises UserError for a path that holds none."""
    require_package("datasets", "data=hf")
    import datasets  # late: only this data set needs it

    datasets.disable_progress_bars()
    paths, loaded = [path] if isinstance(path, str) else list(path), None
    cache = str(directory / "datasets")
    files = [match for entry in paths for match in sorted(glob.glob(str(Path(entry).expanduser()), recursive=True))]
    kinds = {Path(file).suffix for file in files}
    try:
        if len(paths) == 1 and (folder := Path(paths[0]).expanduser()).is_dir():
            if any((folder / file).exists() for file in ("state.json", "dataset_dict.json")):
                loaded = datasets.load_from_disk(str(folder))
            else:
                loaded = datasets.load_dataset(str(folder), cache_dir=cache)
        elif len(kinds) == 1 and kinds <= BUILDERS.keys():
            loaded = datasets.load_dataset(BUILDERS[kinds.pop()], data_files=files, cache_dir=cache)
        elif not files and len(paths) == 1 and not paths[0].startswith((".", "/", "~")):
            loaded = datasets.load_dataset(paths[0], name)
    except Exception as error:  # a damaged file, a name that the hub does not know, no network
        raise UserError(f"data.path={path}: cannot be read: {' '.join(str(error).split())[:300]}") from error
    if loaded is None:
        found = f"files of kinds {listed(sorted(kinds))}" if files else f"nothing, searched from {Path.cwd()}"
        raise UserError(
            f"data.path={path}: names {found}; name files of one kind ({', '.join(BUILDERS)}), a folder of them, a "
            "data set that save_to_disk wrote, or one of the hub"
        )
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}


def _split_rows(
    splits: dict[str, Any], train_split: str, val_split: str | None, val_fraction: float
) -> tuple[Any, Any, bool]:
    """`(training rows, validation rows, whether these are held out of the training rows)`."""
    for setting, chosen in (("train_split", train_split), ("val_split", val_split)):
        if chosen is not None and chosen not in splits:
            raise UserError(f"data.{setting}={chosen}: there is no such split; there are {listed(sorted(splits))}")
    train = splits[train_split]
    named = val_split or next((usual for usual in VALIDATION if usual in splits), None)
    if named is not None:
        return train, splits[named], False
    border = len(train) - int(len(train) * val_fraction)
    return train.select(range(border)), train.select(list(range(border, len(train)))), True


def _require_columns(rows: Any, text: str, label: str | None) -> None:
    """Raises UserError for one that does not exist."""
    for setting, column in (("text", text), *([("label", label)] if label else [])):
        if column not in rows.column_names:
            hint = "" if setting == "text" else (
                "; rows without labels can be predicted, with data.label=null and data.classes=[...], the names in the "
                "order of the training"
            )  # fmt: skip
            raise UserError(
                f"data.{setting}={column}: there is no such column; there are {listed(rows.column_names)}{hint}"
            )


def _texts(rows: Any, column: str) -> Iterator[str]:
    for number, value in enumerate(rows[column]):
        if not isinstance(value, str):
            raise UserError(f"data.text={column}: row {number} holds a {type(value).__name__}, not a text")
        yield value


def _fingerprint(rows: Any, column: str) -> str:
    """Of what the rows hold: `datasets` keeps one, from the files and what was done to them; a file that is written
    again gets a new one.
    """
    return key_of(rows._fingerprint, len(rows), column)


def numbered_classes(rows: Any, train: Any, label: str, wanted: list[str] | None) -> tuple[list[str], dict[Any, int]]:
    """The class names, and the class index of each label. Raises UserError for a label without a class, or a value that
    is not a label.
    """
    if wanted is not None and len(set(wanted)) < len(wanted):
        raise UserError(f"data.classes={wanted}: a class is named twice; name each once")
    names = getattr(rows.features[label], "names", None)
    try:
        values = list(range(len(names))) if names else sorted(set(train[label]) - {None})
        own = set(rows[label])
    except TypeError:  # lists, or labels of several types
        raise UserError(
            f"data.label={label}: a text has one class, a number or a name, and all of them are of one type; write one "
            "per row, or give data and loss of your own"
        ) from None
    by_name = dict(zip(map(str, names or values), values, strict=True))
    order = list(by_name) if wanted is None else list(wanted)
    missing: list[Any] = [name for name in by_name if name not in order] + sorted(own - set(values), key=str)
    if missing:
        raise UserError(
            f"data.label={label}: {listed(map(str, missing))} have no class: not among {listed(order)}, which "
            f"{'the training rows have' if wanted is None else 'data.classes names'}"
        )
    return order, {by_name[name]: number for number, name in enumerate(order) if name in by_name}


Store = Callable[[Any, bool, list[int]], TokenStore]  # the rows' texts by a tokenizer, see `open_dataset`


class Blocks(tokenizers.Tokenized, Windows):
    """Windows of the joined texts: inputs int64 [B, context_length], targets the same shifted by one token.

    A token for the end of a text is between two of them, where the tokenizer has one; a block may hold several texts,
    which see each other, as is usual where a model is trained from scratch.
    """

    def __init__(self, store: Store, tokenizer: str, context_length: int, split: str):
        tokenizers.Tokenized.__init__(self, tokenizer)
        end = self.tokenizer.eos_token_id
        texts = store(self.tokenizer, False, [] if end is None else [end])
        Windows.__init__(self, texts.tokens, context_length, len(self.tokenizer))
        if not len(self) and (split == "train" or len(texts.lengths)):
            raise UserError(
                f"data.context_length={context_length}: the {split} split has {len(texts.tokens)} tokens, and one "
                f"block needs {context_length + 1}; give more text, a shorter context or another data.val_fraction"
            )


class Labelled(tokenizers.Tokenized):
    """Texts and classes: inputs int64 [B, T], attention_mask int64 [B, T] with 0 where padded to the longest of the
    batch, targets int64 [B] where the rows have labels.

    Texts longer than `context_length` tokens are cut, which is said once. The classes are those of the column where it
    has names, else the values in the training rows, sorted.
    """

    task = "classification"

    def __init__(
        self, store: Store, tokenizer: str, context_length: int, classes: list[str], targets: np.ndarray | None
    ):
        super().__init__(tokenizer)
        self.class_names, self._targets = classes, targets
        self._texts = store(self.tokenizer, True, [])
        self._special = frozenset(self.tokenizer.all_special_ids)
        self._longest, self._padding = context_length, tokenizers.padding_of(self.tokenizer)
        self.spec: dict[str, Any] = {
            "vocab_size": len(self.tokenizer),
            "context_length": context_length,
            "num_classes": len(classes),
            "classes": classes,
            "pad_token_id": self._padding,
        }
        cut = int((self._texts.lengths > context_length).sum())
        if cut:
            log.warning("data.context_length=%d: %d of %d texts are longer, and cut", context_length, cut, len(self))

    def __len__(self) -> int:
        return len(self._texts.lengths)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """The batch of these texts, collated. Raises IndexError for an index outside the data."""
        positions = self._positions(indices)
        texts = [self._cut(self._texts.document(position)) for position in positions]
        shape = (len(texts), max(1, *map(len, texts)) if texts else 1)
        inputs, mask = np.full(shape, self._padding, np.int64), np.zeros(shape, np.int64)
        for row, text in enumerate(texts):
            inputs[row, : len(text)], mask[row, : len(text)] = text, 1
        batch = {"inputs": torch.from_numpy(inputs), "attention_mask": torch.from_numpy(mask)}
        if self._targets is not None:
            batch["targets"] = torch.from_numpy(self._targets[positions])
        return batch

    def _cut(self, text: np.ndarray) -> np.ndarray:
        """At most `context_length` tokens. A special token at the end, such as BERT's [SEP], stays there."""
        if len(text) <= self._longest:
            return text
        kept = text[: self._longest].copy()
        if int(text[-1]) in self._special:
            kept[-1] = text[-1]
        return kept
