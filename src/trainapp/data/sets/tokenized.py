"""Tokenizers of Transformers, and data sets of tokens, which are computed once and cached.

Transformers and `datasets` are imported late.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainapp.config.targets import require_package
from trainapp.data.loader import BatchedDataset
from trainapp.errors import UserError


class Tokenized(BatchedDataset):
    """The base of data sets with a tokenizer.

    Args:
        name: of the tokenizer: a folder, a tokenizer.json or a name on the hub.

    Attributes:
        tokenizer: of Transformers.
        padding: the token that pads batches, never counted in a loss.
        end_of_text: the token that ends a text, or None.
        vocabulary: a digest of the tokens' meaning, stable across versions of the packages.
    """

    def __init__(self, name: str):
        self.tokenizer = load_tokenizer(name)
        self.padding = int(self.tokenizer.pad_token_id or 0)
        self.end_of_text: int | None = self.tokenizer.eos_token_id
        self.vocabulary = cache_key(sorted(self.tokenizer.get_vocab().items()))

    def _tokenize(self, rows: Any, function: Callable[..., dict[str, Any]], directory: Path, *parts: Any) -> None:
        """Apply a function to the rows, once: its tokens are stored in a memory-mapped file in the directory.

        Args:
            rows: `datasets` knows whether their files have changed.
            function: takes a batch of rows and their indices, and returns `tokens`, a list of documents.
            directory: the cache.
            parts: what determines these tokens besides rows and tokenizer.
        """
        import datasets

        # The key of the cache: all that determines the tokens.
        rules = self.vocabulary
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            rules = backend.to_str()
        special_tokens = {name: str(value) for name, value in self.tokenizer.special_tokens_map.items()}
        key = cache_key(rows._fingerprint, len(rows), type(self.tokenizer).__name__, rules, special_tokens, *parts)

        # The first rank tokenizes; all others find its file.
        tokens_column = datasets.Sequence(datasets.Value("int32"))
        with locked_cache(directory, f"tokens-{key}"):
            self._documents = rows.map(
                function,
                with_indices=True,
                batched=True,
                remove_columns=rows.column_names,
                features=datasets.Features(tokens=tokens_column),
                cache_file_name=str(directory / f"tokens-{key}.arrow"),
                new_fingerprint=key,  # the default hashes the tokenizer, which changes when used
            ).with_format("arrow")

    def __len__(self) -> int:
        return len(self._documents)

    def _tokens(self, indices: list[int]) -> list[np.ndarray]:
        """Return the tokens of these documents, int64 [n] each."""
        # Arrow holds the documents end to end, with their lengths.
        documents = self._documents[indices]["tokens"].combine_chunks()
        tokens = documents.flatten().to_numpy().astype(np.int64)
        ends = np.cumsum(documents.value_lengths().to_numpy())
        return np.split(tokens, ends[:-1])

    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer into a folder."""
        self.tokenizer.save_pretrained(str(folder))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text to continue: as in a block, without special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens, without special ones."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


# --- tokenizers


def load_tokenizer(name: str) -> Any:
    """Load a tokenizer from a folder, a `tokenizer.json`, or a name on the hub. Raises UserError if it cannot be
    loaded.

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


def train_bpe(texts: Callable[[], Iterable[str]], fingerprint: str, vocab_size: int, directory: Path) -> Path:
    """Return a folder with a byte-level BPE, trained on the texts or by an earlier run.

    Args:
        texts: called only if there is no such folder.
        fingerprint: identifies the texts.
        vocab_size: the largest number of tokens.
        directory: the cache.
    """
    import transformers  # installed with `datasets`, which has read the texts

    folder = directory / f"bpe-{cache_key(fingerprint, vocab_size)}"
    with locked_cache(directory, folder.name):
        if not folder.is_dir():
            tokenizer = transformers.GPT2Tokenizer().train_new_from_iterator(texts(), vocab_size, show_progress=False)
            tokenizer.save_pretrained(f"{folder}.tmp")
            os.rename(f"{folder}.tmp", folder)
    return folder


# --- cache


def cache_key(*parts: Any) -> str:
    """Return a cache key from plain values."""
    text = "\0".join(map(repr, parts))
    return hashlib.sha256(text.encode()).hexdigest()


@contextlib.contextmanager
def locked_cache(directory: Path, name: str) -> Iterator[None]:
    """Make a file in the cache within this context: ranks that start together wait for the first, and use its file.
    Raises UserError for a folder that cannot be written.
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
