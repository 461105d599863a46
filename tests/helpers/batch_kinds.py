"""A batch {"inputs", "targets"} in every kind of container that a data set may return."""

from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from trainapp.data.sets.digits import Digits


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


@dataclass
class Plain:
    inputs: Tensor
    targets: Tensor
    name: str = "plain"


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
    "ordered dict": OrderedDict,
    "attribute dict": AttributeDict,
    "user dict": UserDict,
    "encoding": lambda batch: Encoding(batch, encodings=["kept"]),
    "list": lambda batch: [batch["inputs"], batch["targets"]],
    "tuple": lambda batch: (batch["inputs"], batch["targets"]),
    "namedtuple": lambda batch: Pair(inputs=batch["inputs"], targets=batch["targets"]),
    "dataclass": lambda batch: Plain(**batch),
    "frozen dataclass with slots": lambda batch: FrozenSlots(**batch),
    "dataclass with derived fields": lambda batch: Derived(**batch),
    "registered type": TensorBag,
}
# What they hold besides the two tensors, and must not lose.
ATTRIBUTES = {
    "encoding": ("encodings", ["kept"]),
    "dataclass": ("name", "plain"),
    "frozen dataclass with slots": ("name", "slots"),
    "registered type": ("device", "here"),
}


class DigitsInKind:
    """The digits, collated into batches of one kind."""

    task = "classification"
    in_memory = True

    def __init__(self, split: str, kind: str = "dict"):
        self.digits, self.kind = Digits(split), kind
        self.spec = self.digits.spec

    def __len__(self) -> int:
        return len(self.digits)

    def __getitems__(self, indices: list[int]) -> list[dict[str, Tensor]]:
        return [self.digits[index] for index in indices]

    def collate(self, samples: list[dict[str, Tensor]]) -> Any:
        return KINDS[self.kind](default_collate(samples))
