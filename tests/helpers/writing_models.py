"""Models, tasks and data sets that change something of their own in a forward, as users write them.

Each result depends on what was changed, and what is changed depends on how often the forward ran.
"""

import copy
import itertools
import queue
import random
from collections import deque

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Base(nn.Module):
    """A linear layer over flattened images, and a hook for the change."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.linear = nn.Linear(64, num_classes)
        self.build(num_classes)

    def build(self, num_classes: int) -> None:
        """What the model needs beside the layer."""

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.flatten(1)
        return self.linear(inputs) + self.change(inputs)

    def blocks(self) -> list[nn.Module]:
        return [self.linear]

    def change(self, inputs: Tensor) -> Tensor:
        """Changes something. Returns what it adds to the logits."""
        raise NotImplementedError


class Teacher(Base):
    """MoCo, BYOL: a momentum teacher that the optimizer does not see."""

    def build(self, num_classes: int) -> None:
        self.teacher = nn.Linear(64, num_classes).requires_grad_(False)

    def blocks(self) -> list[nn.Module]:
        return [self.linear, self.teacher]

    @torch.no_grad()
    def change(self, inputs: Tensor) -> Tensor:
        if self.training:
            for old, new in zip(self.teacher.parameters(), self.linear.parameters(), strict=True):
                self.move(old, new)
        return 0.5 * self.teacher(inputs)

    def move(self, old: nn.Parameter, new: nn.Parameter) -> None:
        old.mul_(0.9).add_(new, alpha=0.1)


class TeacherSilent(Teacher):
    """No version moves, and the memory stays."""

    def move(self, old: nn.Parameter, new: nn.Parameter) -> None:
        old.data.mul_(0.9).add_(new.data, alpha=0.1)


class QueueBeside(Base):
    """MoCo as it is published: a queue, and a deeper teacher that is moved by its `data`, which no version shows."""

    def build(self, num_classes: int) -> None:
        self.encoder = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, num_classes)).requires_grad_(False)
        self.register_buffer("queue", torch.zeros(num_classes))

    def change(self, inputs: Tensor) -> Tensor:
        if self.training:
            for weight in self.encoder.parameters():
                weight.data = weight.data * 0.9
            self.queue.mul_(0.9).add_(inputs.mean())
        return 0.5 * self.encoder(inputs) + self.queue


class TeacherOfBase(Teacher):
    """With adapters beside the layer, the teacher follows what is frozen of it."""

    @torch.no_grad()
    def change(self, inputs: Tensor) -> Tensor:
        if self.training:
            base = getattr(self.linear, "base_layer", self.linear)
            for old, new in zip(self.teacher.parameters(), base.parameters(), strict=True):
                self.move(old, new)
        return 0.5 * self.teacher(inputs)


class TeacherInRoot(Teacher):
    """No block has the teacher or its pupil: FSDP gathers both for the whole forward."""

    def build(self, num_classes: int) -> None:
        super().build(num_classes)
        self.block = nn.Linear(64, num_classes)

    def blocks(self) -> list[nn.Module]:
        return [self.block]

    def change(self, inputs: Tensor) -> Tensor:
        return super().change(inputs) + self.block(inputs)


class Anneals(Base):
    """Counts its forwards in an attribute, in evaluations too, as VAEs do that anneal a term of their loss."""

    def build(self, num_classes: int) -> None:
        self.num_iter = 0

    def change(self, inputs: Tensor) -> Tensor:
        if self.training or not self.only_in_training:
            self.num_iter += 1
        return inputs.new_full((), 0.01 * self.num_iter)

    only_in_training = False


class AnnealsInTraining(Anneals):
    only_in_training = True


class Generating(Base):
    """Its evaluations leave it in training mode, as the end of a `generate` that begins with `self.eval()`."""

    def change(self, inputs: Tensor) -> Tensor:
        drawn = F.dropout(inputs, 0.5, self.training).sum() * 0
        self.train()
        return 1 + drawn


class Normalises(Base):
    """A constant that is set once, by the first micro-batch, as in contrastive memories: with a graph."""

    def build(self, num_classes: int) -> None:
        self.register_buffer("constant", torch.tensor([-1.0]))

    def change(self, inputs: Tensor) -> Tensor:
        if self.training and self.constant.item() < 0:
            self.constant[0] = self.linear(inputs).exp().mean()
        return inputs.new_full((), float(self.constant))


class InChunks(Base):
    """Noise that is drawn for at most eight samples at a time."""

    def change(self, inputs: Tensor) -> Tensor:
        return torch.cat([torch.rand(len(chunk), 1) for chunk in inputs.split(8)])


class ActNorm(Base):
    """A shift that is the mean of the first batch: a parameter that a forward writes from its samples."""

    def build(self, num_classes: int) -> None:
        self.shift = nn.Parameter(torch.zeros(num_classes))
        self.register_buffer("is_initialised", torch.tensor(False))

    def change(self, inputs: Tensor) -> Tensor:
        if self.training and not self.is_initialised:
            with torch.no_grad():
                self.shift.copy_(-self.linear(inputs).mean(0))
                self.is_initialised.fill_(True)
        return self.shift


class LateActNorm(ActNorm):
    """A shift that is first written in the fourth step's forward."""

    def build(self, num_classes: int) -> None:
        super().build(num_classes)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def change(self, inputs: Tensor) -> Tensor:
        if not self.training:
            return self.shift
        self.forwards += 1
        return super().change(inputs) if self.forwards == 4 else self.shift


class Codebook(Base):
    """A buffer that follows the mean of the micro-batch."""

    reduces = False

    def build(self, num_classes: int) -> None:
        self.register_buffer("mean", torch.zeros(num_classes))

    def change(self, inputs: Tensor) -> Tensor:
        before = self.mean.clone()
        if self.training:
            mean = self.linear(inputs).detach().mean(0)
            if self.reduces and torch.distributed.is_initialized():
                torch.distributed.all_reduce(mean)
                mean = mean / torch.distributed.get_world_size()
            self.mean.mul_(0.9).add_(mean, alpha=0.1)
        return 0.1 * before


class ReducedCodebook(Codebook):
    """The same on all ranks."""

    reduces = True


class SpectralNorm(Base):
    """Each forward in training mode refines the estimate of the largest singular value."""

    def build(self, num_classes: int) -> None:
        nn.utils.parametrizations.spectral_norm(self.linear)

    def change(self, inputs: Tensor) -> Tensor:
        return torch.zeros(())


class ExtraState(Base):
    """A Python counter and a queue, by torch's protocol."""

    def build(self, num_classes: int) -> None:
        self.calls, self.means = 0, deque(maxlen=3)

    def change(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.means.append(float(inputs.mean()))
        return self.linear(inputs) * 0.01 * (self.calls + sum(self.means))

    def get_extra_state(self) -> dict:
        return {"calls": self.calls, "means": list(self.means)}

    def set_extra_state(self, state: dict) -> None:
        self.calls, self.means = state["calls"], deque(state["means"], maxlen=3)


class Carrying(Base):
    """A state in a tuple: one tensor is replaced, the other written in place."""

    def build(self, num_classes: int) -> None:
        self.states = (torch.zeros(num_classes), torch.zeros(num_classes))

    def change(self, inputs: Tensor) -> Tensor:
        hidden, cell = self.states
        before = 0.1 * (hidden + cell)
        if self.training:
            mean = self.linear(inputs).detach().mean(0)
            self.states = (0.9 * hidden + mean, cell.mul_(0.9).add_(mean))
        return before


class Recurrent(nn.Module):
    """A state per sample, and one that is not."""

    per_sample_buffers = ("hidden",)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("hidden", torch.zeros(16, 64))
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        before = self.hidden[: len(inputs)].clone()
        if self.training:
            self.hidden[: len(inputs)] = inputs.detach()
            self.largest.copy_(torch.maximum(self.largest, inputs.detach().max()))
        return before


class Declares(Base):
    """A part that declares one of the two buffers that it writes."""

    def build(self, num_classes: int) -> None:
        self.state = Recurrent()

    def change(self, inputs: Tensor) -> Tensor:
        return 0.01 * self.linear(self.state(inputs))


class Generators(Base):
    """Noise from generators of its own."""

    def build(self, num_classes: int) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.others = [np.random.default_rng(2), np.random.RandomState(3)]
        self.by_name = {"python": random.Random(4)}

    def change(self, inputs: Tensor) -> Tensor:
        if not self.training:
            return torch.zeros(())
        numbers = [self.others[0].normal(), self.others[1].normal(), self.by_name["python"].gauss(0, 1)]
        return torch.randn(len(inputs), self.linear.out_features, generator=self.generator) + sum(numbers)


class CountsInEvaluation(Base):
    """Counts the samples of evaluations: in a buffer, a parameter, by torch's protocol. Results depend on all."""

    def build(self, num_classes: int) -> None:
        self.register_buffer("seen", torch.zeros(()))
        self.total = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.samples = 0

    def change(self, inputs: Tensor) -> Tensor:
        if self.training:
            return self.linear(inputs) * 1e-3 * (self.samples + self.seen + self.total)
        places = self.samples + self.seen + self.total + 3 * torch.arange(len(inputs))  # the same however they are cut
        self.samples += len(inputs)
        self.seen += len(inputs)
        with torch.no_grad():
            self.total += len(inputs)
        return self.linear(inputs) * 1e-3 * places[:, None]

    def get_extra_state(self) -> int:
        return self.samples

    def set_extra_state(self, state: int) -> None:
        self.samples = state


class WritesAlways(nn.Module):
    """Writes state of every kind in each forward, in evaluation too, and computes with it."""

    per_sample_buffers, writes_attributes = ("hidden",), True

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(64, 10), nn.Parameter(torch.ones(()), requires_grad=False)
        self.register_buffer("hidden", torch.zeros(360, 10))
        self.register_buffer("calls", torch.ones(()))
        self.register_buffer("unsaved", torch.ones(()), persistent=False)
        self.register_buffer("replaced", torch.ones(()))
        self.array, self.tensor, self.number, self.own = np.ones(1), torch.ones(()), 1, 1

    def forward(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            for tensor in (self.scale, self.calls, self.unsaved):
                tensor.mul_(1.01)
            self.layer.weight.mul_(0.999)  # an average's, where one is evaluated
        self.replaced, self.own = self.replaced * 1.01, self.own * 1.01
        if self.writes_attributes:
            self.array *= 1.01
            self.tensor.mul_(1.01)
            self.number *= 1.01
        factor = self.scale * self.calls * self.unsaved * self.tensor * float(self.array[0]) * self.replaced
        outputs = self.layer(images.flatten(1)) + 0.5 * self.hidden[: len(images)]
        self.hidden[: len(images)] = outputs.detach()
        return outputs * factor * self.number * self.own

    def get_extra_state(self) -> float:
        return self.own

    def set_extra_state(self, state: float) -> None:
        self.own = state


class WritesSaved(WritesAlways):
    """Nothing that is not in a checkpoint."""

    writes_attributes = False


class OnlyInEvaluation(WritesSaved):
    """Writes a parameter in evaluation alone."""

    def forward(self, images: Tensor) -> Tensor:
        if not self.training:
            with torch.no_grad():
                self.scale.mul_(1.01)
        return self.layer(images.flatten(1)) * self.scale


def cross_entropy(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum over the samples, and the logits."""
    logits = model(batch["inputs"])
    return F.cross_entropy(logits, batch["targets"], reduction="sum"), logits


class Meter:
    """A metric with a state of its own."""

    def __init__(self) -> None:
        self.seen = np.zeros(2)

    def state_dict(self) -> dict:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict) -> None:
        self.seen = state["seen"]


class QueueTask:
    """A loss that weighs by a queue of earlier losses; it holds a metric and generators."""

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=5)
        self.meters = {"seen": Meter()}
        self.noise = [random.Random(3)]

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int, dict[str, Tensor]]:
        loss, _ = cross_entropy(model, batch)
        if model.training:
            self.losses.append(loss.item() / len(batch["targets"]))
            self.meters["seen"].seen += (1, self.noise[0].random())
        weight = 1 + sum(self.losses) + 0.01 * self.meters["seen"].seen.sum()
        return loss * weight, len(batch["targets"]), {}

    def state_dict(self) -> dict:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: dict) -> None:
        self.losses = deque(state["losses"], maxlen=5)


class Weighs:
    """A loss that weighs by the number of its calls."""

    def __init__(self) -> None:
        self.calls, self.counted = torch.ones(()), 0

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int, dict[str, Tensor]]:
        self.counted += 1
        if model.writes_attributes:
            self.calls *= 1.01
        losses = F.cross_entropy(model(batch["inputs"]), batch["targets"], reduction="none")
        return losses.sum() * self.calls * (1 + 0.01 * self.counted), len(losses), {}

    def state_dict(self) -> dict:
        return {"counted": self.counted}

    def load_state_dict(self, state: dict) -> None:
        self.counted = state["counted"]


class Carries:
    """A loss with a state in a tuple, and a history that it replaces."""

    def __init__(self) -> None:
        self.states, self.history = (torch.ones(()), 0), [0.0]

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int, dict[str, Tensor]]:
        losses = F.cross_entropy(model(batch["inputs"]), batch["targets"], reduction="none")
        mean, calls = self.states
        loss = losses.sum() * mean * (1 + 0.01 * calls + 0.01 * sum(self.history))
        if model.training:
            self.states = (0.9 * mean + 0.1 * losses.detach().mean(), calls + 1)
            self.history = [*self.history, losses.mean().item()][-3:]
        return loss, len(losses), {}


class Failing:
    """Cross-entropy that runs out of memory in one call: where compiled code is not to be seen by a dispatch mode."""

    fails_at = 0

    def __init__(self) -> None:
        self.calls_left: queue.SimpleQueue[None] = queue.SimpleQueue()  # which no retry restores
        for _ in range(Failing.fails_at):
            self.calls_left.put(None)
        Failing.fails_at = 0  # once, also where the run is built again

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int, dict[str, Tensor]]:
        loss, logits = cross_entropy(model, batch)
        if not self.calls_left.empty():
            self.calls_left.get()
            if self.calls_left.empty():
                raise torch.OutOfMemoryError("CUDA out of memory. (injected)")
        return loss, len(logits), {}


class Columns:
    """A stream of the first time step of each sequence, then the second, and so on: a number and the sum so far."""

    def __init__(self, split: str, columns: int = 6, val_columns: int = 3, steps: int = 8):
        columns = columns if split == "train" else val_columns
        self.numbers = torch.randn(steps, columns, generator=torch.Generator().manual_seed(columns))

    def __iter__(self):
        sums = self.numbers.cumsum(0)
        for step, column in itertools.product(*map(range, self.numbers.shape)):
            sample = {"inputs": self.numbers[step, column], "targets": sums[step, column]}
            yield {**sample, "column": column, "first": step == 0}


class Chunks:
    """A stream of the chunks of each sequence in turn, as for truncated backpropagation: a validation's last are
    shorter.
    """

    def __init__(self, split: str):
        self.columns, self.last = (6, 8) if split == "train" else (2, 5)

    def __iter__(self):
        numbers = torch.randn(self.columns, 32, generator=torch.Generator().manual_seed(self.columns))
        for chunk, column in itertools.product(range(4), range(self.columns)):
            start = 8 * chunk
            end = start + (self.last if chunk == 3 else 8)
            yield {"inputs": numbers[column, start:end], "column": column, "first": chunk == 0}


class Smooths(nn.Module):
    """Predicts the next number of each sequence by a moving average, in a state with a number for each."""

    per_sample_buffers = ("average",)

    def __init__(self, columns: int = 6):
        super().__init__()
        self.register_buffer("average", torch.zeros(columns))
        self.rate = nn.Parameter(torch.tensor(0.5))

    def forward(self, inputs: Tensor, column: Tensor, first: Tensor) -> Tensor:
        average = self.average[column].masked_fill(first, 0.0)
        squared_errors = torch.zeros(len(inputs))
        for numbers in inputs.unbind(1):
            squared_errors = squared_errors + (numbers - average).square()
            average = average + self.rate * (numbers - average)
        self.average[column] = average.detach()
        return squared_errors


def errors_of_chunks(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int, dict[str, Tensor]]:
    return model(batch["inputs"], batch["column"], batch["first"]).sum(), batch["inputs"].numel(), {}


class Sums(nn.Module):
    """Adds up the numbers of each sequence, in a state with a row for each: once trained, or with a scale of 1."""

    per_sample_buffers = ("hidden",)

    def __init__(self, columns: int = 6, width: int = 2, carries: bool = True):
        super().__init__()
        self.register_buffer("hidden", torch.zeros(width, columns))
        self.scale = nn.Parameter(torch.ones(()))
        self.carries = carries

    def forward(self, inputs: Tensor, column: Tensor, first: Tensor) -> Tensor:
        before = self.hidden[:, column].masked_fill(first, 0.0)
        hidden = before + self.scale * inputs
        if self.carries or self.training:
            self.hidden[:, column] = hidden.detach()
        return hidden[0]


def squares(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int, dict[str, Tensor]]:
    outputs = model(batch["inputs"], batch["column"], batch["first"])
    return (outputs - batch["targets"]).square().sum(), len(outputs), {}


class Squares:
    """`squares`, with a prediction."""

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int, dict[str, Tensor]]:
        return squares(model, batch)

    def predict(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["inputs"], batch["column"], batch["first"])


class LateTeacher(nn.Module):
    """A mean teacher that a task copies from the model in its first call."""

    def __init__(self):
        super().__init__()
        self.teacher: nn.Module | None = None
        self.register_buffer("scale", torch.ones(()))

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int, dict[str, Tensor]]:
        if self.teacher is None:
            self.teacher = copy.deepcopy(model).requires_grad_(False)
        losses = (model(batch["inputs"]) - self.teacher(batch["inputs"])).square().mean(1)
        for weight, average in zip(model.parameters(), self.teacher.parameters(), strict=True):
            average.data.mul_(0.9).add_(weight.data, alpha=0.1)
        return (self.scale * losses).sum(), len(losses), {}


class Recurring(nn.Module):
    """A recurrent network in fp64 with a row of state per sequence; otherwise per position in the micro-batch."""

    per_sample_buffers = ("hidden",)

    def __init__(self, columns: int = 6, by_column: bool = True):
        super().__init__()
        self.cell, self.head = nn.RNNCell(1, 4), nn.Linear(4, 1)
        self.register_buffer("hidden", torch.zeros(columns, 4))
        self.by_column = by_column
        self.double()

    def blocks(self) -> list[nn.Module]:
        return [self.cell]

    def forward(self, inputs: Tensor, column: Tensor, first: Tensor) -> Tensor:
        rows = column if self.by_column else torch.arange(len(inputs))
        before = self.hidden[rows].masked_fill(first[:, None], 0.0)
        hidden = self.cell(inputs[:, None].double(), before)
        self.hidden[rows] = hidden.detach()
        return self.head(hidden)[:, 0]


class Queue:
    """Features of earlier forwards, as memories of contrastive losses keep them."""

    def __init__(self) -> None:
        self.features: list[Tensor] = []
        self.latest = torch.zeros(())


class RemembersInEvaluation(Base):
    """Compares with what earlier forwards have left in an object, in evaluations, too."""

    def build(self, num_classes: int) -> None:
        self.queue = Queue()

    def change(self, inputs: Tensor) -> Tensor:
        earlier = sum(self.queue.features, inputs.new_zeros(())) + self.queue.latest
        self.remember(inputs.mean())
        return self.linear(inputs) * earlier.detach()  # an equal change of all logits would change no loss

    def remember(self, feature: Tensor) -> None:
        if not self.training:
            self.queue.features.append(feature)


class RemembersATensor(RemembersInEvaluation):
    def remember(self, feature: Tensor) -> None:
        if not self.training:
            self.queue.latest = feature


class ReadsALongQueue(RemembersInEvaluation):
    """Reads what earlier forwards have left once it is enough, as of nearest neighbours among 100 samples."""

    def change(self, inputs: Tensor) -> Tensor:
        self.remember(inputs.mean(1))
        features = torch.cat(self.queue.features) if self.queue.features else inputs.new_zeros(0)
        if len(features) < 100:
            return self.linear(inputs)
        return self.linear(inputs) * features.mean()


class LeavesAResult(RemembersInEvaluation):
    """What is left is written anew before it is read: a result, such as attention weights."""

    def change(self, inputs: Tensor) -> Tensor:
        self.queue.features = [inputs.mean()]
        self.features = inputs.mean(1)
        return 0.1 * self.queue.features[0]


class Slope(Base):
    """Anneals a number of torch's own layer."""

    def build(self, num_classes: int) -> None:
        self.act = nn.LeakyReLU(1.0)

    def change(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.act.negative_slope *= 0.9
        return self.act(self.linear(inputs))


class LateScale(Base):
    """A later stage of training, which writes more."""

    def build(self, num_classes: int) -> None:
        self.register_buffer("calls", torch.zeros(()))
        self.scale = 1.0

    def change(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.calls += 1 / len(inputs)
            if self.calls >= 3 / 64:
                self.scale *= 0.9
        return self.scale * self.linear(inputs)


class WrappedSGD(torch.optim.Optimizer):
    """Has another optimizer, whose state is not in its state dict, and counts its steps."""

    def __init__(self, params, lr: float = 0.1):
        super().__init__(params, {"lr": lr})
        self.inner = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.inner.param_groups
        self.steps = 0

    def step(self, closure=None):
        self.steps += 1
        self.inner.step()


class SharedSGD(WrappedSGD):
    """With the state of the other optimizer as its own, and its count in an option."""

    def __init__(self, params, lr: float = 0.1):
        super().__init__(params, lr)
        self.state = self.inner.state
        self.param_groups[0]["steps"] = 0

    def step(self, closure=None):
        self.param_groups[0]["steps"] += 1
        self.inner.step()


class Assigning(torch.optim.Optimizer):
    """Plain SGD that gives its parameters other memory."""

    def __init__(self, params, lr: float = 0.5, momentum: float = 0.0, nesterov: bool = False):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data - group["lr"] * parameter.grad
