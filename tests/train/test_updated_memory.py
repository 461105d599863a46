"""`optimizer.in_backward`: a backward that reads a parameter after its update is refused, whichever way it reads it."""

import pytest
import runs
import torch
from test_in_backward import ON, PLAIN, ended
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainapp.errors import UserError
from trainapp.optim.updated_memory import UpdatedMemory
from trainapp.planning import planner
from trainapp.planning.values import NeedsValues

REFUSED = r"optimizer.in_backward=true: the backward needs `outer.weight` again after its gradient is complete"


class Reading(nn.Module):
    """The inner layer's gradient is that of `inner(x)` times the outer layer's weight, which is updated before it."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, images):
        return self.outer(self.product(self.inner(images.flatten(1)))).tanh()[:, :10]

    def product(self, x):
        raise NotImplementedError


class Recomputing(Reading):
    """Reads the weight when it recomputes."""

    def product(self, x):
        return checkpoint(lambda x: x @ self.outer.weight.detach(), x.sin(), use_reentrant=False)


class RecomputingReentrantly(Reading):
    def product(self, x):
        return checkpoint(lambda x: x @ self.outer.weight.detach(), x.sin(), use_reentrant=True)


class Data(Reading):
    """`.data` has a version of its own."""

    def product(self, x):
        return x @ self.outer.weight.data


class HandedThrough(Reading):
    """Torch compares no versions of what hooks have packed."""

    def product(self, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return x @ self.outer.weight.detach()


class Kept(Reading):
    """A function that keeps a tensor by itself."""

    def product(self, x):
        return _Product.apply(x, self.outer.weight.detach())


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.weight.T, None


class Hooked(Reading):
    """A hook on a gradient."""

    def product(self, x):
        x.register_hook(lambda gradient: gradient @ self.outer.weight)
        return x


class Aliased(Reading):
    """A tensor that has shared the weight's memory since construction."""

    def __init__(self):
        super().__init__()
        self.alias = self.outer.weight.data

    def product(self, x):
        return x @ self.alias


class Flat(nn.Module):
    """All parameters are parts of one storage, as those of an LSTM on CUDA."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        flat = torch.cat([p.detach().flatten() for p in self.parameters()])
        start = 0
        for p in self.parameters():
            p.data = flat[start : start + p.numel()].view_as(p)
            start += p.numel()

    def forward(self, images):
        x = images.flatten(1)
        for layer in self.layers:
            x = layer(x).tanh()
        return x[:, :10]


class ShapesOnly(Reading):
    """A recomputation that looks at the shape of the weight."""

    def product(self, x):
        return checkpoint(lambda x: x.sin() + torch.zeros_like(self.outer.weight)[0], x, use_reentrant=False)


class Block(nn.Module):
    """Its bias is updated before it is recomputed, which ends before the bias."""

    def __init__(self):
        super().__init__()
        self.layer, self.bias = nn.Linear(64, 64), nn.Parameter(torch.zeros(64))

    def forward(self, x):
        return self.layer(x).sin() + self.bias


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def blocks(self):
        return list(self.layers)

    def forward(self, images):
        x = images.flatten(1)
        for layer in self.layers:
            x = layer(x)
        return x[:, :10]


READING = (Recomputing, RecomputingReentrantly, Data, HandedThrough, Kept, Hooked, Aliased)


def own(kind):
    name = f"test_updated_memory.{kind.__name__}"
    return ("~model", f"+model._target_={name}", "user_packages=[test_updated_memory]", "data=digits")


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("kind", READING)
def test_a_read_after_the_update_is_refused(tmp_path, monkeypatch, kind, optimizer):
    """Negative control: unnoticed, it changes the training. Fused AdamW moves no version on the CPU (torch 2.13)."""
    settings = (*own(kind), f"optimizer={optimizer}")
    with pytest.raises(UserError, match=REFUSED) as refused:
        ended(tmp_path / "refused", *settings, ON)
    assert "\n" not in str(refused.value)
    monkeypatch.setattr(UpdatedMemory, "_require_not_updated", lambda *_: None)
    assert runs.differences(ended(tmp_path / "after", *settings), ended(tmp_path / "within", *settings, ON))


@pytest.mark.parametrize("kind", [Flat, ShapesOnly, Blocks])
def test_what_reads_nothing_updated_trains_as_without(tmp_path, kind):
    settings = (*own(kind), *(("activation_checkpointing=full",) if kind is Blocks else ()))
    assert runs.differences(ended(tmp_path / "after", *settings), ended(tmp_path / "within", *settings, ON)) == []


def test_a_read_in_a_later_step_is_refused(tmp_path, monkeypatch):
    """Steps whose size is proven are looked at, too."""
    calls = []

    def product(self, x):
        calls.append(1)
        return x if len(calls) < 6 else x @ self.outer.weight.data

    monkeypatch.setattr(Reading, "product", product)
    steps = ("train.max_steps=8", "batch.micro_size=16", "every.log=null", "train.check_loss=false")
    with pytest.raises(UserError, match=REFUSED):
        ended(tmp_path, *own(Reading), ON, *steps)
    assert len(calls) == 6


def test_a_plan_proposes_it_only_where_it_trains(tmp_path):
    with pytest.raises(UserError, match=REFUSED):
        planner.plan(runs.configure(tmp_path / "plan", *own(Data), ON, *PLAIN))


class ReadingInBackward(nn.Module):
    """Reads a value in the backward only, after the last layer's update."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, images):
        x = self.inner(images.flatten(1)).tanh()
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 2 if gradient.sum() > 0 else gradient)
        return self.outer(x)


def test_a_model_that_reads_after_an_update_cannot_be_traced(tmp_path):
    """What the optimizer reads in it is no reason: Adafactor reads two numbers per parameter."""
    settings = (ON, *PLAIN, "plan.techniques=false")
    with pytest.raises(NeedsValues, match="backward after updates"):
        planner.plan(runs.configure(tmp_path / "model", *own(ReadingInBackward), *settings))
    planned, _ = planner.plan(runs.configure(tmp_path / "own", *runs.MODELS["mlp"], "optimizer=adafactor", *settings))
    assert planned["notes"] == []


class Slices(nn.Module):
    """Two weights in one tensor: above one another, or side by side."""

    def __init__(self, num_classes: int, dim: int = 0, apart: bool = False):
        super().__init__()
        whole = torch.randn(128 if dim == 0 else 64, 64 if dim == 0 else 128) / 8
        first, second = whole.chunk(2, dim)
        self.first = nn.Parameter(first.clone() if apart else first)
        self.second = nn.Parameter(second.clone() if apart else second)
        self.entry, self.head = nn.Linear(64, 64), nn.Linear(64, num_classes)

    def forward(self, images):
        return self.head(((self.entry(images.flatten(1)) @ self.first).relu() @ self.second).relu())


@pytest.mark.parametrize("dim", [0, 1])
def test_slices_of_one_tensor_are_refused_as_that(tmp_path, dim):
    own = (*own_slices(), f"+model.dim={dim}")
    with pytest.raises(UserError, match=r"first, second are slices of one tensor.*`\.clone\(\)`"):
        ended(tmp_path / "within", *own, ON)
    apart = ended(tmp_path / "apart", *own, "+model.apart=true", ON)  # what the message says to do
    assert runs.differences(apart, ended(tmp_path / "after", *own, "+model.apart=true")) == []


def own_slices():
    unlisted = ("~model.width", "~model.depth", "~model.dropout")
    own = ("model._target_=test_updated_memory.Slices", *unlisted, "user_packages=[test_updated_memory]")
    return ("model=mlp", *own, "data=digits")
