"""docs/porting.md: MoCo's queue and key encoder are those of a loop over whole batches, for any micro-batch."""

import importlib
import sys

import pytest
import runs
import torch
from helpers import ROOT
from markdown import write_files
from torch.nn import functional as F

MODULES = ("script", "port", "moco")
STEPS, RATE = 6, 0.1
SETTINGS = ("model=mlp", "~model.width", "~model.depth", "~model.dropout", "model._target_=moco.Encoders")
SETTINGS = (*SETTINGS, "model.freeze=[key]", f"user_packages=[{','.join(MODULES)}]")
SETTINGS = (*SETTINGS, "data._target_=port.samples", "task={_target_: moco.Contrast}")
SETTINGS = (*SETTINGS, "+callbacks.momentum._target_=moco.Momentum", "model.init_from=${oc.env:MOCO_START}")
SETTINGS = (*SETTINGS, "optimizer._target_=torch.optim.SGD", f"optimizer.lr={RATE}")
SETTINGS = (*SETTINGS, "schedule=constant", "schedule.warmup=0", "train.grad_clip=null", "every.eval=null")
SETTINGS = (*SETTINGS, "batch.global_size=64", "train.max_epochs=null", f"train.max_steps={STEPS}")


@pytest.fixture
def moco(tmp_path, monkeypatch):
    """The document's module, and a file of weights to begin with."""
    write_files(ROOT / "docs/porting.md", tmp_path / "documents")
    monkeypatch.syspath_prepend(tmp_path / "documents/my_port")
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("MOCO_START", str(tmp_path / "start.pt"))
    module = importlib.import_module("moco")
    torch.manual_seed(0)
    torch.save(module.Encoders().state_dict(), tmp_path / "start.pt")
    yield module
    for name in MODULES:
        sys.modules.pop(name, None)


def trained(run_dir, *overrides):
    """The weights, the queue and the next position in it at the end of a run."""
    runs.run(run_dir, *SETTINGS, *overrides)
    state = runs.end(run_dir, STEPS)
    return {**state["model"], **state["stateful"][0]["task"]}


def by_hand(moco, start, monkeypatch):
    """The same of the published loop over whole batches, without noise."""
    monkeypatch.setattr(torch, "randn_like", torch.zeros_like)
    script = importlib.import_module("script")
    model = moco.Encoders()
    model.load_state_dict(torch.load(start))
    optimizer = torch.optim.SGD(model.query.parameters(), lr=RATE)
    queue = moco.Contrast().queue.clone()
    for step in range(STEPS):
        inputs = script.inputs[64 * step : 64 * (step + 1)]
        queries = F.normalize(model.query(inputs), dim=1)
        keys = F.normalize(model.key(inputs), dim=1).detach()
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.T], 1) / 0.2
        optimizer.zero_grad()
        F.cross_entropy(logits, torch.zeros(64, dtype=torch.long)).backward()
        optimizer.step()
        first = 64 * step % len(queue)
        queue[first : first + 64] = keys
        with torch.no_grad():
            for key, query in zip(model.key.parameters(), model.query.parameters(), strict=True):
                key.copy_(0.99 * key + 0.01 * query)
    return {**model.state_dict(), "queue": queue}


def assert_same(state, expected):
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-6)


def test_it_is_the_published_loop(moco, tmp_path, monkeypatch):
    """The queue is filled anew from its start in steps 5 and 6."""
    expected = by_hand(moco, tmp_path / "start.pt", monkeypatch)
    state = trained(tmp_path / "run", "batch.micro_size=16")
    assert_same(state, expected)
    assert int(state["position"]) == 128
    start = torch.load(tmp_path / "start.pt")
    for name in ("query.0.weight", "key.0.weight"):
        assert (state[name] - start[name]).norm() > 100 * (state[name] - expected[name]).norm()


@pytest.mark.slow
def test_it_does_not_depend_on_the_micro_batch(moco, tmp_path, caplog):
    """With noise that belongs to the samples."""
    whole = trained(tmp_path / "whole", "batch.micro_size=64")
    for size in (1, 2):
        assert_same(trained(tmp_path / str(size), f"batch.micro_size={size}"), whole)
    assert "depends on the micro-batch" not in caplog.text
