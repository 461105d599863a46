"""Parameter groups by name, layer-wise decay: which parameters get what, and what is refused."""

import pytest
import runs
import torch
from helpers import metrics
from torch import nn

from trainapp.config import schema
from trainapp.errors import UserError
from trainapp.optim.optimizers import build_optimizer
from trainapp.training import loop

CPU = torch.device("cpu")
MLP = (*runs.MODELS["mlp"], "schedule=constant")
HEAD = "{match: head, lr: 0.5}"


class Net(nn.Module):
    """An embedding, two blocks, a norm between them and a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)


def built(*own, net=None, target="torch.optim.AdamW", blocks=(), **settings):
    """The optimizer and, by name, the options of each parameter's group."""
    model = net or Net()
    settings = {"weight_decay": 0.1, **settings}
    given = schema.Optimizer(target=target, lr=1e-3, groups=list(own), **settings)
    optimizer = build_optimizer(given, model, CPU, [], blocks=blocks)
    names = {id(p): name for name, p in model.named_parameters()}
    return optimizer, {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}


def group(match, **options):
    return {"match": [match], **options}


def test_options_of_what_a_pattern_matches():
    _, of = built(group("head.*", lr=0.5, betas=[0.8, 0.9]), group("*.bias", eps=1e-4) | {"match": ["layers.*.bias"]})
    assert (of["head.weight"]["lr"], of["head.weight"]["betas"]) == (0.5, [0.8, 0.9])
    assert of["layers.0.bias"]["eps"] == 1e-4
    assert of["layers.0.bias"]["lr"] == of["embed.weight"]["lr"] == 1e-3
    assert of["embed.weight"]["eps"] == 1e-8
    assert len(of) == len(list(Net().parameters()))


@pytest.mark.parametrize(
    ("target", "decay"),
    [
        ("torch.optim.AdamW", 0.01),
        ("trainapp.optim.low_precision.AdamW", 0.01),
        ("trainapp.optim.muon.Muon", 0.1),
        ("torch.optim.NAdam", 0.0),
    ],
)
def test_an_unset_weight_decay_is_the_default_of_the_class(target, decay):
    """Not for norms and biases, also of groups."""
    _, of = built(group("head", lr=0.5), target=target, weight_decay=None)
    assert of["head.weight"]["weight_decay"] == of["layers.0.weight"]["weight_decay"] == decay
    assert of["head.bias"]["weight_decay"] == of["norm.weight"]["weight_decay"] == 0.0


def test_a_group_may_decay_where_the_class_does_not():
    _, of = built(group("head", weight_decay=0.3), target="torch.optim.NAdam", weight_decay=None)
    assert [of[name]["weight_decay"] for name in ("head.weight", "head.bias", "layers.0.weight")] == [0.3, 0.0, 0.0]


def test_weight_decay_of_a_group_is_not_for_its_norms_and_biases():
    _, of = built(group("head", weight_decay=0.3), group("norm", weight_decay=0.2))
    assert (of["head.weight"]["weight_decay"], of["head.bias"]["weight_decay"]) == (0.3, 0.0)
    # A group that has nothing else would otherwise have no effect.
    assert of["norm.weight"]["weight_decay"] == of["norm.bias"]["weight_decay"] == 0.2
    assert (of["embed.weight"]["weight_decay"], of["layers.0.bias"]["weight_decay"]) == (0.1, 0.0)


def test_layer_wise_decay():
    """0.5 per layer: the head has the whole rate, each block half of the next, the embedding half of the first."""
    net = Net()
    _, of = built(net=net, layer_decay=0.5, blocks=list(net.layers))
    rates = {name: own["lr"] / 1e-3 for name, own in of.items() if name.endswith("weight")}
    expected = {"embed": 0.125, "layers.0": 0.25, "layers.1": 0.5, "norm": 1.0, "head": 1.0}
    assert rates == {f"{name}.weight": rate for name, rate in expected.items()}


def test_a_block_that_shares_a_parameter_has_it_once():
    net = Net()
    net.layers[1].weight = net.layers[0].weight
    optimizer, of = built(net=net, layer_decay=0.5, blocks=list(net.layers))
    assert of["layers.0.weight"]["lr"] == 0.25e-3
    every = [id(p) for own in optimizer.param_groups for p in own["params"]]
    assert len(every) == len(set(every))


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ([group("haed", lr=1.0)], r"groups\.0\.match=\[haed\]: Net has no parameter or module of this name; its top"),
        ([group("head"), group("*.weight")], r"groups\.1\.match: head\.weight is also matched by optimizer\.groups\.0"),
        ([group("head", lrr=1.0)], r"optimizer\.groups\.0\.lrr: AdamW has no group option lrr; its options are lr"),
        ([group("head", fused=True)], r"optimizer\.groups\.0\.fused: AdamW has no group option fused"),
        ([group("head", lrr=1.0)], r", those of the `defaults` that the class passes to super\(\).__init__"),
        ([group("head", freeze=True)], "; parameters are frozen by model.freeze"),
    ],
)
def test_mistakes(own, message):
    with pytest.raises(UserError, match=message):
        built(*own)


# Through the application


def test_each_group_learns_at_its_rate(tmp_path):
    """SGD without momentum: the change of a parameter is its rate times its gradient. All rates are logged."""
    sgd = ("optimizer=sgd", "optimizer.momentum=0", "optimizer.nesterov=false", "optimizer.weight_decay=0")
    own = (*MLP, *sgd, "optimizer.lr=0.1", f"optimizer.groups=[{HEAD}]", "train.grad_clip=null", "train.max_steps=1")
    run = runs.prepare(tmp_path, *own)
    before = {name: p.detach().clone() for name, p in run.state.model.named_parameters()}
    runs.accumulate(run)
    gradients = {name: p.grad.clone() for name, p in run.state.model.named_parameters()}
    run.engine.drop_gradients()
    run.batches.drop_fetched()
    loop.train_step(run)
    run.close()
    for name, parameter in run.state.model.named_parameters():
        rate = 0.5 if name.startswith("head") else 0.1
        torch.testing.assert_close(parameter.detach(), before[name] - rate * gradients[name])
    (line,) = metrics(tmp_path)
    assert (line["lr"], line["lr/head"]) == (0.1, 0.5)


class ClipsHead(torch.optim.SGD):
    """As docs/questions.md has it."""

    def step(self, closure=None):
        for group in self.param_groups:
            if group.get("label") == "head.weight":
                nn.utils.clip_grad_norm_(group["params"], 0.01)
        return super().step(closure)


@pytest.mark.parametrize("micro_size", [16, 4])
def test_an_optimizer_that_clips_a_group_sees_complete_gradients(tmp_path, micro_size):
    own = ("optimizer._target_=test_groups.ClipsHead", "optimizer.lr=1", "user_packages=[test_groups]")
    groups = ("optimizer.groups=[{match: head.weight}]", f"batch.micro_size={micro_size}")
    run = runs.prepare(tmp_path, *MLP, *own, *groups, "train.grad_clip=null", "train.max_steps=1")
    before = {name: p.detach().clone() for name, p in run.state.model.named_parameters()}
    loop.train_step(run)
    run.close()
    moved = {name: (before[name] - p.detach()).norm() for name, p in run.state.model.named_parameters()}
    assert moved["head.weight"] == pytest.approx(0.01, rel=1e-4)
    assert moved["head.bias"] > 0.02


@pytest.mark.parametrize("optimizer", runs.options("optimizer"))
def test_every_shipped_optimizer_takes_groups_and_resumes(tmp_path, optimizer):
    own = (*MLP, f"optimizer={optimizer}", "optimizer.groups=[{match: head, lr: 0.01}]", "optimizer.layer_decay=0.5")
    own += ("train.max_steps=4", "model.width=128")  # large enough to be quantized
    assert runs.differences(*runs.resumed(tmp_path, 2, *own)) == []
    rates = {name for line in metrics(tmp_path / "whole") for name in line if name.startswith("lr")}
    assert {"lr/head:layer_3", "lr/layer_1", "lr/layer_2"} <= rates


@pytest.mark.parametrize("technique", ["optimizer.in_backward=true", "optimizer.offload=true"])
def test_techniques_of_the_optimizer_change_no_bit(tmp_path, technique):
    own = (*MLP, f"optimizer.groups=[{HEAD}]", "optimizer.layer_decay=0.5", "train.grad_clip=null", "train.max_steps=3")
    ends = []
    for name, more in {"a": (), "b": (technique,)}.items():
        runs.run(tmp_path / name, *own, *more)
        ends.append(runs.saved(tmp_path / name, 3)["model"])
    assert runs.differences(*ends) == []


# Resuming with other groups


def test_the_state_of_a_parameter_follows_it_into_another_group(tmp_path):
    """By name: the moments are those that were saved, whatever group the parameter is in now."""
    runs.run(tmp_path / "a", *MLP, "train.max_steps=2")
    saved = runs.saved(tmp_path / "a", 2)["optimizer"]
    resume = f"checkpointing.resume={tmp_path / 'a'}"
    run = runs.prepare(tmp_path / "b", *MLP, f"optimizer.groups=[{HEAD}]", "train.max_steps=4", resume)
    run.close()
    assert len(run.state.optimizer.param_groups) > 2
    for name, parameter in run.state.model.named_parameters():
        assert torch.equal(run.state.optimizer.state[parameter]["exp_avg"], saved[name]["exp_avg"])
    assert run.state.optimizer.param_groups[-1]["initial_lr"] == 0.5


def test_decay_of_all_parameters_is_torchs_own(tmp_path):
    session = runs.closed(tmp_path, *MLP, "optimizer.weight_decay=0.1", "optimizer.decay=all")
    assert {group["weight_decay"] for group in session.state.optimizer.param_groups} == {0.1}
    session = runs.closed(tmp_path, *MLP, "optimizer.weight_decay=0.1")
    assert {group["weight_decay"] for group in session.state.optimizer.param_groups} == {0.0, 0.1}
