"""AdamW with moments in 8 or 4 bits."""

import pytest
import runs
import torch
from helpers import metrics
from torch import nn

from trainapp.errors import UserError
from trainapp.memory.live_tensors import Category
from trainapp.optim.low_precision import BLOCKS, AdamW, Quantized, Quantizer, empty_moment
from trainapp.optim.optimizers import materialise_state

KINDS = ("8bit", "4bit")
CPU = torch.device("cpu")
# Of 256 x 64 weights: large enough to be quantized.
BIG = (*runs.MODELS["gpt"], "model.width=64", "data.vocab_size=256", "model.dropout=0")


def moment(count, kind, of_roots=False):
    return Quantized(*empty_moment(count, kind, CPU), Quantizer(kind, of_roots, CPU))


def stored(values, kind, of_roots=False, seed=0):
    """What is read after the values have been written."""
    kept = moment(len(values), kind, of_roots)
    kept.write(slice(0, len(values)), values.clone(), torch.Generator().manual_seed(seed))
    return kept.read(slice(0, len(values)))


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
    kept = moment(300, kind, of_roots=True)
    kept.write(slice(0, 300), torch.zeros(300), torch.Generator())
    assert not kept.codes.any()
    assert not kept.read(slice(0, 300)).any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_is_not_finite_is_not_hidden(kind):
    values = torch.ones(300)
    values[3] = float("nan")
    assert stored(values, kind)[:10].isnan().all()
    assert stored(values, kind)[256:].isfinite().all() or BLOCKS[kind] > 256


def training(state_dtype, steps=60, beforehand=False):
    """The loss of a regression, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 160), nn.ReLU(), nn.Linear(160, 8))
    inputs, targets = torch.randn(64, 32), torch.randn(64, 8)
    optimizer = AdamW(model.parameters(), lr=3e-3, state_dtype=state_dtype)
    if beforehand:
        assert materialise_state(optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item(), runs.weights(model), optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_as_fp32_does_and_repeats_itself(kind):
    expected, _, _ = training("fp32")
    loss, weights, _ = training(kind)
    assert loss == pytest.approx(expected, rel=0.1)
    assert torch.equal(weights, training(kind, beforehand=True)[1])


def test_rows_without_gradients_do_not_move():
    """Rows of an embedding that no sample has, beside others that have large gradients: in one block."""
    weight = nn.Parameter(torch.ones(512, 16))
    optimizer = AdamW([weight], lr=0.1, state_dtype="4bit")
    for _ in range(5):
        weight.grad = torch.zeros_like(weight)
        weight.grad[::2] = 1.0
        optimizer.step()
    assert torch.equal(weight[1::2], torch.ones(256, 16))
    assert (weight[::2] < 0.6).all()


def test_a_weight_in_another_layout():
    ends = []
    for layout in (torch.contiguous_format, torch.channels_last):
        weight = nn.Parameter(torch.linspace(-1, 1, 32 * 16 * 9).view(32, 16, 3, 3).to(memory_format=layout))
        optimizer = AdamW([weight], lr=0.1, state_dtype="8bit")
        for step in range(3):
            weight.grad = (weight.detach() * (step + 1)).contiguous(memory_format=layout)
            optimizer.step()
        ends.append(weight.detach().contiguous())
    assert torch.equal(*ends)


def test_pieces_change_nothing_but_chance(monkeypatch):
    from trainapp.optim import low_precision

    whole = training("8bit")
    monkeypatch.setattr(low_precision, "PIECES", {"cpu": 512})
    assert training("8bit")[0] == pytest.approx(whole[0], rel=0.05)


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


@pytest.mark.parametrize(("saved", "resumed"), [("8bit", "4bit"), ("8bit", "bf16"), ("bf16", "8bit")])
def test_a_checkpoint_in_another_format_is_refused(tmp_path, saved, resumed):
    runs.run(tmp_path, *BIG, f"optimizer=adamw_{saved}", "train.max_steps=1")
    with pytest.raises(UserError, match=r"its optimizer is .*AdamW.*, and this run's"):
        runs.run(tmp_path, *BIG, f"optimizer=adamw_{resumed}", "train.max_steps=2")


def test_shards_are_refused(tmp_path):
    with pytest.raises(
        UserError, match=r"optimizer.state_dtype=8bit with parallel=fsdp: the values that share a scale"
    ):
        runs.prepare(tmp_path, *BIG, "optimizer=adamw_8bit", "parallel=fsdp")


def test_levels_ascend():
    for kind in ("8bit", "4bit"):
        for of_roots in (False, True):
            levels = Quantizer(kind, of_roots, CPU)._levels
            assert len(levels) == (256 if kind == "8bit" else 16) - (not of_roots)
            assert (levels.diff() > 0).all()
            assert levels[-1] == 1
            assert levels[0] == -1 or of_roots
