"""Texts read with the package `datasets` and tokenised with Transformers: `data=hf`. Both are imported late."""

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch.nn.utils.rnn import pad_sequence

from trainapp.config.targets import require_package
from trainapp.data.loader import BatchedDataset
from trainapp.errors import UserError
from trainapp.files import cache_directory
from trainapp.units import listed
from trainapp.validation import Fraction, PositiveInt, Str

log = logging.getLogger(__name__)

BUILDERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".txt": "text", ".arrow": "arrow"}
Classes = tuple[list[str], torch.Tensor | None]  # their names, and the class of each row, int64 [N], if known
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
    vocab_size: Annotated[int, Field(ge=257, strict=True)] = 4096,  # the bytes and the end-of-text token
    context_length: PositiveInt = 128,
    val_fraction: Fraction = 0.1,
    cache_dir: Str | None = None,
) -> "Blocks | Labelled":
    """Texts for next-token prediction in blocks, or, with a column of labels, for classification.

    conf/data/hf.yaml describes the arguments. Rows with `classes` but no label column can only be predicted. Tokens and
    tokenizers are cached in `cache_dir`. Raises UserError for a path, split or column that does not exist, and for text
    too short for one block.
    """
    if path is None:
        raise UserError("data.path=null: name a data set: files, a folder, or a name on the hub")
    directory = cache_directory(cache_dir)
    rows, train = split_rows(open_rows(path, name, directory), split, train_split, val_split, val_fraction)
    for setting, column in (("text", text), *([("label", label)] if label else [])):
        if column not in rows.column_names:
            raise UserError(f"data.{setting}={column}: there is no such column; columns: {listed(rows.column_names)}")
    if tokenizer is None:
        key = key_of(train._fingerprint, len(train), text)
        tokenizer = str(trained_bpe(lambda: _texts(train[text], text), key, vocab_size, directory))
    if label is None and classes is None:
        return Blocks(rows, text, tokenizer, context_length, directory, split)
    found = (list(classes or ()), None) if label is None else numbered_classes(rows, train, label, classes)
    return Labelled(rows, text, tokenizer, context_length, directory, found)


# --- rows


def key_of(*parts: Any) -> str:
    """A cache key from plain values."""
    return hashlib.sha256("\0".join(map(repr, parts)).encode()).hexdigest()


def open_rows(path: str | Sequence[str], name: str | None, directory: Path, setting: str = "path") -> dict[str, Any]:
    """The splits, by name. setting: the setting of `data`, for messages. Raises UserError if the path holds none."""
    require_package("datasets", f"data.{setting}={path}")
    import datasets  # late: only these data sets need it

    datasets.disable_progress_bars()
    cache = str(directory / "datasets")
    entries = [os.path.expanduser(entry) for entry in ([path] if isinstance(path, str) else path)]
    kinds, first = {BUILDERS.get(Path(entry).suffix) for entry in entries}, "".join(entries[:1])
    is_folder = len(entries) == 1 and os.path.isdir(first)
    try:
        if is_folder and {"state.json", "dataset_dict.json"} & set(os.listdir(first)):
            loaded = datasets.load_from_disk(first)
        elif is_folder:
            loaded = datasets.load_dataset(first, cache_dir=cache)
        elif len(kinds) == 1 and None not in kinds:
            loaded = datasets.load_dataset(kinds.pop(), data_files=entries, cache_dir=cache)
        elif len(entries) == 1 and not os.path.exists(first) and first[0] not in "./" and "*" not in first:
            loaded = datasets.load_dataset(first, name)
        else:
            raise ValueError(f"name files of one kind ({', '.join(BUILDERS)}), a folder, or a data set on the hub")
    except Exception as error:  # a missing or damaged file, a name unknown to the hub, no network
        raise UserError(f"data.{setting}={path}: cannot be read: {' '.join(str(error).split())[:300]}") from error
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}


def split_rows(
    splits: dict[str, Any], split: str, train_split: str, val_split: str | None, val_fraction: float
) -> tuple[Any, Any]:
    """The rows of this split, and the training rows. Raises UserError for a name that no split has."""
    for setting, chosen in (("train_split", train_split), ("val_split", val_split)):
        if chosen is not None and chosen not in splits:
            raise UserError(f"data.{setting}={chosen}: there is no such split; splits: {listed(sorted(splits))}")
    train = splits[train_split]
    named = val_split or next((usual for usual in VALIDATION if usual in splits), None)
    if named is not None:
        return train if split == "train" else splits[named], train
    border = len(train) - int(len(train) * val_fraction)
    kept, held_out = train.select(range(border)), train.select(list(range(border, len(train))))
    if split == "train":
        return kept, kept
    log.info("data.val_fraction=%s: the last %d of %d rows are for validation", val_fraction, len(held_out), len(train))
    return held_out, kept


@contextlib.contextmanager
def once(directory: Path, name: str) -> Iterator[None]:
    """Use around making a file in the cache: ranks that start together wait for the first, and find its file. Raises
    UserError for a folder that cannot be written.
    """
    from filelock import FileLock  # as late as `datasets`, which needs it

    try:
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(directory / f"{name}.lock"):
            yield
    except OSError as error:
        raise UserError(
            f"data.cache_dir={directory}: cannot be written ({error}); name another folder, or set TRAINAPP_CACHE"
        ) from error


def _texts(values: Iterable[Any], column: str, first: int = 0) -> Iterator[str]:
    for number, value in enumerate(values, first):
        if not isinstance(value, str):
            raise UserError(f"data.text={column}: row {number} holds a {type(value).__name__}, not a text")
        yield value


def numbered_classes(rows: Any, train: Any, label: str, names: list[str] | None) -> Classes:
    """The class names, and the class of each row, int64 [N]. Raises UserError for a label without a class, or a value
    that cannot be a label.
    """
    by_number = dict(enumerate(getattr(rows.features[label], "names", ())))  # of a column with class names
    try:
        labels = [str(by_number.get(value, value)) for value in rows[label]]
        found = list(by_number.values()) or [str(value) for value in sorted(set(train[label]) - {None})]
    except TypeError:  # lists, or labels of several types
        raise UserError(
            f"data.label={label}: a text has one class, a number or a name, all of the same type; write one per row, "
            "or use your own data and loss"
        ) from None
    numbers = {name: number for number, name in enumerate(found if names is None else names)}
    if missing := sorted({*labels} - {*numbers}):
        raise UserError(
            f"data.label={label}: {listed(missing)} have no class: not among {listed(list(numbers))}, which "
            f"{'the training rows have' if names is None else 'data.classes names'}"
        )
    return list(numbers), torch.tensor([numbers[own] for own in labels])


# --- tokenizers


def load_tokenizer(name: str) -> Any:
    """A tokenizer from a folder, a `tokenizer.json`, or a name on the hub. Raises UserError if it cannot be loaded.

    Without a pad token, it pads with the end-of-text token.
    """
    require_package("transformers", f"data.tokenizer={name}")
    import transformers  # late: only these data sets need it

    path = os.path.expanduser(name)
    try:
        if os.path.isfile(path):
            tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=path)
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    except Exception as error:  # missing files raise nearly anything
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"data.tokenizer={name}: holds no tokenizer that Transformers can read ({reason}); name a folder with one, "
            "a tokenizer.json, or a model on the hub"
        ) from None
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def trained_bpe(texts: Callable[[], Iterable[str]], fingerprint: str, vocab_size: int, directory: Path) -> Path:
    """A folder with a byte-level BPE of at most `vocab_size` tokens, trained on the texts or by an earlier run.

    fingerprint: identifies the texts.
    """
    import transformers  # installed with `datasets`, which has read the texts

    folder = directory / f"bpe-{key_of(fingerprint, vocab_size)}"
    with once(directory, folder.name):
        if not folder.is_dir():
            trained = transformers.GPT2Tokenizer().train_new_from_iterator(texts(), vocab_size, show_progress=False)
            trained.save_pretrained(f"{folder}.tmp")
            os.rename(f"{folder}.tmp", folder)
    return folder


# --- data sets


class Tokenized(BatchedDataset):
    """The base of data sets with a tokenizer. name: a folder, a tokenizer.json or a name on the hub.

    Attributes: `tokenizer`; `padding`, the token that pads batches, never counted in a loss; `end_of_text`, the token
    that ends a text, or None; `vocabulary`, a digest of the tokens' meaning, stable across versions of the packages.
    """

    def __init__(self, name: str):
        self.tokenizer = load_tokenizer(name)
        self.padding = int(self.tokenizer.pad_token_id or 0)
        self.end_of_text: int | None = self.tokenizer.eos_token_id
        self.vocabulary = key_of(sorted(self.tokenizer.get_vocab().items()))

    def _tokenize(self, rows: Any, function: Callable[..., dict[str, Any]], directory: Path, *parts: Any) -> None:
        """Apply a function to the rows, once: its tokens are kept in a memory-mapped file in the directory.

        function: takes a batch of rows and their indices, and returns `tokens`, a list of documents. parts: what
        determines these besides rows and tokenizer; `datasets` knows whether the rows' files have changed.
        """
        import datasets

        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        rules = self.vocabulary if backend is None else backend.to_str()
        special = {name: str(value) for name, value in self.tokenizer.special_tokens_map.items()}
        key = key_of(rows._fingerprint, len(rows), type(self.tokenizer).__name__, rules, special, *parts)
        with once(directory, f"tokens-{key}"):
            self._documents = rows.map(
                function,
                with_indices=True,
                batched=True,
                remove_columns=rows.column_names,
                features=datasets.Features(tokens=datasets.Sequence(datasets.Value("int32"))),
                cache_file_name=str(directory / f"tokens-{key}.arrow"),
                new_fingerprint=key,  # the default hashes the tokenizer, which changes when used
            ).with_format("arrow")

    def __len__(self) -> int:
        return len(self._documents)

    def _tokens(self, indices: list[int]) -> list[np.ndarray]:
        """The tokens of these documents, int64 [n] each."""
        tokens = self._documents[indices]["tokens"].combine_chunks()
        ends = np.cumsum(tokens.value_lengths().to_numpy())
        return np.split(tokens.flatten().to_numpy().astype(np.int64), ends[:-1])

    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer into a folder."""
        self.tokenizer.save_pretrained(str(folder))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text to continue: as in a block, without special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the tokens, without special ones."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


class Blocks(Tokenized):
    """Windows of the joined texts: inputs int64 [B, context_length], targets the same shifted by one token.

    Texts are separated by the end-of-text token, if the tokenizer has one. A block may hold several texts, which see
    each other, as is usual for training from scratch.
    """

    task = "next_token"

    def __init__(self, rows: Any, text: str, tokenizer: str, context_length: int, directory: Path, split: str):
        super().__init__(tokenizer)
        self.spec: dict[str, Any] = {"vocab_size": len(self.tokenizer), "context_length": context_length}
        ending = [] if self.end_of_text is None else [self.end_of_text]
        rest: list[int] = []  # tokens since the last full block, whose last target is the first input of the next

        def blocks(batch: dict[str, Any], numbers: list[int]) -> dict[str, Any]:
            texts = list(_texts(batch[text], text, numbers[0]))
            for ids in self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
                rest.extend([*ids, *ending])
            starts = range(0, len(rest) - context_length, context_length)
            found = [rest[start : start + context_length + 1] for start in starts]
            del rest[: len(starts) * context_length]
            return {"tokens": found}

        self._tokenize(rows, blocks, directory, "blocks", text, context_length)
        if not len(self) and (split == "train" or len(rows)):
            raise UserError(
                f"data.context_length={context_length}: the texts of the {split} split are shorter than one block, "
                f"{context_length + 1} tokens; give more text, a shorter context or another data.val_fraction"
            )

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        blocks = torch.from_numpy(np.stack(self._tokens(self._positions(indices).tolist())))
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

        def cut(batch: dict[str, Any], numbers: list[int]) -> dict[str, Any]:
            texts = list(_texts(batch[text], text, numbers[0]))
            ids = self.tokenizer(texts, truncation=True, max_length=context_length)["input_ids"]
            return {"tokens": [own or [self.padding] for own in ids]}  # a model has at least one

        self._tokenize(rows, cut, directory, "labelled", text, context_length)
        self.spec: dict[str, Any] = {
            "vocab_size": len(self.tokenizer),
            "context_length": context_length,
            "num_classes": len(self.class_names),
            "classes": self.class_names,
            "pad_token_id": self.padding,
        }

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        positions = self._positions(indices).tolist()
        texts = list(map(torch.from_numpy, self._tokens(positions)))
        mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
        inputs = pad_sequence(texts, batch_first=True, padding_value=self.padding)
        batch = {"inputs": inputs, "attention_mask": mask}
        return batch if self._targets is None else batch | {"targets": self._targets[positions]}
