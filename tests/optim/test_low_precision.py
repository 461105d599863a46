import pytest
import runs
import torch
from helpers import metrics
from torch import nn

from trainapp.memory.live_tensors import Category
from trainapp.optim import low_precision
from trainapp.optim.low_precision import AdamW
from trainapp.optim.optimizers import materialise_state
from trainapp.torch_private import fake_tensor_mode


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
    monkeypatch.setattr(low_precision, "PIECES", {"cpu": pieces})
    options = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    model, other = net(), net()
    own = steps(model, AdamW(model.parameters(), state_dtype="fp32", **options))
    expected = steps(other, torch.optim.AdamW(other.parameters(), foreach=False, **options))
    assert runs.relative_error(own, expected) < 1e-6
    # Negative control: another epsilon.
    other = net()
    wrong = steps(other, torch.optim.AdamW(other.parameters(), **{**options, "eps": 1e-3}))
    assert runs.relative_error(own, wrong) > 1e-5


def test_states_are_bf16_and_repeat_themselves():
    ends = []
    for _ in range(2):
        model = net()
        optimizer = AdamW(model.parameters(), lr=0.01)
        ends.append(steps(model, optimizer))
        tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
        assert {t.dtype for t in tensors} == {torch.bfloat16}
    assert torch.equal(*ends)
    fp32 = net()
    expected = steps(fp32, AdamW(fp32.parameters(), lr=0.01, state_dtype="fp32"))
    assert 0 < runs.relative_error(ends[0], expected) < 5e-3


def test_state_made_beforehand_changes_no_bit():
    ends = []
    for beforehand in (False, True):
        model = net()
        optimizer = AdamW(model.parameters(), lr=0.01)
        if beforehand:
            assert materialise_state(optimizer)
            assert torch.equal(runs.weights(model), runs.weights(net()))
        ends.append(steps(model, optimizer))
    assert torch.equal(*ends)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128])
@pytest.mark.parametrize("state_dtype", ["bf16", "8bit", "4bit"])
def test_complex_and_fp64_parameters_are_updated_as_torchs_are(state_dtype, dtype):
    """With more than 4096 elements, from where moments are quantized."""
    torch.manual_seed(0)
    start, options = torch.randn(70, 70, dtype=dtype), {"lr": 0.01, "weight_decay": 0.1}
    own, other = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = [AdamW([own], state_dtype=state_dtype, **options), torch.optim.AdamW([other], **options)]
    for _ in range(5):
        gradient = torch.randn_like(start)
        own.grad, other.grad = gradient.conj() if dtype.is_complex else gradient, gradient.conj().resolve_conj()
        for optimizer in optimizers:
            optimizer.step()
    assert own.dtype == dtype
    assert torch.allclose(own, other, rtol=1e-12 if dtype in (torch.float64, torch.complex128) else 1e-5)
    assert not torch.allclose(own, start, rtol=1e-3)
    assert {optimizers[0].state[own][name].dtype for name in ("exp_avg", "exp_avg_sq")} == {dtype}


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


@pytest.mark.slow
def test_in_a_run(tmp_path):
    """Half of the state; the loss within 2% of fp32's."""
    overrides = (*runs.MODELS["gpt"], "model.dropout=0", "train.max_steps=40", "every.log=40")
    state, loss = {}, {}
    for optimizer in ("adamw", "adamw_bf16"):
        run = runs.prepare(tmp_path / "state", *overrides, f"optimizer={optimizer}")
        state[optimizer] = run.meter.static[Category.OPTIMIZER_STATE]
        run.close()
        runs.run(tmp_path / optimizer, *overrides, f"optimizer={optimizer}")
        loss[optimizer] = metrics(tmp_path / optimizer)[-1]["loss"]
    assert state["adamw_bf16"] == pytest.approx(state["adamw"] / 2, rel=0.02)
    assert loss["adamw_bf16"] == pytest.approx(loss["adamw"], rel=0.02)


def test_it_can_be_traced():
    with fake_tensor_mode():
        model = nn.Linear(3, 2)
        optimizer = AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        assert len(optimizer.state) == 2


def test_a_fused_kernel_that_it_lacks_is_refused(tmp_path):
    from trainapp.errors import UserError

    with pytest.raises(
        UserError, match=r"optimizer.fused=true: trainapp.optim.low_precision.AdamW has no fused kernel"
    ):
        runs.prepare(tmp_path, *runs.MODELS["mlp"], "optimizer=adamw_bf16", "optimizer.fused=true")
