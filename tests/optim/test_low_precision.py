"""AdamW with moments in bf16, and in 8 or 4 bits; rounding by chance."""

import pytest
import runs
import torch
from helpers import metrics
from torch import nn

from trainapp.memory.live_tensors import Category
from trainapp.optim import low_precision
from trainapp.optim.low_precision import AdamW, copy_rounded
from trainapp.optim.optimizers import materialise_state
from trainapp.optim.quantizer import Quantizer


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last), nn.Flatten(), nn.Linear(20, 7))


def steps(model, optimizer, count=20):
    torch.manual_seed(1)
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(6, 3, 4, 4)).square().sum().backward()
        optimizer.step()
    return runs.weights(model)


@pytest.mark.parametrize("pieces", [1 << 18, 7])
def test_with_fp32_states_it_is_torchs(monkeypatch, pieces):
    monkeypatch.setattr(low_precision, "PIECE_SIZES", {"cpu": pieces})
    options = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    model, other = net(), net()
    own = steps(model, AdamW(model.parameters(), state_dtype="fp32", **options))
    expected = steps(other, torch.optim.AdamW(other.parameters(), foreach=False, **options))
    assert runs.relative_error(own, expected) < 1e-6
    # Negative control: another epsilon.
    other = net()
    wrong = steps(other, torch.optim.AdamW(other.parameters(), **{**options, "eps": 1e-3}))
    assert runs.relative_error(own, wrong) > 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_complex_and_fp64_parameters_are_refused(dtype):
    with pytest.raises(ValueError, match="complex and fp64 parameters would lose"):
        AdamW([nn.Parameter(torch.zeros(2, dtype=dtype))])


def second_moments(count=3000):
    """After so many gradients of 1: of 64 values that should all be 1 - 0.999 ** count."""
    parameter = nn.Parameter(torch.zeros(64))
    optimizer = AdamW([parameter], lr=0.0)
    parameter.grad = torch.ones(64)
    for _ in range(count):
        optimizer.step()
    return optimizer.state[parameter]["exp_avg_sq"].float().mean().item()


def test_small_changes_of_the_state_are_not_lost(monkeypatch):
    right = 1 - 0.999**3000
    assert second_moments() == pytest.approx(right, rel=0.02)
    # Negative control: rounded to nearest, the average stops where its changes fall below half of the last bit.
    monkeypatch.setattr(low_precision, "copy_rounded", lambda target, source, generator: target.copy_(source))
    assert second_moments() < 0.5 * right


# Rounding to bf16


def rounded(values, seed=0, dtype=torch.bfloat16):
    target = torch.empty(values.shape, dtype=dtype)
    copy_rounded(target, values.clone(), torch.Generator().manual_seed(seed))
    return target


@pytest.mark.parametrize("value", [1.001, -3.14159, 1e-30, 0.9999, 255.3])
def test_the_mean_is_the_value(value):
    values = torch.full((200_000,), value)
    found = rounded(values).double()
    neighbours = found.unique()
    assert len(neighbours) == 2
    assert neighbours[0] < value < neighbours[1]
    assert found.mean().item() == pytest.approx(value, rel=2e-5)
    # Negative control: to nearest, all are one neighbour.
    nearest = values.to(torch.bfloat16).double()
    assert abs(nearest.mean().item() - value) > abs(found.mean().item() - value)


def test_what_bf16_can_hold_is_unchanged():
    values = torch.randn(1000).to(torch.bfloat16).float()
    special = torch.tensor([0.0, float("inf"), -float("inf")])
    exact = torch.cat([values, special])
    assert torch.equal(rounded(exact).float(), exact)
    assert rounded(torch.full((1000,), float("nan"))).isnan().all()
    nan_of_cuda = torch.full((1000,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # noise overflows its bits
    assert rounded(nan_of_cuda).isnan().all()


# Moments in 8 or 4 bits

KINDS = ("8bit", "4bit")
CPU = torch.device("cpu")
# Of 256 x 64 weights: large enough to be quantized.
BIG = (*runs.MODELS["gpt"], "model.width=64", "data.vocab_size=256", "model.dropout=0")


def stored(values, kind, of_roots=False, seed=0):
    """What is read after the values have been written."""
    quantizer, whole = Quantizer(kind, of_roots, CPU), slice(0, len(values))
    kept = quantizer.empty(len(values))
    quantizer.write(*kept, whole, values.clone(), torch.Generator().manual_seed(seed))
    return quantizer.read(*kept, whole)


@pytest.mark.parametrize("of_roots", [False, True])
@pytest.mark.parametrize(("kind", "error"), [("8bit", 0.03), ("4bit", 0.35)])
def test_values_come_back(kind, error, of_roots):
    """Of 1001 values: the last block is short, and half a byte is left over in 4 bits."""
    values = torch.randn(1001, generator=torch.Generator().manual_seed(1))
    values = values.square() if of_roots else values
    assert runs.relative_error(stored(values, kind, of_roots), values) < error
    # For which one scale for all of it would be too coarse.
    values[:500] *= 1e-4
    small = stored(values, kind, of_roots)[:256]
    assert runs.relative_error(small, values[:256]) < 1.5 * error


@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_is_right(kind):
    """Rounded to nearest, the error of a value would stay the same however often it is written."""
    values = torch.randn(256, generator=torch.Generator().manual_seed(1))
    mean = torch.stack([stored(values, kind, seed=seed) for seed in range(400)]).mean(0)
    one = runs.relative_error(stored(values, kind), values)
    assert runs.relative_error(mean, values) < 0.12 * one


@pytest.mark.parametrize("kind", KINDS)
def test_no_second_moment_vanishes(kind):
    """Beside a large value: an update divided by a root of 0 would be huge. All zeros stay zeros, stored as zeros."""
    values = torch.full((256,), 1e-12)
    values[0] = 1.0
    assert (stored(values, kind, of_roots=True) > 0).all()
    quantizer, whole = Quantizer(kind, True, CPU), slice(0, 300)
    codes, scales = quantizer.empty(300)
    quantizer.write(codes, scales, whole, torch.zeros(300), torch.Generator())
    assert not codes.any()
    assert not quantizer.read(codes, scales, whole).any()


def training(state_dtype, steps=60, beforehand=False):
    """The loss of a regression, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 160), nn.ReLU(), nn.Linear(160, 8))
    inputs, targets = torch.randn(64, 32), torch.randn(64, 8)
    optimizer = AdamW(model.parameters(), lr=3e-3, state_dtype=state_dtype)
    if beforehand:
        materialise_state(optimizer)
        assert optimizer.state
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item(), runs.weights(model), optimizer


@pytest.mark.parametrize("kind", [*KINDS, "bf16"])
def test_it_learns_as_fp32_does_and_repeats_itself(kind):
    expected, exact, _ = training("fp32")
    loss, weights, optimizer = training(kind)
    assert loss == pytest.approx(expected, rel=0.1)
    assert not torch.equal(weights, exact)
    assert torch.equal(weights, training(kind, beforehand=True)[1])
    (first, *_) = optimizer.state.values()
    assert first["exp_avg"].dtype is (torch.bfloat16 if kind == "bf16" else torch.uint8)


# In a run


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "share"), [("8bit", 0.27), ("4bit", 0.15)])
def test_in_a_run(tmp_path, kind, share):
    """The size of the state, as the meter counts it; the loss within 2% of fp32's; a resumed run, bit for bit."""
    state, loss = {}, {}
    settings = (*BIG, "schedule=constant", "every.save=15", "every.log=30")
    for optimizer in ("adamw", f"adamw_{kind}"):
        runs.run(tmp_path / optimizer, *settings, f"optimizer={optimizer}", "train.max_steps=30")
        line = metrics(tmp_path / optimizer)[-1]
        state[optimizer], loss[optimizer] = line[f"memory/{Category.OPTIMIZER_STATE}"], line["loss"]
    assert state[f"adamw_{kind}"] < share * state["adamw"]
    assert loss[f"adamw_{kind}"] == pytest.approx(loss["adamw"], rel=0.02)
    for steps in (15, 30):
        runs.run(tmp_path / "parts", *settings, f"optimizer=adamw_{kind}", f"train.max_steps={steps}")
    whole, parts = (runs.saved(tmp_path / name, 30) for name in (f"adamw_{kind}", "parts"))
    assert [path for path in runs.differences(whole, parts) if not path.startswith(".sizes")] == []
