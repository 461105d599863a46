"""Activation checkpointing changes nothing but memory: gradients, buffers and all other state, bit for bit."""

import contextlib
import copy
import itertools
import random
from collections import deque

import numpy as np
import pytest
import runs
import torch
from torch import nn

from trainapp.config.schema import ActivationCheckpointing
from trainapp.errors import TrainingStopped, UserError
from trainapp.state.snapshot import Snapshot
from trainapp.techniques import checkpointing
from trainapp.techniques.checkpointing import choose_modes
from trainapp.torch_private import version_of

SETTINGS = [(mode, every) for mode in ("full", "selective") for every in (1, 2)]


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
        return 1 + self.stat


class CountedInPlace(Block):
    def setup(self):
        self.register_buffer("count", torch.zeros(1))

    def scale(self, x):
        self.count.add_(1)
        return self.count.clone()


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


class Queue(Block):
    """Declared as extra state."""

    def setup(self):
        self.means, self.noise = deque(maxlen=3), [random.Random(2)]

    def scale(self, x):
        self.means.append(float(x.mean()) + self.noise[0].random())
        return 1 + sum(self.means)

    def get_extra_state(self):
        return list(self.means)

    def set_extra_state(self, state):
        self.means = deque(state, maxlen=3)


class GlobalGenerators(Block):
    """As of layer drop and of noise; every second `randn` uses up a cached value and moves no word of the state."""

    def scale(self, x):
        return (1.0 if random.random() < 0.5 else 0.1) * float(np.random.randn())


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


class EndsInRReLU(Block):
    def setup(self):
        self.end = nn.RReLU()

    def forward(self, x):
        return self.end(self.linear(x))


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
        for layer in [*self.layers, self.layers[0]]:
            x = layer(x) if not isinstance(layer, Options) else layer(x, debug=False)
        return x


KINDS = [kind for kind in vars().copy().values() if isinstance(kind, type) and issubclass(kind, Block)]
KINDS.remove(Block)


def state_after_training(kind, mode="none", every=1):
    """Everything that two steps of two micro-batches leave in the model and in the global generators."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model, inputs = Net(kind), torch.randn(4, 6, 4)
    checkpointing.apply(model, ActivationCheckpointing(mode=mode, every=every))
    for x in inputs:
        model(x).square().sum().backward()
    attributes = {
        f"{name}.{key}": copy.deepcopy(value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if type(value) in (int, float, bool, torch.Tensor) and key not in vars(nn.Module())
    }
    drawn = [torch.rand(1), random.random(), np.random.rand()]
    for layer in model.layers:
        if isinstance(layer, OwnGenerator):
            drawn.append(torch.rand(1, generator=layer.generator))
        if isinstance(layer, OwnNumpyGenerators):
            drawn += [layer.modern.random(), layer.legacy.rand(), layer.plain.random()]
    return {
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "buffers": dict(model.named_buffers()),
        "attributes": attributes,
        "drawn": drawn,
    }


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_recomputation_begins_as_the_forward_did(kind):
    plain = state_after_training(kind)
    for mode, every in SETTINGS:
        assert runs.differences(plain, state_after_training(kind, mode, every)) == [], (mode, every)


# The others have no state, or none that a second forward would miss.
NOT_REWOUND = (Options, EndsInRReLU)


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in NOT_REWOUND], ids=lambda kind: kind.__name__)
def test_a_recomputation_that_is_not_rewound_fails_it(kind, monkeypatch):
    plain = state_after_training(kind)
    monkeypatch.setattr(Snapshot, "replayed", lambda *_: contextlib.nullcontext())
    try:
        found = state_after_training(kind, "full")
    except RuntimeError:
        return  # autograd itself noticed: other shapes, or a saved tensor that was written
    assert runs.differences(plain, found)


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
        checkpointing.apply(model, ActivationCheckpointing(mode=mode))
        output = model(x)
        model.eval()
        with torch.no_grad():
            target = model(x)
        (output - target).square().sum().backward()
        assert not any(module.training for module in model.modules())
        return runs.gradients(model)

    assert torch.equal(gradients(mode), gradients("none"))


def test_a_recomputation_moves_no_version_and_keeps_every_object():
    model = Net(CountedInPlace)
    checkpointing.apply(model, ActivationCheckpointing(mode="full"))
    loss = model(torch.randn(6, 4)).sum()
    tensors = [*model.buffers(), *model.parameters()]
    before = [version_of(t) for t in tensors]
    loss.backward()
    after = [*model.buffers(), *model.parameters()]
    assert all(a is b for a, b in zip(tensors, after, strict=True))
    assert [version_of(t) for t in after] == before


def test_what_is_lost_is_refused():
    class Sometimes(Block):
        def setup(self):
            self.table = torch.ones(4)

        def scale(self, x):
            return self.table.clone()

    model = Net(Sometimes)
    checkpointing.apply(model, ActivationCheckpointing(mode="full"))
    loss = model(torch.randn(6, 4)).sum()
    model.layers[1].table.add_(1)
    with pytest.raises(TrainingStopped, match="a tensor of a Sometimes was written by something else"):
        loss.backward()


def test_an_input_or_a_parameter_that_is_written_in_place_is_refused():
    class Scaled(Block):
        def forward(self, x):
            return x + torch.tanh(self.linear(x.mul_(1.5)))

    class Normalised(Block):
        def forward(self, x):
            self.linear.weight.detach().div_(self.linear.weight.detach().norm())
            return self.linear(x)

    for kind, written in ((Scaled, "a tensor that it is called with"), (Normalised, "a parameter")):
        with pytest.raises(TrainingStopped, match=f"the forward of a {kind.__name__} writes in place to {written}"):
            state_after_training(kind, "full")


def test_a_write_to_what_selective_keeps_is_an_error_and_trains_with_full():
    class WrittenProduct(Block):
        def forward(self, x):
            return torch.relu_(self.linear(x))

    with pytest.raises(RuntimeError, match="has been mutated"):
        state_after_training(WrittenProduct, "selective")
    assert runs.differences(state_after_training(WrittenProduct), state_after_training(WrittenProduct, "full")) == []


# Modes per block


def peak_of(modes, peaks):
    return sum(peaks[mode] for mode in modes) / len(modes)


@pytest.mark.parametrize("selective", [40, 70, 100, 120])
def test_the_cheapest_modes_that_fit(selective):
    """Compared with all combinations of four blocks."""
    peaks, cost = {"none": 100, "selective": selective, "full": 52}, {"none": 0, "selective": 0.3, "full": 1}
    combinations = list(itertools.product(peaks, repeat=4))
    for limit in range(30, 110):
        chosen = choose_modes(peaks, limit, 4)
        fitting = [modes for modes in combinations if peak_of(modes, peaks) <= limit]
        if fitting:
            least = min(sum(cost[mode] for mode in modes) for modes in fitting)
            assert sum(cost[mode] for mode in chosen) == pytest.approx(least)
            assert peak_of(chosen, peaks) <= limit
        else:
            assert peak_of(chosen, peaks) == min(peaks.values())


def test_blocks_are_kept_whole_from_the_last_one_back():
    peaks = {"none": 100, "selective": 70, "full": 40}
    assert choose_modes(peaks, 100, 3) == ["none"] * 3
    assert choose_modes(peaks, 85, 3) == ["selective", "selective", "none"]
    assert choose_modes(peaks, 60, 3) == ["full", "selective", "selective"]


def test_modes_of_blocks():
    model = Net(NewAttribute)
    checkpointing.apply(model, ActivationCheckpointing(modes=["full", "none", "selective"]))
    assert [hasattr(layer.forward, "func") for layer in model.layers] == [True, False, True]
    with pytest.raises(UserError, match=r"modes=\['full'\]: names 1 blocks, but Net has 3"):
        checkpointing.apply(Net(NewAttribute), ActivationCheckpointing(modes=["full"]))


def test_a_budget_for_the_compiler_refuses_dropout():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    with pytest.raises(UserError, match=r"compiled_budget=0.5: torch would recompute dropout \(1\)"):
        checkpointing.apply(model, ActivationCheckpointing(compiled_budget=0.5))


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
    policy = checkpointing.policy
    assert policy(None, attention, q, q, q, 0.1).name == "PREFER_RECOMPUTE"
    assert policy(None, attention, q, q, q, dropout_p=0.1).name == "PREFER_RECOMPUTE"
    assert policy(None, attention, q, q, q, 0.0).name == "MUST_SAVE"
    assert policy(None, attention, q, q, q).name == "MUST_SAVE"
    assert policy(None, torch.ops.aten.mm.default, q, q).name == "MUST_SAVE"
