"""optimizer.offload: the bits of the plain optimizer, its checkpoints, and its promises after an error."""

from pathlib import Path

import pytest
import runs
import torch
from torch import nn

from trainapp.config import compose
from trainapp.config.schema import Optimizer
from trainapp.memory.static import optimizer_tensors
from trainapp.optim.optimizers import build_optimizer
from trainapp.torch_private import step_optimizer
from trainapp.training import loop

pytestmark = pytest.mark.usefixtures("one_thread")

HOST = "optimizer.offload=true"
MLP = (*runs.MODELS["mlp"], "train.max_steps=4")
OPTIMIZERS = {
    "not fused": ("torch.optim.AdamW", {"foreach": False}),
    "without state": ("torch.optim.SGD", {}),
    "state from the start": ("torch.optim.Adagrad", {}),
}
for option in runs.options("optimizer"):
    settings = compose.from_command_line([f"optimizer={option}"]).optimizer
    OPTIMIZERS[option] = (settings.target, settings.arguments)


def built(name, offload):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 8))
    target, arguments = OPTIMIZERS[name]
    settings = Optimizer(target=target, lr=0.01, weight_decay=0.05, offload=offload, arguments=arguments)
    return model, build_optimizer(settings, model, torch.device("cpu"), [])


def stepped(model, optimizer, steps=4):
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(step)
        loss = model(torch.randn(4, 64)).square().mean()
        if step == 2:  # not all parameters have a gradient
            loss = model[2](torch.randn(4, 96)).sum()
        loss.backward()
        optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
        with torch.no_grad():
            model[0].weight.data.mul_(0.9)  # others write parameters, too: a checkpoint that is read
        step_optimizer(optimizer)
    return runs.weights(model)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_of_the_plain_optimizer(name):
    model, optimizer = built(name, True)
    plain_model, plain = built(name, False)
    assert torch.equal(stepped(model, optimizer), stepped(plain_model, plain))
    assert runs.differences(optimizer.state_dict(), plain.state_dict()) == []
    assert {id(p) for p in model.parameters()} == {id(p) for g in optimizer.param_groups for p in g["params"]}
    assert set(optimizer.state) == set(plain.state) or len(optimizer.state) == len(plain.state)
    # Negative control: one step more.
    assert not torch.equal(stepped(model, optimizer, 1), runs.weights(plain_model))


def test_what_counts_as_the_devices_memory():
    model, optimizer = built("adamw", True)
    plain = built("adamw", False)[1]
    copies = 2 * sum(p.nbytes for p in model.parameters())
    assert (
        sum(t.nbytes for t in optimizer_tensors(optimizer)) == sum(t.nbytes for t in optimizer_tensors(plain)) + copies
    )
    on_device = {nn.Parameter(p.detach().to("meta")): state for p, state in optimizer.state.items()}
    optimizer.param_groups[0]["params"] = list(on_device)  # as where parameters are on a GPU
    optimizer.param_groups[1:] = []
    optimizer.state.clear()
    optimizer.state.update(on_device)
    assert optimizer_tensors(optimizer) == []


# Runs


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_run_has_the_weights_of_the_plain_one(tmp_path, precision):
    ends = []
    for name, more in {"plain": (), "host": (HOST,), "sgd": ("optimizer=sgd",)}.items():
        run = runs.prepare(tmp_path / name, *MLP, f"precision={precision}", *more)
        for _ in range(4):
            loop.train_step(run)
        run.close()
        ends.append(runs.weights(run.state.model))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_the_traced_peak_is_the_measured_one(tmp_path):
    limited = ("memory.limit=1GiB", "train.grad_clip=null")
    peaks = []
    for name, more in {"plain": (), "host": (HOST,)}.items():
        run = runs.prepare(tmp_path / name, *MLP, *limited, *more)
        traced = runs.traced_peak(run.config, 16)
        loop.train_step(run)
        run.close()
        assert traced == run.memory.peak
        peaks.append(traced)
    assert peaks[1] > peaks[0]  # on the CPU the copies are in the same memory


@pytest.mark.parametrize(("first", "then"), [((HOST,), (HOST,)), ((HOST,), ()), ((), (HOST,))])
def test_resumed_with_and_without(tmp_path: Path, first, then):
    saving = (*MLP, "every.save=2", "schedule=constant")
    runs.run(tmp_path / "whole", *saving)
    runs.run(tmp_path / "parts", *saving, "train.max_steps=2", *first)
    ended = runs.run(tmp_path / "parts", *saving, *then)
    assert ended.steps == 4
    whole, parts = (runs.saved(tmp_path / name, 4) for name in ("whole", "parts"))
    for part in ("model", "optimizer"):
        assert runs.differences(parts[part], whole[part]) == []
