"""Batches in every kind of container: read, mapped, cut, fetched by workers."""

from collections import UserDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import runs
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from trainapp.data.batch import elements_in, map_tensors, tensors_in
from trainapp.data.progress import Progress
from trainapp.data.train_batches import TrainBatches
from trainapp.losses.losses import inputs_and_targets

CPU = torch.device("cpu")


class Encoding(UserDict):
    """Like Hugging Face's BatchEncoding: a UserDict with attributes, whose items also read as attributes."""

    def __init__(self, data: dict[str, Any], encodings: Any = None):
        super().__init__(data)
        self.encodings = encodings

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None


class AttributeDict(dict):
    """The items are the attributes."""

    def __init__(self, *arguments: Any, **items: Any):
        super().__init__(*arguments, **items)
        self.__dict__ = self


class Pair(NamedTuple):
    """The targets come first: only the names tell which is which."""

    targets: Tensor
    inputs: Tensor


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    inputs: Tensor
    targets: Tensor
    name: str = "slots"


@dataclass
class Derived:
    """The constructor sets `total`, nothing sets `unset`, and the constructor takes neither as an argument."""

    inputs: Tensor
    targets: Tensor
    total: Tensor = field(init=False)
    unset: Tensor = field(init=False)

    def __post_init__(self):
        self.total = self.inputs.sum()


class TensorBag:
    """Registered with torch's pytrees: tensors plus the rest, which is kept."""

    def __init__(self, tensors: dict[str, Tensor], device: str = "here"):
        self.tensors, self.device = tensors, device

    @property
    def inputs(self) -> Tensor:
        return self.tensors["inputs"]

    @property
    def targets(self) -> Tensor:
        return self.tensors["targets"]


pytree.register_pytree_node(
    TensorBag,
    lambda bag: (list(bag.tensors.values()), (list(bag.tensors), bag.device)),
    lambda values, context: TensorBag(dict(zip(context[0], values, strict=True)), context[1]),
)

KINDS = {
    "dict": dict,
    "attribute dict": AttributeDict,
    "encoding": lambda batch: Encoding(batch, encodings=["kept"]),
    "list": lambda batch: [batch["inputs"], batch["targets"]],
    "tuple": lambda batch: (batch["inputs"], batch["targets"]),
    "namedtuple": lambda batch: Pair(inputs=batch["inputs"], targets=batch["targets"]),
    "frozen dataclass with slots": lambda batch: FrozenSlots(**batch),
    "dataclass with derived fields": lambda batch: Derived(**batch),
    "registered type": TensorBag,
}
# What they hold besides the two tensors, and must not lose.
ATTRIBUTES = {
    "encoding": ("encodings", ["kept"]),
    "frozen dataclass with slots": ("name", "slots"),
    "registered type": ("device", "here"),
}


def rows(batch, start: int, end: int):
    return map_tensors(lambda t: t[start:end] if t.ndim else t, batch)


def tensors() -> dict[str, torch.Tensor]:
    return {"inputs": torch.arange(30.0).reshape(10, 3), "targets": torch.arange(10)}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_read_mapped_and_cut(kind):
    batch, plain = KINDS[kind](tensors()), tensors()
    held = tensors_in(batch)
    assert len(held) >= 2
    doubled = map_tensors(lambda t: t * 2, batch)
    assert type(doubled) is type(batch)
    assert runs.differences(inputs_and_targets(doubled), (plain["inputs"] * 2, plain["targets"] * 2)) == []
    assert all(torch.equal(a, b * 2) for a, b in zip(tensors_in(doubled), held, strict=True))
    # The original is unchanged.
    assert runs.differences(inputs_and_targets(batch), (plain["inputs"], plain["targets"])) == []
    assert all(a is b for a, b in zip(tensors_in(batch), held, strict=True))
    assert elements_in(batch) == sum(t.numel() for t in held)
    piece = rows(batch, 4, 7)
    assert runs.differences(inputs_and_targets(piece), (plain["inputs"][4:7], plain["targets"][4:7])) == []
    if kind in ATTRIBUTES:
        name, value = ATTRIBUTES[kind]
        assert getattr(doubled, name) == getattr(piece, name) == value
    if kind == "attribute dict":
        assert piece.inputs is piece["inputs"]


def test_every_tensor_has_its_elements():
    assert elements_in({"temperature": torch.tensor(1.0), "inputs": torch.zeros(5, 2)}) == 11
    assert elements_in("no tensor") == 0
    ragged = [torch.zeros(3, 2), torch.zeros(4, 2)]
    assert elements_in([torch.nested.nested_tensor(ragged, layout=torch.jagged)]) == 14


def test_a_packed_sequence_keeps_its_batch_sizes_where_they_must_be():
    packed = pack_sequence([torch.zeros(3, 2), torch.ones(2, 2)])
    mapped = map_tensors(lambda t: t.to("meta"), {"inputs": packed})["inputs"]
    assert type(mapped) is PackedSequence
    assert mapped.data.device.type == "meta"
    assert mapped.batch_sizes.tolist() == [2, 2, 1]


class InKind(Dataset):
    """Sample i is the number i; its batches are of one container kind."""

    task = "classification"

    def __init__(self, kind: str):
        self.kind = kind

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": torch.full((2,), float(index)), "targets": torch.tensor(index)}

    def collate(self, samples: list[dict[str, torch.Tensor]]):
        return KINDS[self.kind]({name: torch.stack([s[name] for s in samples]) for name in samples[0]})


@pytest.mark.parametrize("kind", ATTRIBUTES)
def test_a_worker_hands_on_every_kind(kind):
    found = []
    for workers in (0, 1):
        batches = TrainBatches(InKind(kind), global_size=12, seed=0, device=CPU, workers=workers)
        micro = next(batches.micro_batches(Progress(), [12]))
        batches.close()
        assert type(micro.data) is type(KINDS[kind](tensors()))
        found.append(tensors_in(micro.data))
        name, value = ATTRIBUTES[kind]
        assert getattr(micro.data, name) == value
    assert runs.differences(found[0], found[1]) == []
