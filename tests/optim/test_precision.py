import helpers
import pytest
import runs
import torch
from helpers import metrics
from recorded_operations import RecordedOperations

from trainapp.config import schema
from trainapp.optim import low_precision, precision
from trainapp.training import loop

MLP = runs.MODELS["mlp"]


# The dtype in which it computes, and whether the loss is scaled.
MODES = {
    "fp32": (torch.float32, False),
    "tf32": (torch.float32, False),
    "bf16": (torch.bfloat16, False),
    "bf16_pure": (torch.bfloat16, False),
    "fp16": (torch.float16, True),
    "int8": (torch.bfloat16, False),
    "fp8": (torch.bfloat16, False),
}


@pytest.mark.parametrize("mode", runs.options("precision"))
def test_modes(mode):
    dtype, scaled = MODES[mode]
    if mode in ("int8", "fp8"):
        pytest.importorskip("torchao", reason="needs the extra trainapp[torchao]")
    built = precision.build(schema.Precision(mode=mode), torch.device("cpu"))
    assert built.compute_dtype == dtype
    assert built.scaler.is_enabled() == scaled
    with built.autocast:
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
    assert torch.get_float32_matmul_precision() == ("high" if mode == "tf32" else "highest")


@pytest.mark.parametrize("fast_path", [False, True])
def test_a_transformer_is_evaluated_the_same_while_memory_is_counted(fast_path):
    autocast = precision.build(schema.Precision(mode="bf16"), torch.device("cpu")).autocast
    if fast_path:  # the negative control
        torch.backends.mha.set_fastpath_enabled(True)
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    inputs = torch.randn(1, 6, 16)
    with torch.no_grad():
        with autocast:
            plain = layer(inputs)
        with RecordedOperations(), autocast:
            counted = layer(inputs)
    assert torch.equal(plain, counted) != fast_path


# What the others are compared with; weights in 16 bits, see below; matmuls in 8 bits, see test_matmuls.py.
OF_THEIR_OWN = {"fp32", "bf16_pure", "int8", "fp8"}


@pytest.mark.parametrize("case", runs.MODELS)
@pytest.mark.parametrize("mode", sorted(set(runs.options("precision")) - OF_THEIR_OWN))
def test_trains_as_fp32_does(tmp_path, mode, case):
    """Close to it, with weights, gradients and optimizer state in 32 bits."""
    ends = {}
    for name in ("fp32", mode):
        scale = "precision.initial_scale=256.0"
        run = runs.prepare(
            tmp_path / name,
            *runs.MODELS[case],
            f"precision={name}",
            "+" * (name != "fp16") + scale,
            "train.max_steps=3",
        )
        start = runs.weights(run.state.model)
        loop.train(run)
        runs.accumulate(run)
        run.tracker.close()
        assert run.state.progress.skipped == 0
        assert {p.dtype for p in run.state.model.parameters()} == {torch.float32}
        assert {p.grad.dtype for p in run.state.model.parameters()} == {torch.float32}
        ends[name] = runs.weights(run.state.model)
    moved = float((ends["fp32"] - start).norm())
    assert float((ends[mode] - ends["fp32"]).norm()) / moved < 0.6
    lines = [[line["loss"] for line in helpers.metrics(tmp_path / name)] for name in ends]
    assert lines[1] == pytest.approx(lines[0], rel=0.05)
    if mode != "tf32":
        assert not torch.equal(ends[mode], ends["fp32"])


def test_the_gradient_is_unscaled(tmp_path):
    """Its norm equals that of fp32 at any scale."""
    norms = []
    for scale in ("none", 8.0, 1024.0):
        overrides = ("precision=fp32",) if scale == "none" else ("precision=fp16", f"precision.initial_scale={scale}")
        run = runs.prepare(tmp_path / str(scale), *MLP, *overrides, "batch.micro_size=5", "train.grad_clip=0.01")
        norms.append(float(runs.clip(run)))
        assert float(runs.gradients(run.state.model).norm()) == pytest.approx(0.01, rel=1e-3)
        run.tracker.close()
    assert norms[1:] == pytest.approx([norms[0]] * 2, rel=0.01)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_unfused", "sgd"])
def test_an_overflow_skips_the_step_and_nothing_else(tmp_path, optimizer):
    """Real overflows, from a loss scale far too large: it halves until the gradients fit, then the run continues."""
    overrides = {"adamw": (), "adamw_unfused": ("optimizer.fused=false",), "sgd": ("optimizer=sgd",)}[optimizer]
    scale = 2.0**26
    settings = ("precision=fp16", f"precision.initial_scale={scale}", "schedule=linear", "batch.micro_size=5")
    run = runs.prepare(tmp_path, *MLP, *overrides, *settings, "train.max_steps=6")
    progress, scaler, optimizer = run.state.progress, run.state.precision.scaler, run.state.optimizer
    skipped = 0
    while progress.step == 0:
        before = runs.weights(run.state.model)
        loop.train_step(run)
        skipped += progress.step == 0
        assert scaler.get_scale() == scale / 2**skipped
        assert progress.skipped == skipped
        assert progress.consumed == progress.samples == 16 * (skipped + progress.step)  # the samples advance
        assert torch.equal(runs.weights(run.state.model), before) == (progress.step == 0)
        for state in optimizer.state.values():
            assert float(state.get("step", 0)) == (progress.step if "step" in state else 0)
    assert skipped >= 2
    loop.train(run)
    run.tracker.close()
    lines = helpers.metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    rate = optimizer.param_groups[0]["initial_lr"]
    assert [line["lr"] / rate for line in lines] == pytest.approx(
        [run.state.update.schedule(step) for step in range(6)]
    )
    assert lines[-1]["skipped_steps"] == skipped
    assert lines[-1]["loss_scale"] == scale / 2**skipped
    assert lines[-1]["samples"] == 16 * (6 + skipped)


def test_the_first_scale_follows_the_tokens_of_a_sample(tmp_path):
    """On the old code 5 steps were skipped: it halved once per step, though the loss is a sum over 256 tokens."""
    tokens = ("model.context_length=256", "model.width=32", "model.dropout=0")
    run = runs.prepare(tmp_path, *runs.MODELS["gpt"], *tokens, "precision=fp16", "train.max_steps=2")
    loop.train(run)
    run.tracker.close()
    assert run.state.progress.skipped == 1
    assert run.state.precision.scaler.get_scale() == 65536 / 256


@pytest.mark.parametrize(
    "build",
    [
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
        lambda p: torch.optim.AdamW(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
    ],
    ids=["AdamW, fused", "AdamW", "SGD, fused", "Adagrad"],
)
def test_it_is_the_step_of_torchs_scaler(build):
    """Bit for bit, in overflows too, though torch hands the flag to a fused kernel and reads it for the others."""
    ends = []
    for ours in (True, False):
        torch.manual_seed(0)
        weights = [torch.randn(4, 3, requires_grad=True), torch.randn(3, requires_grad=True)]
        optimizer, applied = build(weights), []
        built = precision.build(
            schema.Precision(mode="fp16", initial_scale=4.0, growth_interval=2), torch.device("cpu")
        )
        for step in range(8):
            for weight in weights:
                # Not in the first step: torch's own way then leaves fused SGD's momentum uninitialised (2.13).
                gradient = torch.full_like(weight, float("inf")) if step in (1, 3) else torch.randn_like(weight)
                weight.grad = built.scaler.scale(gradient)
            built.unscale(optimizer, lambda found: None)
            if ours:
                applied.append(built.step(optimizer))
            else:
                before = built.scaler.get_scale()
                built.scaler.step(optimizer)
                built.scaler.update()
                applied.append(built.scaler.get_scale() >= before)
        ends.append((weights, [dict(state) for state in optimizer.state.values()], built.scaler.state_dict(), applied))
    assert runs.differences(*ends) == []
    assert ends[0][3] == [True, False, True, False, True, True, True, True]


# Weights in bf16

PURE = (*runs.MODELS["gpt"], "model.dropout=0", "precision=bf16_pure", "optimizer=adamw_bf16")


def test_pure_bf16_has_no_fp32_but_buffers(tmp_path):
    run = runs.prepare(tmp_path, *PURE, "train.grad_clip=0.1")
    runs.accumulate(run)
    model = run.state.model
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in model.buffers()} == {torch.float32}
    assert model.head.weight is model.embedding.weight
    run.close()


def last_loss(run_dir, *overrides):
    learning = ("train.max_steps=300", "every.log=300", "schedule=constant", "optimizer.lr=3e-4")
    runs.run(run_dir, *PURE, *learning, *overrides)
    return metrics(run_dir)[-1]["loss"]


@pytest.mark.slow
def test_pure_bf16_learns_as_fp32_does(tmp_path, monkeypatch):
    fp32 = last_loss(tmp_path / "fp32", "precision=fp32", "optimizer=adamw")
    pure = last_loss(tmp_path / "pure")
    assert pure == pytest.approx(fp32, rel=0.02)
    # Negative control: rounded to nearest, most updates are lost.
    monkeypatch.setattr(low_precision, "copy_rounded", lambda target, source, generator: target.copy_(source))
    assert last_loss(tmp_path / "nearest") > 1.02 * fp32
