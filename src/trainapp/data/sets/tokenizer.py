"""Tokenizers of Transformers: from a folder, a file or the hub, or a BPE trained on the data. Imported late."""

import copy
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from trainapp.config.targets import require_package
from trainapp.data.sets.batched import BatchedDataset
from trainapp.data.sets.text import key_of
from trainapp.errors import UserError

END = "<|endoftext|>"  # of a document, for a BPE trained here
AT_ONCE = 1000  # texts: a tokenizer in Rust takes them in parallel
log = logging.getLogger(__name__)


class Tokenized(BatchedDataset):
    """name: a folder, a tokenizer.json or a name on the hub.

    Attributes: `tokenizer`; `vocabulary`, a digest of what its tokens mean.
    """

    def __init__(self, name: str):
        self.tokenizer = load_tokenizer(name)
        self.vocabulary = vocabulary_of(self.tokenizer)

    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer into a folder, with the token that the data pads with where it has none of its own."""
        padded = getattr(self, "spec", {}).get("pad_token_id")
        written = self.tokenizer if padded is None else with_padding(self.tokenizer, padded)
        written.save_pretrained(str(folder))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text to continue: as in a block, without special ones."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """Their text, without special tokens."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    @property
    def end_of_text(self) -> int | None:
        """The token that ends a text, where the tokenizer has one."""
        end: int | None = self.tokenizer.eos_token_id
        return end


def load_tokenizer(name: str) -> Any:
    """A tokenizer from a folder, a `tokenizer.json`, or a name on the hub. Raises UserError for another."""
    require_package("transformers", f"data.tokenizer={name}")
    import transformers  # late: only these data sets need it

    path = Path(name).expanduser()
    try:
        if path.is_file():
            return transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
        return transformers.AutoTokenizer.from_pretrained(str(path) if path.is_dir() else name)
    except Exception as error:  # what is missing in a folder raises nearly anything
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"data.tokenizer={name}: holds no tokenizer that Transformers can read ({reason}); name a folder with one, "
            "a tokenizer.json, or a model of the hub"
        ) from None


def digest_of(tokenizer: Any) -> str:
    """Of everything that decides its tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str()
    special = {name: str(value) for name, value in tokenizer.special_tokens_map.items()}
    return hashlib.sha256(repr((type(tokenizer).__name__, rules, special)).encode()).hexdigest()


def vocabulary_of(tokenizer: Any) -> str:
    """A digest of what its tokens mean, for comparison. Stable over versions of the packages."""
    return hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def padding_of(tokenizer: Any) -> int:
    """The token that fills up batches: its own, else that for the end of a text, else 0. No loss counts it."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0


def with_padding(tokenizer: Any, padding: int) -> Any:
    """The tokenizer, or where it has no pad token a copy for which this one is it.

    Unless it is a token of text: Transformers would then split it off every text, and drop it where it decodes.
    """
    if tokenizer.pad_token_id is not None:
        return tokenizer
    added = tokenizer.added_tokens_decoder.get(padding)
    if padding not in tokenizer.all_special_ids and not (added and added.special):
        log.warning(
            "the exported tokenizer has no pad token: token %d, which batches were padded with, is text", padding
        )
        return tokenizer
    padded = copy.deepcopy(tokenizer)
    padded.pad_token = padded.convert_ids_to_tokens(padding)
    return padded


def encoded(tokenizer: Any, texts: Iterable[str], special: bool) -> Iterator[list[int]]:
    """The tokens of each text. special: with those that begin and end a text for this model."""
    rest = iter(texts)
    while batch := list(islice(rest, AT_ONCE)):
        yield from tokenizer(
            batch, add_special_tokens=special, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )["input_ids"]


def trained_bpe(texts: Callable[[], Iterable[str]], fingerprint: str, vocab_size: int, directory: Path) -> Path:
    """A folder with a byte-level BPE of `vocab_size` tokens at most, trained on the texts, or by an earlier run.

    fingerprint: what decides the texts. Raises UserError for a vocabulary smaller than the bytes.
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
        try:
            os.rename(f"{temporary}/bpe", folder)
        except OSError:
            if not (folder / "tokenizer.json").is_file():  # else another process was first
                raise
    return folder
