"""What data sets with a tokenizer have in common."""

from collections.abc import Sequence
from pathlib import Path

from trainapp.data import tokenizer as tokenizers
from trainapp.data.batched import BatchedDataset


class Tokenized(BatchedDataset):
    """name: a folder, a tokenizer.json or a name on the hub.

    Attributes: `tokenizer`; `vocabulary`, a digest of what its tokens mean.
    """

    def __init__(self, name: str):
        self.tokenizer = tokenizers.load_tokenizer(name)
        self.vocabulary = tokenizers.vocabulary_of(self.tokenizer)

    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer into a folder, with the token that the data pads with where it has none of its own."""
        padded = getattr(self, "spec", {}).get("pad_token_id")
        written = self.tokenizer if padded is None else tokenizers.with_padding(self.tokenizer, padded)
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
