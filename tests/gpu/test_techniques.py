"""Techniques on a GPU: the same results as on the CPU, less memory in the allocator's terms. Skipped without one."""

import gc

import helpers
import pytest
import runs
import torch

from trainapp.techniques.chunked_loss import linear_cross_entropy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPT = (*runs.MODELS["gpt"], "train.device=cuda", "model.dropout=0", "train.max_steps=8")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(None, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_loss_in_chunks(dtype, tolerance, deterministic):
    torch.manual_seed(0)
    head, features = torch.nn.Linear(64, 1000).cuda(), torch.randn(256, 64, device="cuda", requires_grad=True)
    targets = torch.randint(1000, (256,), device="cuda")
    found = []
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    try:
        for chunks in (False, True):
            with torch.autocast("cuda", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                if chunks:
                    loss, _ = linear_cross_entropy(features, head, targets, 100)
                else:
                    loss = torch.nn.functional.cross_entropy(head(features).float(), targets, reduction="sum")
            found.append([loss.detach().view(1), *torch.autograd.grad(loss, [features, *head.parameters()])])
    finally:
        torch.use_deterministic_algorithms(False)
    assert max(runs.relative_error(b, a) for a, b in zip(*found, strict=True)) < tolerance


@pytest.mark.parametrize(
    ("overrides", "tolerance"),
    [
        (("memory.loss_chunk=100",), 1e-4),
        (("optimizer=adamw_bf16",), 0.02),
        (("optimizer=adamw_bf16", "precision=bf16_pure"), 0.05),
        (("optimizer.offload=true",), 1e-4),
    ],
)
def test_losses_are_those_of_the_plain_run(tmp_path, overrides, tolerance):
    runs.run(tmp_path / "plain", *GPT)
    runs.run(tmp_path / "technique", *GPT, *overrides)
    plain, found = ([line["loss"] for line in helpers.metrics(tmp_path / name)] for name in ("plain", "technique"))
    assert found == pytest.approx(plain, rel=tolerance)


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_optimizers_train(tmp_path, optimizer):
    runs.run(tmp_path, *GPT, f"optimizer={optimizer}", "train.max_steps=40")
    losses = [line["loss"] for line in helpers.metrics(tmp_path)]
    assert losses[-1] < losses[0]


def test_a_real_limit_with_everything(tmp_path):
    """Half of what is needed beyond what persists: one or more retries, and the weights of the schedule."""
    big = (*GPT, "model.width=128", "data.vocab_size=8192", "model.context_length=256", "batch.global_size=32")
    big = (*big, "memory.loss_chunk=auto", "optimizer=adamw_bf16", "precision=bf16_pure", "train.max_steps=3")
    free = runs.run(tmp_path / "free", *big)
    limit = int(free.peak_memory_bytes * 0.7)
    capped = runs.run(tmp_path / "capped", *big, f"memory.limit={limit}")
    assert capped.oom_restarts >= 1
    assert capped.peak_memory_bytes <= limit


DEEP = (
    *GPT, "checkpointing=off", "model.depth=6", "model.width=256", "model.context_length=256", "batch.global_size=16",
    "batch.micro_size=16", "train.max_steps=3",
)  # fmt: skip


def trained(folder, *overrides):
    """The allocator's peak above what a step leaves, and the weights after three steps."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    run = runs.prepare(folder, *DEEP, "train.deterministic=true", *overrides)
    for _ in range(3):
        runs.loop.train_step(run)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    weights = torch.cat([p.detach().flatten().cpu() for p in run.state.model.parameters()])
    run.close()
    return peak, weights


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_offload_saves_memory_and_changes_nothing(tmp_path, precision, checkpointing):
    chosen = (f"precision={precision}", f"activation_checkpointing={checkpointing}")
    plain, expected = trained(tmp_path, *chosen)
    for mode in ("all", "inputs")[: 1 if checkpointing == "none" else 2]:
        peak, weights = trained(tmp_path, *chosen, f"memory.offload_activations={mode}")
        assert torch.equal(weights, expected), mode
        assert peak < (0.6 if checkpointing == "none" else 1.0) * plain, mode


def test_offload_survives_an_error_in_the_forward(tmp_path):
    runs.run(tmp_path / "a", *DEEP, "memory.offload_activations=all", "memory.limit=150MiB", "batch.micro_size=auto")
    runs.run(tmp_path / "b", *DEEP, "batch.micro_size=auto")
    small, large = ([line["loss"] for line in helpers.metrics(tmp_path / name)] for name in ("a", "b"))
    assert small == pytest.approx(large, rel=1e-4)


def test_an_optimizer_on_the_host_leaves_the_device_its_state(tmp_path):
    resident, parameters = [], 0
    for more in ((), ("optimizer.offload=true",)):
        run = runs.prepare(tmp_path, *DEEP, *more)
        runs.loop.train_step(run)
        torch.cuda.synchronize()
        resident.append(torch.cuda.memory_allocated())
        parameters = sum(p.nbytes for p in run.state.model.parameters())
        run.close()
        del run
        gc.collect()
    assert resident[0] - resident[1] == pytest.approx(2 * parameters, rel=0.05)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_products_in_8_bits(tmp_path, kind):
    pytest.importorskip("torchao", reason="needs the extra trainapp[torchao]")
    if kind == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")
    for name in ("bf16", kind):
        runs.run(tmp_path / name, *GPT, f"precision={name}")
    plain, found = ([line["loss"] for line in helpers.metrics(tmp_path / name)] for name in ("bf16", kind))
    assert found == pytest.approx(plain, rel=0.02)
    runs.run(tmp_path / "one row", *runs.MODELS["mlp"], "train.device=cuda", f"precision={kind}", "batch.micro_size=1")
