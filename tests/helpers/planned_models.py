"""Models whose memory in a run is not that of their trace, which runs on fake tensors."""

import itertools
import queue
from typing import Any

import own_counts
import torch
from torch import Tensor, nn

from trainapp.tasks import classification, next_token
from trainapp.torch_private import is_tracing


class Net(nn.Module):
    """A linear layer that keeps `extra` numbers per sample from forward to backward."""

    def __init__(self, num_classes: int = 10):
        super().__init__()
        self.last = nn.Linear(64, num_classes)
        self.scale = nn.Parameter(torch.ones(()))

    def extra(self, inputs: Tensor) -> int:
        """Numbers per sample."""
        return 1000

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.flatten(1)
        numbers = self.extra(flat)
        if not numbers:
            return self.last(flat)
        kept = flat.new_ones(len(flat), numbers) * self.scale
        return self.last(flat) + (kept * kept).mean(1, keepdim=True)


class Recurrent(nn.Module):
    """Its layer has kernels of cuDNN on a GPU."""

    def __init__(self, num_classes: int = 10):
        super().__init__()
        self.layer, self.last = nn.LSTM(8, 64, batch_first=True), nn.Linear(64, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.layer(inputs[:, 0])[0][:, -1])


class Hungrier(Net):
    """Keeps half as much again when it runs for real."""

    def extra(self, inputs: Tensor) -> int:
        return 1000 if is_tracing() else 1500


class Leaner(Net):
    """Keeps a third when it runs for real."""

    def extra(self, inputs: Tensor) -> int:
        return 3000 if is_tracing() else 1000


class Reading(Net):
    """Keeps more where a value is positive: it always is, and a trace answers False first."""

    def extra(self, inputs: Tensor) -> int:
        return 3000 if inputs.mean() > -1e9 else 1000


class Thrifty(Net):
    """Would keep more where a value is large: it never is, and a plan has to allow for it."""

    def extra(self, inputs: Tensor) -> int:
        return 3000 if inputs.mean() > 1e9 else 1000


class Leaving(Leaner):
    """Cannot be traced: its forward leaves torch."""

    def extra(self, inputs: Tensor) -> int:
        inputs.detach().numpy()
        return 1000


class Evaluating(Net):
    """Keeps more in evaluation."""

    def extra(self, inputs: Tensor) -> int:
        return 1000 if self.training else 9000


class Careful(Net):
    """Reads a value on which no memory depends."""

    def extra(self, inputs: Tensor) -> int:
        float(inputs.mean())
        return 1000


class Bank(Net):
    """Keeps 1000 numbers more after each training step."""

    def __init__(self):
        super().__init__()
        self.bank: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.bank.append(torch.zeros(1000))
        return super().forward(inputs)


class Ring(Bank):
    """Keeps those of the last three."""

    def forward(self, inputs: Tensor) -> Tensor:
        result = super().forward(inputs)
        del self.bank[:-3]
        return result


class Remembering(Net):
    """Keeps what it has computed, with its graph, until it computes it again."""

    features = None

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.flatten(1)
        flat.new_ones(len(flat), 8000)  # for a moment, beside what is still kept: the peak
        self.features = flat.new_ones(len(flat), 1000) * self.scale
        return self.last(flat) + (self.features * self.features).mean(1, keepdim=True)


class Growing(Net):
    """Keeps twice as much for backward from its 13th training forward on: a trace has fewer. It counts where a plan
    does not look, in a queue.
    """

    later = 2000

    def __init__(self, num_classes: int = 10):
        super().__init__(num_classes)
        self.forwards: queue.SimpleQueue[None] = queue.SimpleQueue()

    def extra(self, inputs: Tensor) -> int:
        if self.training:
            self.forwards.put(None)
        return self.later if self.forwards.qsize() > 12 else 1000


class Creeping(Growing):
    """A thousandth more."""

    later = 1001


class Shrinking(Growing):
    """Half as much."""

    later = 500


class Queue:
    """A classification whose loss holds 4000 numbers from the start, and uses them as a whole and in part."""

    def __init__(self):
        self.numbers = torch.zeros(4000)

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Any, ...]:
        loss, *rest = classification(model, batch)
        self.numbers[:10] = loss.detach()
        return (loss + 0 * self.numbers.sum() + 0 * self.numbers[:10].sum(), *rest)


class Taught:
    """A classification with a teacher of 26,000 bytes."""

    def __init__(self):
        self.teacher = nn.Linear(64, 100)

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Any, ...]:
        loss, *rest = classification(model, batch)
        with torch.no_grad():
            wanted = self.teacher(batch["inputs"].flatten(1)).mean()
        return (loss + 0 * wanted, *rest)


class Metered:
    """next_token with a tensor more from the 20th training forward on: of 8 MB, for a moment."""

    def __init__(self):
        self.forwards = 0

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Any, ...]:
        self.forwards += model.training
        result = next_token(model, batch)
        if self.forwards > 20:
            torch.zeros(2_000_000)
        return result


class Stacked:
    """Images as tensors, which a batch stacks: memory can run out in the very first fetch, before a shape is known."""

    task = "classification"

    def __init__(self, split: str):
        self.split = split
        self.spec = {"image_shape": (1, 8, 8), "num_classes": 10}

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.ones(1, 8, 8), index % 10


class Views(Stacked):
    """The same as rows of one tensor of 128 KiB."""

    def __init__(self, split: str):
        super().__init__(split)
        self.images = torch.ones(len(self), 1, 8, 8)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], index % 10


class Sliced(Views):
    """Whole batches as slices of it."""

    def collate(self, samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
        first = samples[0][0].storage_offset() // 64
        first = min(first, len(self) - len(samples))
        targets = torch.tensor([target for _, target in samples])
        return {"inputs": self.images[first : first + len(samples)], "targets": targets}


class Antialiased(nn.Module):
    """One of its operations has no kernel for bfloat16 on the CPU; that for tensors without data takes it."""

    def __init__(self, hidden: int = 64):
        super().__init__()
        self.hidden, self.head = nn.Linear(64, hidden), nn.Linear(16, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        images = self.hidden(inputs.flatten(1)).unflatten(1, (1, 8, -1))
        return self.head(nn.functional.interpolate(images, size=(4, 4), mode="bilinear", antialias=True).flatten(1))


class Meaned(nn.Module):
    """Takes rows of any number."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 10))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs).mean(1)


class Padded(Stacked):
    """Rows of 16, of which a few have 64; batches are padded to the longest of their own."""

    def __init__(self, split: str, size: int = 320, val_size: int = 30, long: int = 0, val_long: int = -1):
        self.size, self.long = (size, long) if split == "train" else (val_size, val_long)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.ones(64 if index == self.long else 16, 8), index % 10

    def collate(self, samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
        rows = nn.utils.rnn.pad_sequence([rows for rows, _ in samples], batch_first=True)
        return {"inputs": rows, "targets": torch.tensor([target for _, target in samples])}


masks: dict[int, Tensor] = {}


class Caches(nn.Module):
    """Keeps tensors in a global variable, as do functions with `lru_cache`."""

    def __init__(self, num_classes: int = 10):
        super().__init__()
        self.first, self.last = nn.Linear(64, 2048), nn.Linear(2048, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) not in masks:
            masks[len(inputs)] = torch.ones(len(inputs), 1)
        hidden = self.first(inputs.flatten(1)) * masks[len(inputs)]
        for _ in range(self.times(inputs)):
            hidden = hidden.sigmoid()
        return self.last(hidden)

    def times(self, inputs: Tensor) -> int:
        """How often more is computed."""
        return 1


class CachesAndCounts(Caches):
    """Reads how often."""

    def times(self, inputs: Tensor) -> int:
        return int((inputs.amax() * 0 + 16).item())


class Flagged(Net):
    """Keeps more in evaluation once it has been trained, or in training once it has been evaluated."""

    by_training = True
    is_set = False

    def extra(self, inputs: Tensor) -> int:
        if self.training == self.by_training:
            self.is_set = True
            return 1000
        return 9000 if self.is_set else 1000


class FlaggedByEvaluation(Flagged):
    by_training = False


class FlaggedInVain(Flagged):
    """Nothing depends on it."""

    def extra(self, inputs: Tensor) -> int:
        super().extra(inputs)
        return 1000


class FillsBuffer(Net):
    """Evaluation fills a buffer, which training uses."""

    def __init__(self):
        super().__init__()
        self.register_buffer("memory", None)

    def extra(self, inputs: Tensor) -> int:
        if not self.training:
            self.memory = inputs.new_ones(256, 64)
        return 1000 if self.memory is None else 9000


class SlicedQueue(Net):
    """Its queue is a slice, whose storage also holds what has left the queue; evaluation finds it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.randn(64, 64))

    def extra(self, inputs: Tensor) -> int:
        if self.training:
            self.queue = torch.cat([inputs.detach(), self.queue])[:64]
        return 1000


class Averaging(Net):
    """Replaces a buffer by one as large in each forward of training."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.register_buffer("mean", torch.zeros(64))

    def extra(self, inputs: Tensor) -> int:
        self.norm(inputs)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(0)
        return 1000


def _ticks():
    count = 0

    def tick():
        nonlocal count
        count += 1
        return count

    return tick


class InClosure(Net):
    """Counts its forwards in the closure of a function that it holds."""

    def __init__(self):
        super().__init__()
        self.tick = _ticks()

    def extra(self, inputs: Tensor) -> int:
        return 9000 if self.training and self.count() > 600 else 1000

    def count(self) -> int:
        return self.tick()


class InHook(InClosure):
    """In the closure of a hook."""

    def __init__(self):
        super().__init__()
        numbers = itertools.count()

        def hook(module, inputs):
            module.is_late = next(numbers) > 600

        self.register_forward_pre_hook(hook)

    def count(self) -> int:
        return 900 if self.is_late else 0


def _by_default(counts=[0]):  # noqa: B006
    counts[0] += 1
    return counts[0]


class InDefault(InClosure):
    """In a default argument."""

    def count(self) -> int:
        return _by_default()


class InFunction(InClosure):
    """In an attribute of a function."""

    def count(self) -> int:
        _ticks.calls = getattr(_ticks, "calls", 0) + 1
        return _ticks.calls


class InOtherModule(InClosure):
    """In a variable of another module of the user's."""

    def count(self) -> int:
        own_counts.number += 1
        return own_counts.number


class Spread(Averaging):
    """Holds functions that count nothing."""

    def __init__(self):
        super().__init__()
        scale = 2
        self.twice = lambda number: number * scale
        self.register_forward_hook(lambda module, inputs, output: output * scale)


class Foreground(Net):
    """Does more with the rows whose class is not the first."""

    def forward(self, inputs: Tensor) -> Tensor:
        scores = self.last(inputs.flatten(1))
        rows = inputs.flatten(1)[self.chosen(scores)]
        for _ in range(4):
            rows = rows.repeat(1, 2).sigmoid()
        return scores + rows.mean() * self.scale

    def chosen(self, scores: Tensor) -> Tensor:
        """A mask of rows."""
        return scores.argmax(1) != 0


class Agreeing(Foreground):
    """With those that are in the class of another row."""

    def chosen(self, scores: Tensor) -> Tensor:
        return scores.argmax(1) == scores.flip(0).argmax(1)


class OneClass(Foreground):
    """With those of one class, which a trace may take for one of many."""

    def chosen(self, scores: Tensor) -> Tensor:
        return (scores + 100 * (torch.arange(10) == 5)).argmax(1) == 5


class UnlikeExperts(Net):
    """The wide one in the middle gets every row."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, n), nn.Linear(n, 10)) for n in (8, 2048, 8))

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.flatten(1)
        scores = self.last(flat)
        choice = (scores[:, :3] + torch.tensor([0.0, 100.0, 0.0])).argmax(1)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().squeeze(1)
            scores = scores.index_add(0, rows, expert(flat[rows]))
        return scores * self.scale


class Texts(Stacked):
    """Strings, of which a few are long; the model makes tensors of them."""

    def __init__(self, split: str):
        super().__init__(split)
        self.long = 40 if split == "train" else -1

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return "x" * (64 if index == self.long else 16), index % 10


class Lengths(Texts):
    """Rows that are padded to 64, with their lengths as a list; and how many there are."""

    def collate(self, samples: list[tuple[Any, int]]) -> dict[str, Any]:
        lengths = [len(text) for text, _ in samples]
        inputs = {"rows": torch.ones(len(samples), 64, 8), "lengths": lengths, "count": len(samples)}
        return {"inputs": inputs, "targets": torch.tensor([target for _, target in samples])}


class Counts(Lengths):
    """All rows are as long."""

    def __init__(self, split: str):
        super().__init__(split)
        self.long = -1


class OfAnyLength(Meaned):
    """Takes strings, or rows with their lengths."""

    def forward(self, inputs: Any) -> Tensor:
        if isinstance(inputs, dict):
            return super().forward(inputs["rows"][:, : max(inputs["lengths"])])
        return super().forward(torch.ones(len(inputs), max(map(len, inputs)), 8))


class Normed(nn.Module):
    """Cannot train on a single sample."""

    def __init__(self):
        super().__init__()
        self.first, self.layers = nn.Linear(64, 2), nn.Sequential(nn.BatchNorm1d(512), nn.Tanh(), nn.Linear(512, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(self.first(inputs.flatten(1)).repeat(1, 256)).repeat(1, 5)


class Refusing(Net):
    """Says so itself."""

    def extra(self, inputs: Tensor) -> int:
        if self.training and len(inputs) < 2:
            raise ValueError("pairs are needed")
        return 1000


class Drift:
    """A callback that keeps a copy of the weights."""

    def after_step(self, view: Any) -> None:
        self.weights = [parameter.detach().clone() for parameter in view.model.parameters()]
