"""Activation offload: results bit for bit, every storage once, nothing that stays alive anyway.

The copies are real. Here they go from the CPU to the CPU; tests/gpu has those between a GPU and the host.
"""

import gc
import weakref

import pytest
import runs
import torch
from torch import nn

from trainapp.techniques import offload
from trainapp.techniques.offload import Offload

GPT = (*runs.MODELS["gpt"], "checkpointing=off")


@pytest.fixture(autouse=True)
def move_all(monkeypatch):
    """Tensors as small as those here, too."""
    monkeypatch.setattr(offload, "LEAST", 1)


class Counted(Offload):
    """Moves tensors of the CPU. `moved`: the bytes of each storage that was; `stored`: what belongs to the graph."""

    def __init__(self, model):
        super().__init__(model, "cpu")
        self.stored = []

    @property
    def moved(self):
        return [size for size, _ in self.stored]

    def _pack(self, tensor):
        packed = super()._pack(tensor)
        if self._last() not in (None, self.stored[-1][1]() if self.stored else None):
            self.stored.append((self._last()._host.nbytes, self._last))
        return packed


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
    (moving.wrap_compute(model) if moving else model)(x).backward()
    return torch.cat([x.grad.flatten(), runs.gradients(model).flatten()])


def test_gradients_are_the_same_and_each_storage_moves_once():
    torch.manual_seed(0)
    model = Views()
    moving = Counted(model)
    assert torch.equal(gradient(model, moving), gradient(model, None))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model(torch.randn(6, 6, requires_grad=True))
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    storages = {t.untyped_storage().data_ptr() for t in saved} - own
    assert len(moving.moved) == len(storages) < len(saved)


def test_a_wrong_copy_changes_them(monkeypatch):
    """The comparison above can fail."""
    model, copy = Views(), Offload.copy
    monkeypatch.setattr(Offload, "copy", lambda self, to, source: copy(self, to, source.roll(1)))
    assert not torch.equal(gradient(model, Counted(model)), gradient(model, None))


def test_what_is_moved_is_not_kept():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    seen = []
    model[1].register_forward_hook(lambda m, i, out: seen.append(weakref.ref(out.untyped_storage())))
    loss = Counted(model).wrap_compute(model)(torch.randn(4, 8)).sum()
    assert seen[0]() is None
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_tensor_that_is_written_after_it_was_saved_comes_back_as_it_was_saved():
    def forward(x):
        y = x * 1
        first = (y * y).sum()
        with torch.no_grad():
            y.mul_(2)
        return first + (y * y).sum()

    x, moving = torch.arange(4.0, requires_grad=True), Counted(nn.Module())
    moving.wrap_compute(forward)(x).backward()
    assert len(moving.moved) == 2
    assert x.grad.tolist() == [2 * v + 4 * v for v in range(4)]


def test_backward_fetches_one_ahead(monkeypatch):
    """The next storage is on its way before it is needed."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    moving = Counted(model)
    loss = moving.wrap_compute(model)(torch.randn(4, 8)).sum()
    events, storage, copy = [], offload._Stored.storage, moving.copy
    monkeypatch.setattr(offload._Stored, "storage", lambda self: (storage(self), events.append("used"))[0])
    monkeypatch.setattr(moving, "copy", lambda *both: (copy(*both), events.append("fetched"))[0])
    loss.backward()
    assert events == ["fetched", "fetched", "used", *(["fetched", "used"] * 2), "used"]


def test_a_failed_forward_leaves_nothing():
    model = nn.Linear(8, 8)
    moving = Counted(model)

    def failing(x):
        y = model(x).tanh()
        raise torch.OutOfMemoryError(f"out of memory with {y.shape}")

    with pytest.raises(torch.OutOfMemoryError):
        moving.wrap_compute(failing)(torch.randn(4, 8))
    gc.collect()
    assert moving.stored
    assert not any(one() for _, one in moving.stored)
    assert not moving._stored


@pytest.mark.parametrize("mode", ["all", "inputs"])
def test_a_run_whose_activations_move_ends_alike(tmp_path, mode, monkeypatch):
    """The real step, accumulating, with the copies of the CPU's tensors."""
    moved, found, made = [], [], offload._Stored.__init__
    monkeypatch.setattr(offload._Stored, "__init__", lambda *a: (moved.append(1), made(*a))[1])
    for device_type in ("cuda", "cpu"):  # the first moves nothing here
        monkeypatch.setattr(Offload.__init__, "__defaults__", (device_type,))
        chosen = ("activation_checkpointing=full", f"memory.offload_activations={mode}", "batch.micro_size=6")
        run = runs.prepare(tmp_path, *GPT, *chosen, "model.depth=3")
        for _ in range(2):
            runs.loop.train_step(run)
        found.append(torch.cat([p.detach().flatten() for p in run.state.model.parameters()]))
        run.close()
        assert bool(moved) is (device_type == "cpu")
    assert torch.equal(*found)
    micro_batches, blocks = 2 * 3, 3
    if mode == "inputs":
        assert len(moved) == micro_batches * blocks
    else:
        assert len(moved) > micro_batches * blocks
