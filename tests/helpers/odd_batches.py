"""Batches whose samples cannot be cut off by their tensors' first dimension, a model that reads them, and its loss.

Sample i is a text of 1 to 5 vectors of 3 numbers, and a class. Plain PyTorch: nothing of the application is imported.
"""

from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence, pad_sequence

CLASSES = 4
FEATURES = 3
STEP = 16  # samples per optimizer step in the tests that use this
TABLE = torch.linspace(0.5, 1.5, STEP * FEATURES).reshape(STEP, FEATURES)  # a row per feature vector, not per sample

# A run of them.
OVERRIDES = (
    "model=mlp",
    "~model.depth",
    "~model.dropout",
    "model.width=8",
    "model._target_=odd_batches.Network",
    "data=digits",
    "~data.augment",
    "data._target_=odd_batches.Texts",
    "task=odd_batches.task",
    "user_packages=[odd_batches]",
)


class Named(NamedTuple):
    targets: Tensor
    inputs: Any


@dataclass
class Data:
    inputs: Any
    targets: Tensor
    table: Tensor


def packed(texts: list[Tensor], targets: Tensor) -> Any:
    return {"inputs": torch.cat(texts), "lengths": torch.tensor([len(t) for t in texts]), "targets": targets}


def time_first(texts: list[Tensor], targets: Tensor) -> Any:
    padded = torch.zeros(STEP, len(texts), FEATURES)  # as many moments as a step has samples
    for number, text in enumerate(texts):
        padded[: len(text), number] = text
    return {"moments": padded, "targets": targets}


def with_table(texts: list[Tensor], targets: Tensor) -> Any:
    return UserDict(inputs=pad_sequence(texts, batch_first=True), targets=targets, table=TABLE)


def class_weights(texts: list[Tensor], targets: Tensor) -> Any:
    """One weight for each of as many classes as a step has samples."""
    weights = torch.linspace(0.5, 2.0, STEP)
    return {"inputs": pad_sequence(texts, batch_first=True), "targets": targets, "class_weights": weights}


def strings(texts: list[Tensor], targets: Tensor) -> Any:
    words = [" ".join(str(float(x)) for x in text.flatten()) for text in texts]
    return {"words": words, "targets": targets}


KINDS = {
    "packed": packed,
    "time first": time_first,
    "table": with_table,
    "class weights": class_weights,
    "strings": strings,
    "padded": lambda texts, targets: (pad_sequence(texts, batch_first=True), targets),
    "list of tensors": lambda texts, targets: {"inputs": texts, "targets": targets},
    "lists of numbers": lambda texts, targets: {"inputs": [t.tolist() for t in texts], "targets": targets},
    "packed sequence": lambda texts, targets: Named(targets, pack_sequence(texts, enforce_sorted=False)),
    "nested": lambda texts, targets: {
        "inputs": torch.nested.nested_tensor(texts, layout=torch.jagged),
        "targets": targets,
    },
    "dataclass": lambda texts, targets: Data(pad_sequence(texts, batch_first=True), targets, TABLE),
    "targets last": lambda texts, targets: {"table": TABLE, "inputs": packed(texts, targets), "targets": targets},
}


class Texts:
    """Returns whole batches, unless `single` asks for sample by sample. The samples in `long` have 14 vectors."""

    in_memory = True

    def __init__(self, split: str, kind: str = "packed", size: int = 40, single: bool = False, long: Any = ()):
        self.kind, self.size, self.single = kind, size, single
        generator = torch.Generator().manual_seed(len(split))
        self.lengths = torch.randint(1, 6, (size,), generator=generator).tolist()
        for index in long if split == "train" else ():
            self.lengths[index] = 14
        self.texts = [torch.randn(length, FEATURES, generator=generator) for length in self.lengths]
        self.targets = torch.randint(0, CLASSES, (size,), generator=generator)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.texts[index], self.targets[index]

    def __getitems__(self, indices: list[int]) -> Any:
        samples = [self[index] for index in indices]
        return samples if self.single else self.collate(samples)

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> Any:
        return KINDS[self.kind]([text for text, _ in samples], torch.stack([target for _, target in samples]))


def texts_of(batch: Any) -> tuple[list[Tensor], Tensor]:
    """The texts, some with zeros after their ends, and the classes."""
    if isinstance(batch, (dict, Mapping)):
        inputs, targets = batch.get("inputs"), batch["targets"]
        if "words" in batch:
            numbers = [torch.tensor([float(x) for x in words.split()]) for words in batch["words"]]
            return [x.reshape(-1, FEATURES) for x in numbers], targets
        if "moments" in batch:
            return list(batch["moments"].transpose(0, 1)), targets
        if isinstance(inputs, dict):
            inputs, batch = inputs["inputs"], inputs
        if "lengths" in batch:
            return list(inputs.split(batch["lengths"].tolist())), targets
        if isinstance(inputs, list):
            return [torch.as_tensor(text) for text in inputs], targets
        if inputs.is_nested:
            return list(inputs.unbind()), targets
        return list(inputs), targets
    if hasattr(batch, "targets"):
        inputs = batch.inputs
        if not isinstance(inputs, Tensor):
            inputs = pad_packed_sequence(inputs, batch_first=True)[0]
        return list(inputs), batch.targets
    return list(batch[0]), batch[1]


class Network(nn.Module):
    """Sums a function of each vector (0 for the zeros of padding) over a text."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, width, bias=False), nn.Linear(width, CLASSES)

    def forward(self, texts: list[Tensor]) -> Tensor:
        return self.last(torch.stack([self.first(text).tanh().sum(0) for text in texts]))


def task(model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Cross-entropy. A table or weights that were cut would change the loss or fail."""
    texts, targets = texts_of(batch)
    assert len(texts) == len(targets), f"{len(texts)} texts and {len(targets)} targets"
    has = batch.keys() if isinstance(batch, (dict, Mapping)) else vars(batch) if hasattr(batch, "table") else ()
    scale = 1.0
    for name in {"table", "class_weights"} & set(has):
        scale = scale * (batch[name] if isinstance(batch, (dict, Mapping)) else getattr(batch, name)).sum() / STEP
    logits = model(texts)
    loss = nn.functional.cross_entropy(logits, targets, reduction="sum") * scale
    return loss, len(targets), {"accuracy": (logits.argmax(-1) == targets).sum()}
