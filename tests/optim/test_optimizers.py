import re

import pytest
import runs
import torch
from torch import nn

from trainapp.config import schema
from trainapp.errors import UserError
from trainapp.models.gpt import GPT
from trainapp.models.resnet import ResNet
from trainapp.optim.groups import parameter_groups
from trainapp.optim.optimizers import build_optimizer, materialise_state
from trainapp.training import loop

CPU = torch.device("cpu")
MATERIALISED = {
    "AdamW": {},
    "AdamW amsgrad": {"amsgrad": True, "weight_decay": 0.1},
    "Adam": {},
    "Adam decayed": {"weight_decay": 0.1},
    "SGD momentum": {"momentum": 0.9},
    "SGD nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "RAdam": {"weight_decay": 0.1},
    "Adadelta": {},
    "Adagrad": {"weight_decay": 0.1},
    "Adafactor": {"lr": 0.1},
    "Adagrad from 0.1": {"initial_accumulator_value": 0.1},  # allocated by its constructor
}
BY_ITSELF = {
    "NAdam": {},
    "Adamax": {},
    "ASGD": {},
    "Rprop": {},
    "SGD dampened": {"momentum": 0.9, "dampening": 0.5},
    "SGD": {},
}


# LBFGS needs a closure, SparseAdam sparse gradients, Muon only matrices: they are refused. The first is their base.
UNSUITED = {"Optimizer", "LBFGS", "SparseAdam", "Muon"}


def test_the_lists_have_every_optimizer_of_torch():
    kinds = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    optimizers = {name for name in kinds if issubclass(getattr(torch.optim, name), torch.optim.Optimizer)}
    assert optimizers - UNSUITED == {name.split()[0] for name in (*MATERIALISED, *BY_ITSELF)}


def model_and_data():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.ReLU(), nn.Linear(7, 3))
    return model, torch.randn(6, 5, 5), torch.randint(3, (6, 5))


def trained(optimizer, model, inputs, targets):
    for x, y in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return runs.weights(model)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", [*MATERIALISED, *BY_ITSELF])
def test_state_made_beforehand_changes_no_bit(name, fused):
    """Six steps of a fresh optimizer and of one whose state was allocated before the first step."""
    arguments = (MATERIALISED | BY_ITSELF)[name]
    kind = getattr(torch.optim, name.split()[0])
    if fused and name.split()[0] not in ("AdamW", "Adam", "SGD", "Adagrad"):
        pytest.skip("torch has no fused kernel for it")
    if fused:
        arguments = {**arguments, "fused": True}
    ends = []
    for beforehand in (False, True):
        model, inputs, targets = model_and_data()
        start = runs.weights(model)
        optimizer = kind(model.parameters(), **{"lr": 0.01, **arguments})
        if beforehand:
            materialise_state(optimizer)
            assert bool(optimizer.state) == (name in MATERIALISED)
            assert torch.equal(runs.weights(model), start)
            assert all(p.grad is None for p in model.parameters())
            assert optimizer.param_groups[0]["lr"] == arguments.get("lr", 0.01)
            if "weight_decay" in arguments:
                assert optimizer.param_groups[0]["weight_decay"] == arguments["weight_decay"]
            before = {id(v) for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)}
        ends.append(trained(optimizer, model, inputs, targets))
        if beforehand and name in MATERIALISED:
            after = {id(v) for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)}
            assert before == after  # the first step has allocated no state
            assert len(after) >= 6
    assert torch.equal(*ends)
    assert not torch.equal(ends[0], start)


def test_a_users_optimizer_is_left_alone():
    class Own(torch.optim.SGD):
        pass

    model, _, _ = model_and_data()
    optimizer = Own(model.parameters(), lr=0.1, momentum=0.9)
    materialise_state(optimizer)
    assert not optimizer.state


@pytest.mark.parametrize("kind", ["batch", "group", "gpt"])
def test_norms_and_biases_do_not_decay(kind):
    if kind == "gpt":
        model = GPT(vocab_size=16, context_length=8, depth=2, width=16, heads=2)
    else:
        model = ResNet(image_shape=(1, 8, 8), num_classes=10, width=8, norm=kind)
    decayed, plain = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    norms = {id(p) for m in model.modules() if "Norm" in type(m).__name__ for p in m.parameters(recurse=False)}
    expected = {i for i, name in names.items() if i in norms or name.endswith("bias")}
    assert {id(p) for p in plain["params"]} == expected
    assert {id(p) for p in decayed["params"]} == names.keys() - expected
    assert len(decayed["params"]) + len(plain["params"]) == len(names)


@pytest.mark.parametrize(
    ("target", "fused", "expected"),
    [
        ("torch.optim.AdamW", "auto", True),
        ("torch.optim.AdamW", False, None),
        ("torch.optim.SGD", "auto", True),
        ("torch.optim.RMSprop", "auto", "none"),
    ],
)
def test_fused_where_there_is_a_kernel(target, fused, expected):
    model, _, _ = model_and_data()
    optimizer = build_optimizer(schema.Optimizer(target=target, lr=0.1, fused=fused), model, CPU, [])
    assert optimizer.param_groups[0].get("fused", "none") == expected


@pytest.mark.parametrize(
    ("target", "arguments", "message"),
    [
        ("torch.optim.AdamX", {}, r"optimizer\._target_=torch\.optim\.AdamX.*did you mean 'Adam"),
        ("torch.optim.AdamW", {"bets": 1}, "optimizer.bets: no such setting"),
        ("torch.optim.AdamW", {"betas": [2.0, 0.9]}, "optimizer: Invalid beta parameter"),
    ],
)
def test_mistakes(target, arguments, message):
    model, _, _ = model_and_data()
    with pytest.raises(UserError, match=message):
        build_optimizer(schema.Optimizer(target=target, lr=0.1, arguments=arguments), model, CPU, [])


class SharpnessAware(torch.optim.SGD):
    """As optimizers of users' that need the loss twice per step."""

    def step(self, closure):
        return closure()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("torch.optim.LBFGS", r"its step requires a closure, .* such as torch\.optim\.AdamW, or .*'L-BFGS-B'"),
        ("test_optimizers.SharpnessAware", "its step requires a closure"),
        ("torch.optim.SparseAdam", r"takes sparse gradients only, but here .* dense, .*; use torch\.optim\.AdamW"),
        ("torch.optim.Muon", r"matrices only, but MLP has other parameters, of shapes \[.*; use optimizer=muon"),
    ],
)
def test_an_optimizer_that_cannot_take_a_step_here_is_refused_with_a_remedy(tmp_path, target, message):
    own = (*runs.MODELS["mlp"], f"optimizer._target_={target}", "user_packages=[test_optimizers]")
    refusal = runs.refusal(tmp_path, *own)
    assert refusal.startswith(f"optimizer._target_={target}: ")
    assert re.search(message, refusal)


@pytest.mark.parametrize("name", ["Adam", "SGD nesterov", "Adagrad from 0.1", "NAdam", "Rprop", "SGD dampened"])
def test_it_trains_and_resumes(tmp_path, name):
    """Through the application, bit for bit."""
    arguments = {"weight_decay": 0.0, **(MATERIALISED | BY_ITSELF)[name]}
    rate = arguments.pop("lr", 0.01)
    overrides = (
        *runs.MODELS["mlp"],
        f"optimizer._target_=torch.optim.{name.split()[0]}",
        "~optimizer.betas",
        "~optimizer.eps",
        f"optimizer.lr={rate}",
        *(f"++optimizer.{key}={value}" for key, value in arguments.items()),
    )
    assert runs.differences(*runs.resumed(tmp_path, 2, *overrides)) == []


def test_a_skipped_first_step_leaves_no_rubbish_in_the_momentum(tmp_path):
    """On overflow the fused kernel leaves a buffer that it allocates uninitialised: it must exist beforehand."""
    run = runs.prepare(
        tmp_path,
        *runs.MODELS["mlp"],
        "optimizer=sgd",
        "precision=fp16",
        "precision.initial_scale=1e8",
        "train.max_steps=2",
    )
    loop.train_step(run)
    run.tracker.close()
    assert run.state.progress.skipped == 1
    for state in run.state.optimizer.state.values():
        assert not state["momentum_buffer"].any()
