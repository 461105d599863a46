"""Texts read with the package `datasets` and tokenised with Transformers: `data=hf`. Both are imported late."""

import contextlib
import glob
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from trainapp.config.targets import require_package
from trainapp.data.loader import BatchedDataset
from trainapp.errors import UserError
from trainapp.files import user_cache_dir
from trainapp.units import listed
from trainapp.validation import Fraction, PositiveInt, Str

log = logging.getLogger(__name__)

BUILDERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".txt": "text", ".arrow": "arrow"}
VALIDATION = ("validation", "valid", "val", "dev", "eval")  # usual names of the split
END = "<|endoftext|>"  # end-of-document token of a BPE trained here


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

    path: a folder that `save_to_disk` wrote, files or globs, a folder of files, or a name on the hub; name: its
    configuration there. val_split: None uses the split with a usual name, otherwise the last `val_fraction` of the
    training rows. classes: names in the model's order; None: the column's order, or sorted; rows with names but no
    label column can only be predicted. tokenizer: a folder, a tokenizer.json or a name on the hub; None trains a
    byte-level BPE of `vocab_size` tokens on the training rows. Tokens and tokenizers are cached in `cache_dir`; see
    `files.user_cache_dir` for the default. Raises UserError for a path, split or column that does not exist, and for a
    text too short for one block.
    """
    if path is None:
        raise UserError("data.path=null: name a data set: files, a folder, or a name on the hub")
    directory = cache_directory(cache_dir)
    splits = open_rows(path, name, directory)
    train, validation, held_out = split_rows(splits, train_split, val_split, val_fraction)
    rows = train if split == "train" else validation
    if held_out and split == "val":
        log.info(
            "data.path=%s has no split for validation: the last %d of its %d rows (data.val_fraction=%s); all of them "
            "with data.val_split=%s", path, len(rows), len(train) + len(rows), val_fraction, train_split,
        )  # fmt: skip
    for setting, column in (("text", text), *([("label", label)] if label else [])):
        if column not in rows.column_names:
            raise UserError(f"data.{setting}={column}: there is no such column; there are {listed(rows.column_names)}")
    if tokenizer is None:
        key = key_of(train._fingerprint, len(train), text)
        tokenizer = str(trained_bpe(lambda: _texts(train[text], text), key, vocab_size, directory))
    if label is None and classes is None:
        return Blocks(rows, text, tokenizer, context_length, directory, split)
    names, targets = list(classes or ()), None
    if label is not None:
        names, targets = numbered_classes(rows, train, label, classes)
    return Labelled(rows, text, tokenizer, context_length, directory, names, targets)


# --- rows


def cache_directory(setting: str | None) -> Path:
    """`data.cache_dir`, or the user's cache directory."""
    return user_cache_dir() if setting is None else Path(setting).expanduser()


def key_of(*parts: Any) -> str:
    """A cache key from plain values."""
    return hashlib.sha256("\0".join(map(repr, parts)).encode()).hexdigest()


def open_rows(path: str | Sequence[str], name: str | None, directory: Path, setting: str = "path") -> dict[str, Any]:
    """The splits, by name. setting: the setting of `data`, for messages. Raises UserError if the path holds none."""
    require_package("datasets", f"data.{setting}={path}")
    import datasets  # late: only these data sets need it

    datasets.disable_progress_bars()
    paths, loaded = [path] if isinstance(path, str) else list(path), None
    cache = str(directory / "datasets")
    files = [match for entry in paths for match in sorted(glob.glob(str(Path(entry).expanduser()), recursive=True))]
    kinds = {BUILDERS.get(Path(file).suffix, "") for file in files}
    is_name = len(paths) == 1 and not paths[0].startswith((".", "/", "~")) and Path(paths[0]).suffix not in BUILDERS
    try:
        if len(paths) == 1 and (folder := Path(paths[0]).expanduser()).is_dir():
            if any((folder / file).exists() for file in ("state.json", "dataset_dict.json")):
                loaded = datasets.load_from_disk(str(folder))
            else:
                loaded = datasets.load_dataset(str(folder), cache_dir=cache)
        elif len(kinds) == 1 and "" not in kinds:
            loaded = datasets.load_dataset(kinds.pop(), data_files=files, cache_dir=cache)
        elif not files and is_name:
            loaded = datasets.load_dataset(paths[0], name)
    except Exception as error:  # a damaged file, a name unknown to the hub, no network
        raise UserError(f"data.{setting}={path}: cannot be read: {' '.join(str(error).split())[:300]}") from error
    if loaded is None:
        raise UserError(
            f"data.{setting}={path}: names {len(files)} files, searched from {Path.cwd()}, which are not a data set; "
            f"name files of one kind ({', '.join(BUILDERS)}), a folder, or a data set of the hub"
        )
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}


def split_rows(
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


def tokenized(
    rows: Any, function: Callable[..., dict[str, Any]], directory: Path, *parts: Any, numbers: Sequence[str] = ()
) -> Any:
    """`rows.map(function)`, written into the directory once, and memory-mapped; read as Arrow, see `documents`.

    function: takes a batch of rows and their indices, and returns `tokens`; with `numbers`, takes a single row and also
    returns these values. parts: everything else that determines the result; `datasets` knows whether the rows' files
    have changed.
    """
    import datasets

    key = key_of(rows._fingerprint, len(rows), *parts)
    features = {"tokens": datasets.Sequence(datasets.Value("int32"))} | {n: datasets.Value("int64") for n in numbers}
    with once(directory, f"tokens-{key}"):
        return rows.map(
            function,
            with_indices=True,
            batched=not numbers,
            remove_columns=rows.column_names,
            features=datasets.Features(features),
            cache_file_name=str(directory / f"tokens-{key}.arrow"),
            new_fingerprint=key,  # the default hashes the tokenizer, which changes when used
        ).with_format("arrow")


@contextlib.contextmanager
def once(directory: Path, name: str) -> Iterator[None]:
    """Around the making of a file in the cache: ranks that start together wait for the first, and find its file. Raises
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


def documents(rows: Any, indices: list[int]) -> list[np.ndarray]:
    """The tokens of these rows of `tokenized`, int64 [n] each."""
    tokens = rows[indices]["tokens"].combine_chunks()
    ends = np.cumsum(tokens.value_lengths().to_numpy())
    return np.split(tokens.flatten().to_numpy().astype(np.int64), ends[:-1])


def _texts(values: Iterable[Any], column: str, first: int = 0) -> Iterator[str]:
    for number, value in enumerate(values, first):
        if not isinstance(value, str):
            raise UserError(f"data.text={column}: row {number} holds a {type(value).__name__}, not a text")
        yield value


def numbered_classes(rows: Any, train: Any, label: str, wanted: list[str] | None) -> tuple[list[str], torch.Tensor]:
    """The class names, and the class of each row, int64 [N]. Raises UserError for a label without a class, or a value
    that cannot be a label.
    """
    by_number = dict(enumerate(getattr(rows.features[label], "names", ())))  # of a column that knows its names
    try:
        labels = [str(by_number.get(value, value)) for value in rows[label]]
        found = list(by_number.values()) or [str(value) for value in sorted(set(train[label]) - {None})]
    except TypeError:  # lists, or labels of several types
        raise UserError(
            f"data.label={label}: a text has one class, a number or a name, all of the same type; write one per row, "
            "or use your own data and loss"
        ) from None
    names = found if wanted is None else list(wanted)
    numbers = {name: number for number, name in enumerate(names)}
    if missing := sorted({*labels} - {*names}):
        raise UserError(
            f"data.label={label}: {listed(missing)} have no class: not among {listed(names)}, which "
            f"{'the training rows have' if wanted is None else 'data.classes names'}"
        )
    return names, torch.tensor([numbers[own] for own in labels])


# --- tokenizers


def load_tokenizer(name: str) -> Any:
    """A tokenizer from a folder, a `tokenizer.json`, or a name on the hub. Raises UserError if it cannot be loaded.

    Without a pad token, it pads with the end-of-text token.
    """
    require_package("transformers", f"data.tokenizer={name}")
    import transformers  # late: only these data sets need it

    path = Path(name).expanduser()
    try:
        if path.is_file():
            tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(path) if path.is_dir() else name)
    except Exception as error:  # missing files raise nearly anything
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"data.tokenizer={name}: holds no tokenizer that Transformers can read ({reason}); name a folder with one, "
            "a tokenizer.json, or a model of the hub"
        ) from None
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def digest_of(tokenizer: Any) -> str:
    """A digest of everything that affects its tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str()
    special = {name: str(value) for name, value in tokenizer.special_tokens_map.items()}
    return key_of(type(tokenizer).__name__, rules, special)


def trained_bpe(texts: Callable[[], Iterable[str]], fingerprint: str, vocab_size: int, directory: Path) -> Path:
    """A folder with a byte-level BPE of at most `vocab_size` tokens, trained on the texts or by an earlier run.

    fingerprint: identifies the texts. Raises UserError for a vocabulary smaller than the bytes.
    """
    if vocab_size < 257:
        raise UserError(f"data.vocab_size={vocab_size}: must be at least 257, the bytes and {END}")
    folder = directory / f"bpe-{key_of(fingerprint, vocab_size)}"
    if (folder / "tokenizer.json").is_file():
        return folder
    require_package("transformers", "data=hf")
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts(), trainer)
    ready = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, bos_token=END)
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=directory) as temporary:
        ready.save_pretrained(f"{temporary}/bpe")
        with contextlib.suppress(OSError):  # another process was first
            os.rename(f"{temporary}/bpe", folder)
    return folder


# --- data sets


class Tokenized(BatchedDataset):
    """name: the tokenizer: a folder, a tokenizer.json or a name on the hub.

    Attributes: `tokenizer`; `padding`, the token that pads batches, never counted in a loss; `vocabulary`, a digest of
    the tokens' meaning, stable across versions of the packages.
    """

    def __init__(self, name: str):
        self.tokenizer = load_tokenizer(name)
        self.padding = int(self.tokenizer.pad_token_id or 0)
        self.vocabulary = hashlib.sha256(repr(sorted(self.tokenizer.get_vocab().items())).encode()).hexdigest()

    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer into a folder."""
        self.tokenizer.save_pretrained(str(folder))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text to continue: as in a block, without special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the tokens, without special ones."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    @property
    def end_of_text(self) -> int | None:
        """The token that ends a text, if the tokenizer has one."""
        end: int | None = self.tokenizer.eos_token_id
        return end


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

        self._blocks = tokenized(rows, blocks, directory, "blocks", text, digest_of(self.tokenizer), context_length)
        if not len(self) and (split == "train" or len(rows)):
            raise UserError(
                f"data.context_length={context_length}: the texts of the {split} split are shorter than one block, "
                f"{context_length + 1} tokens; give more text, a shorter context or another data.val_fraction"
            )

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """The batch of these blocks, collated. Raises IndexError for an index outside the data."""
        blocks = torch.from_numpy(np.stack(documents(self._blocks, self._positions(indices).tolist())))
        return {"inputs": blocks[:, :-1].contiguous(), "targets": blocks[:, 1:].contiguous()}


class Labelled(Tokenized):
    """Texts and classes: inputs int64 [B, T], padded to the batch's longest text; attention_mask int64 [B, T], 0 for
    padding; targets int64 [B] if the rows have labels.

    Texts longer than `context_length` tokens are cut, as by Transformers. The classes are the column's names if it has
    any, otherwise the values in the training rows, sorted.
    """

    task = "classification"

    def __init__(
        self,
        rows: Any,
        text: str,
        tokenizer: str,
        context_length: int,
        directory: Path,
        classes: list[str],
        targets: torch.Tensor | None,
    ):
        super().__init__(tokenizer)
        self.class_names, self._targets = classes, targets

        def cut(batch: dict[str, Any], numbers: list[int]) -> dict[str, Any]:
            texts = list(_texts(batch[text], text, numbers[0]))
            ids = self.tokenizer(texts, truncation=True, max_length=context_length)["input_ids"]
            return {"tokens": [own or [self.padding] for own in ids]}  # a model has at least one

        self._texts = tokenized(rows, cut, directory, "labelled", text, digest_of(self.tokenizer), context_length)
        self.spec: dict[str, Any] = {
            "vocab_size": len(self.tokenizer),
            "context_length": context_length,
            "num_classes": len(classes),
            "classes": classes,
            "pad_token_id": self.padding,
        }

    def __len__(self) -> int:
        return len(self._texts)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """The batch of these texts, collated. Raises IndexError for an index outside the data."""
        positions = self._positions(indices).tolist()
        texts = list(map(torch.from_numpy, documents(self._texts, positions)))
        mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
        inputs = pad_sequence(texts, batch_first=True, padding_value=self.padding)
        batch = {"inputs": inputs, "attention_mask": mask}
        return batch if self._targets is None else batch | {"targets": self._targets[positions]}
