"""docs/porting.md: both ways of SAM train the weights of a loop that takes two gradients per batch."""

import importlib
import sys

import pytest
import runs
import torch
from helpers import ROOT
from markdown import write_files
from torch.nn import functional as F

MODULES = ("script", "port", "sam_loss", "sam_steps")
BATCHES, RATE, MOMENTUM, RHO = 5, 0.1, 0.9, 0.05
OWN = ("model=mlp", "~model.width", "~model.depth", "~model.dropout", "model._target_=script.network")
OWN = (*OWN, f"user_packages=[{','.join(MODULES)}]", "model.init_from=${oc.env:SAM_START}", "optimizer.decay=all")
OWN = (*OWN, "batch.global_size=64", "train.max_epochs=null", "train.grad_clip=null", "every.eval=null")
OWN = (*OWN, "schedule=constant", "schedule.warmup=0", f"optimizer.lr={RATE}", f"optimizer.momentum={MOMENTUM}")
IN_LOSS = ("data._target_=port.samples", f"task={{_target_: sam_loss.SharpnessAware, rho: {RHO}}}")
IN_LOSS = (*OWN, *IN_LOSS, "optimizer._target_=torch.optim.SGD", f"train.max_steps={BATCHES}")
IN_STEPS = ("data._target_=sam_steps.samples", "task=port.loss", "optimizer._target_=sam_steps.TwoPhases")
IN_STEPS = (*OWN, *IN_STEPS, f"+optimizer.rho={RHO}", f"train.max_steps={2 * BATCHES}")


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The document's script, and the file of weights that it begins with; its modules can be imported."""
    write_files(ROOT / "docs/porting.md", tmp_path / "documents")
    monkeypatch.syspath_prepend(tmp_path / "documents/my_port")
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("SAM_START", str(tmp_path / "start.pt"))
    module = importlib.import_module("script")
    torch.save(module.network().state_dict(), tmp_path / "start.pt")
    yield module
    for name in MODULES:
        sys.modules.pop(name, None)


def trained_by_hand(script, start, batches=BATCHES):
    """The weights after SAM as its reference implementation computes it."""
    model = script.network()
    model.load_state_dict(torch.load(start))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    for first in range(0, 64 * batches, 64):
        rows = slice(first, first + 64)

        def gradients(rows=rows):
            optimizer.zero_grad()
            F.cross_entropy(model(script.inputs[rows]), script.targets[rows]).backward()

        gradients()
        before = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            for p in model.parameters():
                p.add_(p.grad * RHO / (norm + 1e-12))
        gradients()
        with torch.no_grad():
            for p, weights in zip(model.parameters(), before, strict=True):
                p.copy_(weights)
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("way", [IN_LOSS, (*IN_STEPS, "batch.micro_size=16")], ids=["in the loss", "in two steps"])
def test_both_ways_are_sam(script, tmp_path, way):
    steps = runs.run(tmp_path / "run", *way).steps
    expected = trained_by_hand(script, tmp_path / "start.pt")
    weights = runs.end(tmp_path / "run", steps)["model"]
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-6)

    # The control: with the gradient at the model's own weights they are others.
    start = torch.load(tmp_path / "start.pt")
    moved = torch.cat([(expected[name] - start[name]).flatten() for name in expected])
    plain = runs.run(tmp_path / "plain", *IN_LOSS, "task.rho=0")
    other = runs.end(tmp_path / "plain", plain.steps)["model"]
    difference = torch.cat([(expected[name] - other[name]).flatten() for name in expected])
    assert difference.norm() > 1e-3 * moved.norm()


@pytest.mark.parametrize("stop", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_run_that_is_resumed_in_either_phase_is_the_same(script, tmp_path, stop):
    whole, parts = runs.resumed(tmp_path / "runs", stop, *IN_STEPS)
    assert runs.differences(whole, parts) == []
