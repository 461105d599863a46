"""The direct ways do what the documented ones do, and leave everything unusual to them."""

import functools
import weakref

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from trainapp import torch_direct


def network_and_loss(dtype=torch.float32):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).to(dtype)
    return network, network(torch.randn(5, 4, dtype=dtype)).sum()


def gradients(network):
    return [p.grad.clone() for p in network.parameters()]


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError


def test_what_a_failed_backward_left_in_the_engine_is_released():
    leaf = torch.ones(3, requires_grad=True)
    saved = [leaf * 2, leaf * 3]  # of two branches, one of which waits while the other fails
    loss = sum((part.sin() + Failing.apply(part)).sum() for part in saved)
    storages = [weakref.ref(part.untyped_storage()) for part in saved]
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    del loss, saved
    kept = sum(storage() is not None for storage in storages)
    torch_direct.release_failed_backward()
    assert not any(storage() is not None for storage in storages)
    assert kept, "torch keeps none: nothing is to be released any more"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_backward_gives_the_same_gradients_and_adds_them(dtype):
    (direct, one), (documented, other) = network_and_loss(dtype), network_and_loss(dtype)
    weight = torch.tensor(0.3, dtype=dtype)
    torch_direct.backward(one, weight)
    torch_direct.backward(direct(torch.ones(1, 4, dtype=dtype)).sum(), weight)
    other.backward(weight)
    documented(torch.ones(1, 4, dtype=dtype)).sum().backward(weight)
    assert all(map(torch.equal, gradients(direct), gradients(documented)))


def test_backward_of_another_dtype_is_what_torch_makes_of_it():
    direct, direct_loss = network_and_loss(torch.float64)
    documented, documented_loss = network_and_loss(torch.float64)
    torch_direct.backward(direct_loss, torch.tensor(0.3))
    documented_loss.backward(torch.tensor(0.3))
    assert all(map(torch.equal, gradients(direct), gradients(documented)))


def test_backward_without_anything_to_train_raises_as_torch_does():
    for way in (torch_direct.backward, torch.Tensor.backward):
        with pytest.raises(RuntimeError, match="does not require grad"):
            way(torch.tensor(1.0), torch.tensor(1.0))


def test_backward_frees_the_graph():
    _, loss = network_and_loss()
    torch_direct.backward(loss, torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="second time"):
        torch_direct.backward(loss, torch.tensor(1.0))


def test_a_subclass_of_tensor_is_asked():
    class Loud(torch.Tensor):
        seen = False

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            Loud.seen |= getattr(func, "__name__", "") == "backward"
            return super().__torch_function__(func, types, args, kwargs or {})

    parameter = nn.Parameter(torch.ones(()))
    torch_direct.backward((parameter * 2).as_subclass(Loud), torch.tensor(1.0))
    assert Loud.seen
    assert parameter.grad == 2


class Fresh(torch.optim.SGD):
    """A class of its own, so that a test may change it."""


def optimizer_of(kind=torch.optim.AdamW):
    network, loss = network_and_loss()
    loss.backward()
    return network, kind(network.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor, Fresh])
def test_step_gives_the_same_parameters(kind):
    (direct, one), (documented, other) = optimizer_of(kind), optimizer_of(kind)
    for _ in range(3):
        torch_direct.step(one)
        other.step()
    assert all(map(torch.equal, direct.parameters(), documented.parameters()))


def records(optimizer):
    """The optimizer's records in a profile of its step."""
    with torch.profiler.profile() as profile:
        torch_direct.step(optimizer)
    return [event.name for event in profile.events() if event.name.startswith("Optimizer.step")]


def test_a_profiler_sees_the_step():
    assert records(optimizer_of()[1]) == ["Optimizer.step#AdamW.step"]


def test_the_usual_step_makes_no_record(monkeypatch):
    monkeypatch.setattr(torch.autograd.profiler, "_is_profiler_enabled", False)  # other tests of this process may leave
    monkeypatch.setattr(torch_optimizer, "_global_optimizer_pre_hooks", {})  # one of these
    monkeypatch.setattr(torch_optimizer, "_global_optimizer_post_hooks", {})
    made = []
    _, optimizer = optimizer_of()
    monkeypatch.setattr(torch.autograd.profiler.record_function, "__enter__", lambda self: made.append(self.name))
    monkeypatch.setattr(torch.autograd.profiler.record_function, "__exit__", lambda *_: None)
    torch_direct.step(optimizer)
    assert made == []
    optimizer.step()
    assert made == ["Optimizer.step#AdamW.step"]


@pytest.mark.parametrize("when", ["pre", "post"])
@pytest.mark.parametrize("whose", ["own", "of all"])
def test_hooks_run(when, whose):
    _, optimizer = optimizer_of()
    calls = []
    name = f"register_step_{when}_hook" if whose == "own" else f"register_optimizer_step_{when}_hook"
    handle = getattr(optimizer if whose == "own" else torch_optimizer, name)(lambda *_: calls.append(when))
    try:
        torch_direct.step(optimizer)
    finally:
        handle.remove()
    torch_direct.step(optimizer)
    assert calls == [when]


def test_a_step_that_was_replaced_is_called():
    _, optimizer = optimizer_of()
    calls, original = [], optimizer.step
    optimizer.step = lambda: calls.append(original())  # as torch's schedulers and torch.compile do
    torch_direct.step(optimizer)
    assert calls == [None]


def test_a_step_that_its_class_has_wrapped_again_is_called(monkeypatch):
    _, optimizer = optimizer_of(Fresh)
    calls, original = [], Fresh.step

    @functools.wraps(original)  # copies torch's marks, too
    def counted(self, *args):
        calls.append(self)
        return original(self, *args)

    monkeypatch.setattr(Fresh, "step", counted)
    torch_direct.step(optimizer)
    assert calls == [optimizer]


def test_an_optimizer_that_is_none_of_torch_is_called():
    class Own:
        def __init__(self):
            self.steps = 0

        def step(self):
            self.steps += 1

    optimizer = Own()
    torch_direct.step(optimizer)
    assert optimizer.steps == 1
