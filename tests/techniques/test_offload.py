"""Activation offload: results bit for bit, every storage once, nothing that stays alive anyway.

The copies are real. Here they go from the CPU to the CPU; tests/gpu has those between a GPU and the host.
"""

import gc
import weakref

import pytest
import runs
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainapp.errors import UserError
from trainapp.techniques import offload
from trainapp.techniques.offload import NoOffload, Offload

GPT = (*runs.MODELS["gpt"], "checkpointing=off")


@pytest.fixture(autouse=True)
def move_all(monkeypatch):
    """Tensors as small as those here, too."""
    monkeypatch.setattr(offload, "LEAST", 1)


class Counted(Offload):
    """Moves tensors of the CPU. `moved`: the bytes of each storage that was."""

    def __init__(self, model):
        super().__init__(model, "cpu")
        self.moved = []
        store = self._copies.store

        def counted(storage, device):
            self.moved.append(storage.nbytes())
            return store(storage, device)

        self._copies.store = counted


class Views(nn.Module):
    """Saves an input, a transposed view of it, a slice and a result; two of them share memory."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.register_buffer("scale", torch.rand(6))

    def forward(self, x):
        y = x @ self.weight
        z = y.T * y[:, 1:].sum() * self.scale
        return (torch.tanh(z) * z.exp() * y[::2].square().sum()).sum()


def gradient(model, moving):
    torch.manual_seed(0)
    x = torch.randn(6, 6, requires_grad=True)
    model.zero_grad()
    with moving.forward():
        loss = model(x)
    loss.backward()
    return torch.cat([x.grad.flatten(), runs.gradients(model).flatten()])


def test_gradients_are_the_same_and_each_storage_moves_once():
    torch.manual_seed(0)
    model = Views()
    moving = Counted(model)
    assert torch.equal(gradient(model, moving), gradient(model, NoOffload()))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model(torch.randn(6, 6, requires_grad=True))
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    storages = {t.untyped_storage().data_ptr() for t in saved} - own
    assert len(moving.moved) == len(storages) < len(saved)


def test_a_wrong_copy_changes_them(monkeypatch):
    """The comparison above can fail."""
    model, fetch = Views(), offload._Copies.fetch
    monkeypatch.setattr(offload._Copies, "fetch", lambda self, host: fetch(self, host.roll(1)))
    assert not torch.equal(gradient(model, Counted(model)), gradient(model, NoOffload()))


def test_what_is_moved_is_not_kept():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    moving = Counted(model)
    seen = []
    model[1].register_forward_hook(lambda m, i, out: seen.append(weakref.ref(out.untyped_storage())))
    with moving.forward():
        loss = model(torch.randn(4, 8)).sum()
    assert seen[0]() is None
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_tensor_that_is_written_after_it_was_saved_comes_back_as_it_was_saved():
    x = torch.arange(4.0, requires_grad=True)
    moving = Counted(nn.Module())
    with moving.forward():
        y = x * 1
        first = (y * y).sum()
        with torch.no_grad():
            y.mul_(2)
        second = (y * y).sum()
    assert len(moving.moved) == 2
    (first + second).backward()
    assert x.grad.tolist() == [2 * v + 4 * v for v in range(4)]


def test_backward_fetches_ahead_and_frees_in_order(monkeypatch):
    """The next storage is on its way before it is needed; with no allowance, none is."""
    for ahead, expected in ((0, [0, 1, 2, 3]), (2**27, [0, 1, 1, 1])):
        monkeypatch.setattr(offload, "AHEAD", ahead)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        moving = Counted(model)
        fetched, waited = [], []
        fetch, wait = moving._copies.fetch, moving._copies.wait
        moving._copies.fetch = lambda host, f=fetch, n=fetched, w=waited: (n.append(len(w)), f(host))[1]
        with moving.forward():
            loss = model(torch.randn(4, 8)).sum()
        moving._copies.wait = lambda arrival, f=wait, w=waited: (w.append(1), f(arrival))[1]
        loss.backward()
        assert fetched == expected  # how many were in use when each was asked for
        assert len(waited) == 4


def test_a_failed_forward_leaves_nothing():
    model = nn.Linear(8, 8)
    moving = Counted(model)
    kept = []
    store = moving._copies.store

    def noted(storage, device):
        stored = store(storage, device)
        kept.append(weakref.ref(stored))
        return stored

    moving._copies.store = noted

    def failing():
        with moving.forward():
            y = model(torch.randn(4, 8)).tanh()
            raise torch.OutOfMemoryError(f"out of memory with {y.shape}")

    with pytest.raises(torch.OutOfMemoryError):
        failing()
    gc.collect()
    assert kept
    assert [one() for one in kept] == [None] * len(kept)
    assert not moving._copies._leaving
    assert not moving._known


def test_of_checkpointed_blocks_the_inputs_alone_are_moved():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    x = torch.randn(4, 8)
    model(x).square().sum().backward()
    expected = runs.gradients(model)
    moving = Counted(model)
    for block in model:
        block.forward = lambda *i, forward=block.forward: offload._with_inputs_moved(moving.forward, forward, *i)
    model.zero_grad()
    model(x).square().sum().backward()
    assert torch.equal(runs.gradients(model), expected)
    assert moving.moved == [4 * 8 * 4] * 3


def test_without_gradients_nothing_happens():
    moving = Counted(nn.Linear(2, 2))
    with torch.no_grad(), moving.forward():
        nn.Linear(2, 2)(torch.ones(3, 2))
    assert moving.moved == []


@pytest.mark.parametrize(
    "more", [("all",), ("all", "activation_checkpointing=selective"), ("inputs", "activation_checkpointing=full")]
)
def test_on_the_cpu_a_run_is_the_same_with_the_same_peak(tmp_path, more):
    mode, *others = more
    found = []
    for setting in ("none", mode):
        run = runs.prepare(tmp_path, *GPT, *others, f"memory.offload_activations={setting}")
        for _ in range(2):
            runs.loop.train_step(run)
        found.append((run.memory.peak, torch.cat([p.detach().flatten() for p in run.state.model.parameters()])))
        run.close()
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("mode", ["all", "inputs"])
def test_a_run_whose_activations_move_ends_alike(tmp_path, mode, monkeypatch):
    """The real step, accumulating, with the copies of the CPU's tensors."""
    moved = []
    store = offload._Copies.store
    found = []
    for is_moved in (False, True):
        if is_moved:
            monkeypatch.setattr(Offload, "__init__", _of_the_cpu(Offload.__init__))
            monkeypatch.setattr(offload._Copies, "store", lambda *a: (moved.append(1), store(*a))[1])
        chosen = ("activation_checkpointing=full", f"memory.offload_activations={mode}", "batch.micro_size=6")
        run = runs.prepare(tmp_path, *GPT, *chosen, "model.depth=3")
        for _ in range(2):
            runs.loop.train_step(run)
        found.append(torch.cat([p.detach().flatten() for p in run.state.model.parameters()]))
        run.close()
    assert torch.equal(*found)
    micro_batches, blocks = 2 * 3, 3
    if mode == "inputs":
        assert len(moved) == micro_batches * blocks
    else:
        assert len(moved) > micro_batches * blocks


def _of_the_cpu(init):
    return lambda self, model, device_type="cpu", **others: init(self, model, device_type, **others)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("all", "train.compile=true"), "memory.offload_activations=all with train.compile=true: a compiled graph"),
        (
            ("inputs",),
            "memory.offload_activations=inputs with activation_checkpointing=none: it moves the inputs of checkpointed",
        ),
        (("all", "parallel=fsdp"), "memory.offload_activations=all with parallel=fsdp: what FSDP has gathered"),
    ],
)
def test_refusals(tmp_path, overrides, message):
    mode, *others = overrides
    with pytest.raises(UserError) as refused:
        runs.prepare(tmp_path, *GPT, f"memory.offload_activations={mode}", *others)
    assert str(refused.value).startswith(message)
