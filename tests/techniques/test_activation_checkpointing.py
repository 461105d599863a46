"""Activation checkpointing changes nothing but memory: gradients, buffers and all other state, bit for bit."""

import array
import collections
import contextlib
import contextvars
import copy
import dataclasses
import functools
import itertools
import random
import threading
import types

import numpy as np
import pytest
import runs
import torch
from torch import nn

from trainapp.config.schema import ActivationCheckpointing
from trainapp.errors import TrainingStopped, UserError
from trainapp.techniques import activation_checkpointing, choice, contents
from trainapp.techniques.block_state import BlockState
from trainapp.techniques.budget import Budget, NoBudget
from trainapp.torch_private import version_of

SETTINGS = [(mode, every) for mode in ("full", "selective") for every in (1, 2, 3)]
BUDGETS = [(f"budget:{size}", every) for size, every in ((400, 1), (600, 1), (900, 2), (2000, 1))]


class Block(nn.Module):
    """The base of the blocks here: `scale` is what the state of each makes of the output."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.setup()

    def setup(self):
        pass

    def forward(self, x):
        return torch.tanh(self.linear(x) * self.scale(x.detach()))


class Reassigned(Block):
    def setup(self):
        self.register_buffer("stat", torch.zeros(()))

    def scale(self, x):
        self.stat = self.stat * 0.9 + x.mean()
        return 1.0


class ReassignedAndUsed(Reassigned):
    def scale(self, x):
        super().scale(x)
        return 1 + self.stat


class CountedInPlace(Block):
    def setup(self):
        self.register_buffer("count", torch.zeros(1))

    def scale(self, x):
        self.count.add_(1)
        return self.count.clone()


class ConstantThatMoves(Block):
    def setup(self):
        self.register_buffer("table", torch.ones(4), persistent=False)

    def scale(self, x):
        self.table.mul_(1.5)
        return self.table.clone()


class LazyBuffer(Block):
    def setup(self):
        self.register_buffer("first", None)

    def scale(self, x):
        if self.first is None:
            self.first = x.mean()
        self.first = self.first + 1
        return self.first


class NewAttribute(Block):
    def scale(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return self.calls


class UnregisteredTensor(Block):
    def setup(self):
        self.running = torch.ones(4)

    def scale(self, x):
        self.running.add_(x.mean(0))
        return self.running.clone()


class WrittenThroughData(Block):
    def setup(self):
        self.register_buffer("hidden", torch.ones(4), persistent=False)

    def scale(self, x):
        self.hidden.data.mul_(1.1)
        return self.hidden.clone()


class Teacher(Block):
    def setup(self):
        self.teacher = nn.Parameter(torch.ones(4), requires_grad=False)

    def scale(self, x):
        self.teacher.data.lerp_(self.linear.weight.data[0], 0.1)
        return self.teacher.clone()


class NormalisedInPlace(Block):
    def scale(self, x):
        with torch.no_grad():
            self.linear.weight.add_(0.01)
        return 1.0

    def forward(self, x):
        self.scale(x)
        return torch.tanh(self.linear(x))


class DataDependentInit(Block):
    def setup(self):
        self.gain = nn.Parameter(torch.zeros(4))
        self.is_initialised = False

    def scale(self, x):
        if not self.is_initialised:
            self.gain.data.copy_(x.std(0) + 1)
            self.is_initialised = True
        return self.gain


class OwnGenerator(Block):
    def setup(self):
        self.generator = torch.Generator().manual_seed(1)

    def scale(self, x):
        return torch.rand(4, generator=self.generator)


class OwnNumpyGenerators(Block):
    def setup(self):
        self.modern, self.legacy, self.plain = np.random.default_rng(1), np.random.RandomState(1), random.Random(1)

    def scale(self, x):
        return float(self.modern.random() + self.legacy.rand() + self.plain.random())


class LayerDrop(Block):
    def scale(self, x):
        return 1.0 if random.random() < 0.5 else 0.1


class NumpyNoise(Block):
    def scale(self, x):
        return float(np.random.randn())  # every second call uses up a cached value and moves no word of the state


class History(Block):
    def setup(self):
        self.seen, self.by_name = [], {"last": 0.0}

    def scale(self, x):
        self.seen.append(float(x.mean()))
        self.by_name["last"] += 1
        return len(self.seen) + self.by_name["last"]


class Nested(Block):
    """Numbers in lists in dictionaries, one of which has two names."""

    def setup(self):
        self.stats = {"counts": [0.0], "deep": [[{"n": 0.0}]]}
        self.counts = self.stats["counts"]

    def scale(self, x):
        self.counts[0] += 1
        self.stats["deep"][0][0]["n"] += self.stats["counts"][0]
        return self.stats["deep"][0][0]["n"]


class Options(Block):
    """Takes an argument that torch.utils.checkpoint would take for its own."""

    def scale(self, x):
        return 1.0

    def forward(self, x, debug=True):
        return super().forward(x) * (2 if debug else 1)


class SharedNorm(Block):
    """Every block normalises with one module, which `Net` provides."""

    def forward(self, x):
        return torch.tanh(self.linear(self.shared(x)))


class Counting(Block):
    """Counts its calls somewhere. `count` is also called when the training has ended."""

    def scale(self, x):
        return 1 / (1 + self.count())


class InArray(Counting):
    def setup(self):
        self.ring, self.at = np.ones(3), np.array(0)

    def count(self):
        self.at += 1
        self.ring[int(self.at) % 3] += int(self.at)
        return float(self.ring @ [1, 2, 3])


class InArraysOfAList(Counting):
    """A forward writes another one than the forward before."""

    def setup(self):
        self.rows, self.at = collections.deque(np.zeros(2) for _ in range(3)), 0

    def count(self):
        self.at += 1
        self.rows[self.at % 3] += self.at
        return float(sum(row.sum() * (1 + place) for place, row in enumerate(self.rows)))


class InSubclasses(Counting):
    class Named(list):
        pass

    def setup(self):
        self.counter, self.ordered = collections.Counter(), collections.OrderedDict(a=1, b=2)
        self.named = self.Named([0])
        self.named.calls = 0
        self.recent = collections.deque([0.0], maxlen=2)

    def count(self):
        self.counter["n"] += 1
        self.ordered.move_to_end(next(iter(self.ordered)))
        self.named.append(len(self.named))
        self.named.calls += 1
        self.recent.append(self.recent[-1] + self.named.calls)
        return (
            self.counter["n"]
            + (next(iter(self.ordered)) == "a")
            + len(self.named)
            + self.named.calls
            + sum(self.recent)
        )


class InBytes(Counting):
    def setup(self):
        self.bytes, self.words = bytearray(1), array.array("i", [0])

    def count(self):
        self.bytes[0] += 1
        self.words.append(3)
        return self.bytes[0] + len(self.words)


class InListOfATuple(Counting):
    def setup(self):
        self.held = ([0], (5, {"n": 0}))

    def count(self):
        self.held[0][0] += 1
        self.held[1][1]["n"] += 1
        return self.held[0][0] + self.held[1][1]["n"]


class InObjects(Counting):
    @dataclasses.dataclass
    class Meter:
        total: int = 0
        history: list = dataclasses.field(default_factory=list)

    class Slots:
        __slots__ = ("filled", "n")

    def setup(self):
        self.meter, self.plain, self.slots = self.Meter(), types.SimpleNamespace(n=0, inner=self.Meter()), self.Slots()
        self.slots.n = 0

    def count(self):
        self.meter.total += 1
        self.meter.history.append(self.meter.total)
        self.plain.n += 1
        self.plain.inner.total += len(self.meter.history)
        self.slots.n += 1
        self.slots.filled = getattr(self.slots, "filled", 0) + 2
        return self.plain.n + self.plain.inner.total + self.slots.n + self.slots.filled


class InObjectThatAForwardMakes(Counting):
    def setup(self):
        self.meter = None

    def count(self):
        if self.meter is None:
            self.meter = InObjects.Meter()
        self.meter.total += 1
        return self.meter.total


class InOwnSlots(Counting):
    __slots__ = ("n",)

    def count(self):
        object.__setattr__(self, "n", getattr(self, "n", 0) + 1)
        return self.n


class ThroughBoundMethods(Counting):
    def setup(self):
        self.note, self.add = [].append, functools.partial(InObjects.Meter().history.append, 1)
        self.meter = InObjects.Meter().history.extend

    def count(self):
        self.note(1)
        self.add()
        self.meter([1, 1])
        return len(self.note.__self__) + len(self.add.func.__self__) + len(self.meter.__self__)


class InClosureOfAHook(Counting):
    def setup(self):
        seen, last = [0], 0

        def hook(module, inputs, output):
            nonlocal last
            seen[0] += 1
            last += seen[0]
            return output / last

        self.linear.register_forward_hook(hook)

    def count(self):
        return 0


class GeneratorsInside(Counting):
    def setup(self):
        self.held = ({"a": [random.Random(1)]},)
        self.own = types.SimpleNamespace(numpy=np.random.default_rng(1), torch=(torch.Generator().manual_seed(1),))

    def count(self):
        drawn = torch.rand((), generator=self.own.torch[0])
        return float(self.held[0]["a"][0].random() + self.own.numpy.random() + drawn)


class Spawning(Counting):
    def setup(self):
        self.generator = np.random.default_rng(1)

    def count(self):
        return float(self.generator.spawn(1)[0].random())


class Alternating(Block):
    """Net calls its first block twice, so that this is 0 again before the backward."""

    def setup(self):
        self.round = 0

    def scale(self, x):
        self.round = (self.round + 1) % 2
        return 1 + self.round


class DeletedAtTheEnd(Block):
    """Torch ends the recomputation before it is deleted."""

    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        y = super().forward(x)
        del self.calls
        return y

    def scale(self, x):
        return self.calls


class FlipsItsMode(Block):
    def scale(self, x):
        self.training, was = not self.training, self.training
        return 1.5 if was else 0.5


class FlipsAChild(Block):
    def setup(self):
        self.child = nn.Identity()

    def scale(self, x):
        was = self.child.training
        self.child.train(not was)
        return 1.5 if was else 0.5


class SwapsChildren(Block):
    def setup(self):
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = super().forward(self.first(x))
        self.first, self.second = self.second, self.first
        return y

    def scale(self, x):
        return 1.0


class AddsAChild(Block):
    def setup(self):
        self.more = nn.ModuleList()

    def scale(self, x):
        self.more.append(nn.Identity())
        return 1 / len(self.more)


class HookThatRemovesItself(Block):
    def setup(self):
        def once(module, inputs, output):
            self.handle.remove()
            return output * 3

        self.handle = self.linear.register_forward_hook(once)

    def scale(self, x):
        return 1.0


class HookEveryOtherTime(Block):
    def setup(self):
        self.handle = None

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        if self.handle is None:
            self.handle = self.linear.register_forward_hook(lambda module, inputs, output: output * 2)
        else:
            self.handle.remove()
            self.handle = None
        return y


class FreezesAfterwards(Block):
    def setup(self):
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x):
        y = super().forward(x)
        self.gain.requires_grad_(not self.gain.requires_grad)
        return y

    def scale(self, x):
        return self.gain


class EndsInRReLU(Block):
    def setup(self):
        self.end = nn.RReLU()

    def forward(self, x):
        return self.end(self.linear(x))


class EndsInTheFunction(Block):
    def forward(self, x):
        return nn.functional.rrelu(self.linear(x), training=True)


class HoldsTheFunction(EndsInRReLU):
    def setup(self):
        self.end = functools.partial(nn.functional.rrelu, training=True)


class WritesThroughViews(Block):
    def setup(self):
        self.register_buffer("stats", torch.zeros(2, 4))
        self.mean, self.count = self.stats[0], self.stats[1]

    def scale(self, x):
        self.mean.lerp_(x.mean(0), 0.5)
        self.count.add_(1)
        return 1 + self.stats.sum(0)


class ReadsThroughAView(Block):
    def setup(self):
        self.register_buffer("stats", torch.ones(3, 4))
        self.column, self.bits = self.stats[1:, 2], self.stats[1].view(torch.int32)

    def scale(self, x):
        self.stats.mul_(0.9)
        return self.column.sum() + self.bits.view(torch.float32)


class SharesMemoryWithAnArray(Block):
    def setup(self):
        self.array = np.zeros(8, dtype=np.float32)
        self.register_buffer("numbers", torch.from_numpy(self.array[::1][4:]))

    def scale(self, x):
        self.array += 1
        return 1 / self.numbers.clone()


class SharesWrittenMemory(SharesMemoryWithAnArray):
    def scale(self, x):
        self.numbers.add_(1)
        return float(1 / (1 + self.array[5]))


class InAttributesOfAFunction(Counting):
    def setup(self):
        def counted():
            counted.calls += 1
            return counted.calls

        counted.calls = 0
        self.counted = counted

    def count(self):
        return self.counted()


class InADefault(Counting):
    def setup(self):
        def append(seen=[], *, also={}):  # noqa: B006  # what it is about
            seen.append(1)
            also[len(seen)] = 1
            return len(seen) + len(also)

        self.append = types.FunctionType(append.__code__, append.__globals__, "append", ([],))
        self.append.__kwdefaults__ = {"also": {}}

    def count(self):
        return self.append()


class InAMemoryView(Counting):
    def setup(self):
        self.view = memoryview(array.array("i", [0, 0]))

    def count(self):
        self.view[1] += 1
        return self.view[1]


class InThreadLocals(Counting):
    def setup(self):
        self.local = threading.local()
        self.local.calls = 0

    def count(self):
        self.local.calls += 1
        return self.local.calls


class InAContextVariable(Counting):
    def setup(self):
        self.variable, self.other = contextvars.ContextVar("calls", default=0), contextvars.ContextVar("other")

    def count(self):
        self.variable.set(self.variable.get() + 1)
        self.other.set(self.other.get(0) + 1)
        return self.variable.get()


class BitGenerators(Counting):
    def setup(self):
        self.bits, self.sobol = np.random.PCG64(1), torch.quasirandom.SobolEngine(1)

    def count(self):
        return self.bits.random_raw() % 7 + float(self.sobol.draw(1))


class ManyLists(Counting):
    def setup(self):
        self.table = [[number] for number in range(11_000)]
        self.table.append(types.SimpleNamespace(calls=0))

    def count(self):
        self.table[-1].calls += 1
        return self.table[-1].calls


class DeepLists(Counting):
    def setup(self):
        self.deep = deepest = {}
        for _ in range(30):
            deepest["in"] = deepest = {}
        deepest["calls"] = 0

    def count(self):
        deepest = self.deep
        while "in" in deepest:
            deepest = deepest["in"]
        deepest["calls"] += 1
        return deepest["calls"]


class SystemNoise(Block):
    def setup(self):
        self.generator = random.SystemRandom()

    def scale(self, x):
        return 1.0


class GrowingArgument(Block):
    """Like a block of a DenseNet: the caller appends to the list after the call."""

    def forward(self, earlier):
        return torch.tanh(self.linear(sum(earlier) / len(earlier)))


class WrittenArgument(Block):
    def forward(self, x, state):
        state["depth"] = state.get("depth", 0) + 1
        state.setdefault("seen", []).append(state["depth"])
        return torch.tanh(self.linear(x) / (state["depth"] + len(state["seen"])))


class Net(nn.Module):
    """Four blocks; the last is the first one once more."""

    def __init__(self, kind):
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(3))
        if kind is SharedNorm:
            shared = nn.BatchNorm1d(4)
            for layer in self.layers:
                layer.shared = shared

    def blocks(self):
        return list(self.layers)

    def forward(self, x):
        earlier, state = [x], {}
        for layer in [*self.layers, self.layers[0]]:
            if isinstance(layer, (GrowingArgument, WrittenArgument)):
                x = layer(earlier) if isinstance(layer, GrowingArgument) else layer(x, state=state)
                earlier.append(x)
                continue
            x = layer(x) if not isinstance(layer, Options) else layer(x, debug=False)
        return x


KINDS = [kind for kind in vars().copy().values() if isinstance(kind, type) and issubclass(kind, Block)]
KINDS = [kind for kind in KINDS if kind not in (Block, Counting)]
SHARED_WITH_A_COPY = (
    ThroughBoundMethods,
    InClosureOfAHook,
    HookThatRemovesItself,
    WritesThroughViews,
    InAttributesOfAFunction,
    InADefault,
)


def summed(model, batch):
    return model(batch).square().sum(), len(batch), {}


def state_after_training(kind, mode="none", every=1):
    """Everything that two steps of two micro-batches leave in the model and in the global generators."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model, inputs = Net(kind), torch.randn(4, 6, 4)
    name, _, size = mode.partition(":")
    settings = ActivationCheckpointing(mode=name, every=every, bytes=int(size or 1))
    activation_checkpointing.apply(model, settings)
    chosen = Budget(model, summed, settings, torch.device("cpu")) if size else NoBudget()
    for x in inputs:
        chosen.prepare(x, contextlib.nullcontext())
        model(x).square().sum().backward()
    attributes = {
        f"{name}.{key}": copy.deepcopy(value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if type(value) in (int, float, bool, list, dict, torch.Tensor) and key not in vars(nn.Module())
    }
    drawn = [torch.rand(1), random.random(), np.random.rand()]
    for layer in model.layers:
        if isinstance(layer, Counting):
            drawn.append(layer.count())
        if isinstance(layer, OwnGenerator):
            drawn.append(torch.rand(1, generator=layer.generator))
        if isinstance(layer, OwnNumpyGenerators):
            drawn += [layer.modern.random(), layer.legacy.rand(), layer.plain.random()]
    return {
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "parameters": {name: p.detach() for name, p in model.named_parameters()},
        "buffers": dict(model.named_buffers()),
        "attributes": attributes,
        "drawn": drawn,
    }


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_whatever_a_block_keeps(kind, monkeypatch):
    monkeypatch.setattr(choice, "SELECTION", 0)  # otherwise it is not worth keeping a part of blocks as small as these
    plain = state_after_training(kind)
    # The trace for a budget runs on a copy of the model, which shares functions and bound methods with it.
    for mode, every in SETTINGS + (BUDGETS if kind not in SHARED_WITH_A_COPY else []):
        assert runs.differences(plain, state_after_training(kind, mode, every)) == [], (mode, every)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_mode_that_changes_between_forward_and_backward(mode):
    """As where a task takes soft targets from the model in evaluation mode."""

    class ByMode(Block):
        def setup(self):
            self.dropout = nn.Dropout(0.5)

        def forward(self, x):
            return torch.tanh(self.dropout(self.linear(x)) * (1.5 if self.training else 1.0))

    def gradients(mode):
        torch.manual_seed(0)
        model, x = Net(ByMode), torch.randn(6, 4)
        activation_checkpointing.apply(model, ActivationCheckpointing(mode=mode))
        output = model(x)
        model.eval()
        with torch.no_grad():
            target = model(x)
        (output - target).square().sum().backward()
        assert not any(module.training for module in model.modules())
        return runs.gradients(model)

    assert torch.equal(gradients(mode), gradients("none"))


def test_a_scripted_module_is_refused():
    model = nn.Sequential(nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))))
    model.blocks = lambda: list(model)
    activation_checkpointing.apply(model, ActivationCheckpointing(mode="full"))
    with pytest.raises(UserError, match=r"a Sequential holds a scripted module.*activation_checkpointing=none"):
        model(torch.randn(6, 4))


# An initialisation that is done is not repeated, rewound or not; the others have no state.
NOT_REWOUND = (Options, DataDependentInit, SystemNoise, EndsInRReLU, EndsInTheFunction, HoldsTheFunction)


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in NOT_REWOUND], ids=lambda kind: kind.__name__)
def test_a_recomputation_that_is_not_rewound_fails_it(kind, monkeypatch):
    plain = state_after_training(kind)
    monkeypatch.setattr(BlockState, "rewound", lambda *_: contextlib.nullcontext())
    try:
        found = state_after_training(kind, "full")
    except RuntimeError:
        return  # autograd itself noticed: other shapes, or a saved tensor that was written
    assert runs.differences(plain, found)


def test_a_tensor_that_is_written_only_sometimes_is_named():
    class Sometimes(Block):
        def setup(self):
            self.cache, self.calls = torch.zeros(4), 0

        def scale(self, x):
            self.calls += 1
            if self.calls > 3:
                self.cache.add_(1)
            return self.cache.clone()

    with pytest.raises(TrainingStopped, match=r"`cache` in a Sometimes is written in some forwards only"):
        state_after_training(Sometimes, "full")


class Iterators(Block):
    def setup(self):
        self.numbers = itertools.count(1)

    def scale(self, x):
        return 1 / next(self.numbers)


class Cycled(Iterators):
    def setup(self):
        self.numbers = itertools.cycle([1, 2, 3])


class Yielded(Iterators):
    def setup(self):
        def numbers():
            number = 0
            while True:
                number += 1
                yield number

        self.numbers = numbers()


class TensorInAList(Block):
    def setup(self):
        self.numbers = [torch.ones(4)]

    def scale(self, x):
        return self.numbers[0].mul_(0.9).clone()


class TensorInAnObject(Block):
    def setup(self):
        self.numbers = types.SimpleNamespace(mean=torch.ones(4))

    def scale(self, x):
        return self.numbers.mean.mul_(0.9).clone()


@pytest.mark.parametrize("kind", [Iterators, Cycled, Yielded, TensorInAList, TensorInAnObject])
@pytest.mark.parametrize("mode", ["full", "selective", "budget:400"])
def test_a_change_that_cannot_be_put_back_is_refused(kind, mode):
    message = rf"activation_checkpointing={mode.partition(':')[0]}: `numbers.*` of a {kind.__name__}, a .* is changed"
    with pytest.raises(TrainingStopped, match=message):
        state_after_training(kind, mode)


@pytest.mark.parametrize("kind", [Iterators, TensorInAList, TensorInAnObject])
def test_what_a_forward_only_reads_is_not_refused(kind, monkeypatch):
    monkeypatch.setattr(kind, "scale", lambda self, x: 1.0)
    assert runs.differences(state_after_training(kind), state_after_training(kind, "full")) == []


def test_a_buffer_that_is_also_in_a_list_may_be_written():
    class Listed(Counting):
        def setup(self):
            self.register_buffer("calls", torch.zeros(()))
            self.all = [self.calls]

        def count(self):
            self.calls.add_(1)
            return float(self.calls)

    assert runs.differences(state_after_training(Listed), state_after_training(Listed, "full")) == []


def test_an_input_that_is_written_in_place_is_refused():
    class Scaled(Block):
        def forward(self, x):
            return x + torch.tanh(self.linear(x.mul_(1.5)))

    with pytest.raises(TrainingStopped, match=r"=full: argument 0 of a Scaled, a torch.Tensor, is changed"):
        state_after_training(Scaled, "full")


def test_an_input_that_is_written_through_data_is_refused():
    class Scaled(Block):
        def forward(self, x):
            x.data.mul_(1.5)
            return torch.tanh(self.linear(x))

    with pytest.raises(TrainingStopped, match=r"=full: argument 0 of a Scaled, a torch.Tensor, is changed"):
        state_after_training(Scaled, "full")


def test_an_input_that_is_not_a_number_is_not_taken_for_a_written_one():
    model = Net(NewAttribute)
    activation_checkpointing.apply(model, ActivationCheckpointing(mode="full"))
    model(torch.full((2, 4), float("nan"))).sum().backward()


@pytest.mark.parametrize("limit", ["MOST_VALUES", "DEPTH"])
def test_what_is_beyond_the_limits_is_refused(limit, monkeypatch):
    monkeypatch.setattr(contents, limit, 20)
    kind = {"MOST_VALUES": ManyLists, "DEPTH": DeepLists}[limit]
    where = {"MOST_VALUES": r"`table\[\]`", "DEPTH": r"`deep(\[\]){10}\.\.\.`"}[limit]
    with pytest.raises(
        TrainingStopped, match=rf"=full: a {kind.__name__} holds.* 100,000 .* 100 within .*{where} is bey"
    ):
        state_after_training(kind, "full")


def test_what_does_not_change_is_copied_once():
    class Reads(Counting):
        def setup(self):
            self.table, self.names = np.ones(1000), list(range(1000))
            self.options = types.SimpleNamespace(table=np.ones(10), written=np.zeros(1), inner=[np.ones(2)])

        def count(self):
            self.options.written += self.table[0]
            return float(self.options.written[0])

    block = Reads()
    state, values = BlockState(block, "full"), []
    for _ in range(3):
        values.append(state.begin((), {}))
        with state.noted(values[-1]):
            block.count()
    taken = [{id(value) for value, *_ in before.contents._taken.values()} for before in values]
    assert id(block.options.written) in taken[1]
    assert not {id(block.table), id(block.options.table), id(block.options.inner[0])} & taken[0]
    assert id(block.names) not in taken[1]
    assert taken[1] == taken[2]


class Closing(Block):
    """Fails when it is run a second time."""

    error: Exception = ValueError("it is closed")

    def setup(self):
        self.linear.register_parameter("closed", None)

    def scale(self, x):
        OPENED[0] += 1
        if OPENED[0] == 2:
            raise self.error
        return 1.0


OPENED = [0]  # a global is not put back


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_an_error_of_a_recomputation_says_where_it_is_from(mode):
    model = nn.Sequential(Closing())
    model.blocks = lambda: [model[0]]
    activation_checkpointing.apply(model, ActivationCheckpointing(mode=mode))
    OPENED[0] = 0
    with pytest.raises(
        RuntimeError, match=rf"^activation_checkpointing={mode}: the recomputation of a Closing"
    ) as caught:
        model(torch.ones(2, 4)).sum().backward()
    assert caught.value.__cause__ is Closing.error
    assert "ValueError: it is closed" in str(caught.value)
    assert "activation_checkpointing=none" in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        MemoryError("no"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        TrainingStopped("as it is"),
    ],
    ids=str,
)
def test_other_errors_of_a_recomputation_stay_as_they_are(error, monkeypatch):
    monkeypatch.setattr(Closing, "error", error)
    model = nn.Sequential(Closing())
    model.blocks = lambda: [model[0]]
    activation_checkpointing.apply(model, ActivationCheckpointing(mode="full"))
    OPENED[0] = 0
    with pytest.raises(type(error)) as caught:
        model(torch.ones(2, 4)).sum().backward()
    assert caught.value is error


class Swallowing(Block):
    def forward(self, x):
        try:
            return torch.tanh(self.linear(x).sin().exp())
        except Exception:
            return torch.tanh(self.linear(x)) * 0


@pytest.mark.parametrize("mode", ["full", "selective", "budget:400"])
def test_a_block_that_swallows_the_end_of_its_recomputation_is_told(mode):
    with pytest.raises(RuntimeError, match=r"of a Swallowing .* catches the exception with which torch ends a recomp"):
        state_after_training(Swallowing, mode)


class WrittenProduct(Block):
    def forward(self, x):
        return torch.relu_(self.linear(x))


def test_a_write_to_what_selective_keeps_says_which_settings_do_without():
    with pytest.raises(RuntimeError, match="use activation_checkpointing=full or activation_checkpointing=budget"):
        state_after_training(WrittenProduct, "selective")
    plain = state_after_training(WrittenProduct)
    for mode in ("full", "budget:400", "budget:900"):
        assert runs.differences(plain, state_after_training(WrittenProduct, mode)) == []


@pytest.mark.parametrize("is_array", [True, False])
def test_a_first_forward_in_evaluation_mode_does_not_decide_for_training(is_array):
    class CountsInTraining(Block):
        def setup(self):
            self.calls = np.zeros(1) if is_array else torch.zeros(1)

        def scale(self, x):
            if self.training:
                self.calls += 1
            return 1 / (1 + float(self.calls[0]))

    def gradients(mode):
        torch.manual_seed(0)
        model, x = Net(CountsInTraining), torch.randn(6, 4, requires_grad=True)
        activation_checkpointing.apply(model, ActivationCheckpointing(mode=mode))
        model.eval()
        torch.autograd.grad(model(x).sum(), x)
        model.train()
        for _ in range(2):
            model(x).square().sum().backward()
        return runs.gradients(model)

    assert torch.equal(gradients("full"), gradients("none"))


def test_a_gradient_penalty_with_selective_names_the_setting():
    def penalised(mode):
        torch.manual_seed(0)
        model, x = Net(NewAttribute), torch.randn(6, 4, requires_grad=True)
        activation_checkpointing.apply(model, ActivationCheckpointing(mode=mode))
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        return runs.gradients(model)

    assert torch.equal(penalised("full"), penalised("none"))
    with pytest.raises(RuntimeError, match=r"activation_checkpointing=selective: the recomputation of a NewAttribute"):
        penalised("selective")


def test_a_recomputation_moves_no_version_and_keeps_every_object():
    model = Net(CountedInPlace)
    activation_checkpointing.apply(model, ActivationCheckpointing(mode="full"))
    loss = model(torch.randn(6, 4)).sum()
    tensors = [*model.buffers(), *model.parameters()]
    before = [version_of(t) for t in tensors]
    loss.backward()
    after = [*model.buffers(), *model.parameters()]
    assert all(a is b for a, b in zip(tensors, after, strict=True))
    assert [version_of(t) for t in after] == before


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_graph_that_is_kept_can_be_gone_through_twice(mode):
    def gradients(mode):
        torch.manual_seed(0)
        model, x = Net(CountedInPlace), torch.randn(6, 4)
        activation_checkpointing.apply(model, ActivationCheckpointing(mode=mode))
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return runs.gradients(model)

    if mode == "selective":  # torch drops what it has kept after the first backward, and says so
        with pytest.raises(RuntimeError, match="extra time"):
            gradients(mode)
    else:
        assert torch.equal(gradients(mode), gradients("none"))


# Shipped models

DEPTHS = {"mlp": (2, 4), "gpt": (1, 4), "resnet": (18, 50)}
SHIPPED = [(model, depth, mode, every) for model in DEPTHS for depth in DEPTHS[model] for mode, every in SETTINGS]
QUICK = [("gpt", 4, "full", 2), ("gpt", 4, "selective", 1), ("mlp", 4, "full", 3), ("resnet", 18, "full", 2)]


def after_a_step(folder, model, depth, mode, every):
    """Gradients and buffers of the second step, in micro-batches of 6, 6 and 4."""
    chosen = [f"activation_checkpointing={mode}"]
    if mode != "none":
        chosen.append(f"activation_checkpointing.every={every}")
    run = runs.prepare(folder, *runs.MODELS[model], f"model.depth={depth}", "batch.micro_size=6", *chosen)
    try:
        runs.loop.train_step(run)
        runs.accumulate(run)
    finally:
        run.tracker.close()
    network = run.state.model
    return {
        "gradients": {name: p.grad for name, p in network.named_parameters()},
        "buffers": dict(network.named_buffers()),
    }


@pytest.mark.parametrize(
    ("model", "depth", "mode", "every"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in SHIPPED],
)
def test_shipped_models(tmp_path, model, depth, mode, every):
    plain = after_a_step(tmp_path, model, depth, "none", 1)
    assert runs.differences(plain, after_a_step(tmp_path, model, depth, mode, every)) == []


def test_attention_that_draws_is_not_kept():
    """Later operations of a recomputation would otherwise draw what attention drew in the forward."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    q = torch.ones(1, 1, 2, 2)
    policy = activation_checkpointing.policy
    assert policy(None, attention, q, q, q, 0.1).name == "PREFER_RECOMPUTE"
    assert policy(None, attention, q, q, q, dropout_p=0.1).name == "PREFER_RECOMPUTE"
    assert policy(None, attention, q, q, q, 0.0).name == "MUST_SAVE"
    assert policy(None, attention, q, q, q).name == "MUST_SAVE"
    assert policy(None, torch.ops.aten.mm.default, q, q).name == "MUST_SAVE"
