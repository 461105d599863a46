"""What a run's time goes to: the profile, tokens per second, utilisation."""

import json

import pytest
import runs
import torch
from helpers import metrics, train

from trainapp.tracking.utilisation import peak_flops
from trainapp.training import loop


@pytest.mark.slow
def test_debug_profile(tmp_path):
    done = train(tmp_path / "run", "debug=profile", *runs.MODELS["mlp"], "train.device=cpu")
    trace = json.loads((tmp_path / "run/profile/rank_0.json").read_text())
    names = [event.get("name") for event in trace["traceEvents"]]
    assert names.count("aten::addmm") >= 5 * 3  # three linear layers, five steps
    assert names.count("aten::addmm") < 10 * 3
    assert "5 steps up to step 9 took " in done.stdout
    assert "waiting for batches" in done.stdout
    assert "aten::addmm" in done.stdout
    assert (tmp_path / "run/profile/summary.txt").read_text().startswith("5 steps up to step 9 took ")
    assert len(metrics(tmp_path / "run")) == 10


@pytest.mark.slow
def test_a_run_that_ends_while_it_is_profiled(tmp_path, caplog):
    runs.run(tmp_path / "a", *runs.MODELS["mlp"], "debug=profile", "train.max_steps=6")
    assert (tmp_path / "a/profile/summary.txt").read_text().startswith("2 steps up to step 6 took ")
    runs.run(tmp_path / "b", *runs.MODELS["mlp"], "debug=profile", "train.max_steps=2")
    assert "the run ended after 2 steps, before one was profiled" in caplog.text
    assert not torch.autograd.profiler._is_profiler_enabled


def test_tokens_per_second_counts_what_the_loss_counts(tmp_path):
    """Without padding; of a loss that counts samples there is none."""
    chosen = (*runs.MODELS["gpt"], "data.min_length=4", "every.log=2", "train.max_steps=2")
    run = runs.prepare(tmp_path, *chosen)
    tokens, data, progress = 0, run.batches.dataset, run.state.progress
    for progress.consumed in (0, 16):
        tokens += sum(int((data[i]["targets"] != -100).sum()) for i in run.batches.share(progress).numbers)
    run.close()
    runs.run(tmp_path / "run", *chosen)
    (line,) = metrics(tmp_path / "run")
    assert line["tokens_per_second"] / line["samples_per_second"] == pytest.approx(tokens / 32, rel=1e-9)
    runs.run(tmp_path / "images", *runs.MODELS["mlp"], "train.max_steps=1")
    assert "tokens_per_second" not in metrics(tmp_path / "images")[0]


def test_utilisation_by_hand(tmp_path):
    """Three linear layers: 2 FLOPs per weight forward and twice that backward, without the first layer's input."""
    chosen = (*runs.MODELS["mlp"], "train.max_steps=2", "batch.micro_size=5")
    runs.run(tmp_path / "run", *chosen, "train.peak_flops=1e6")
    weights = (64 * 16, 16 * 16, 16 * 10)
    per_sample = 2 * (3 * sum(weights) - weights[0])
    for line in metrics(tmp_path / "run"):
        assert line["mfu"] == pytest.approx(per_sample * line["samples_per_second"] / 1e6, rel=1e-9)
    runs.run(tmp_path / "unknown", *chosen)
    assert "mfu" not in metrics(tmp_path / "unknown")[0]


@pytest.mark.slow
def test_counting_changes_no_bit(tmp_path):
    chosen = (*runs.MODELS["gpt"], "train.max_steps=2")
    plain = runs.run_until(tmp_path / "a", 2, *chosen)
    counted = runs.run_until(tmp_path / "b", 2, *chosen, "train.peak_flops=1e9")
    assert torch.equal(runs.weights(plain.state.model), runs.weights(counted.state.model))


def test_what_is_recomputed_does_not_count(tmp_path):
    counted = []
    for mode in ("none", "full"):
        run = runs.prepare(
            tmp_path / mode, *runs.MODELS["gpt"], f"activation_checkpointing={mode}", "train.peak_flops=1e9"
        )
        loop.train_step(run)
        counted.append(run.meter.utilisation.flops_per_sample[""])
        run.close()
    assert counted[0] == pytest.approx(counted[1], rel=0.02)  # but for attention, whose backward is not twice as much


def test_peaks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-80GB")
    cuda = torch.device("cuda", 0)
    assert peak_flops(cuda, "bf16", None) == 312e12
    assert peak_flops(cuda, "tf32", None) == 156e12
    assert peak_flops(cuda, "fp32", None) is None
    assert peak_flops(cuda, "fp32", 1e12) == 1e12
    assert peak_flops(torch.device("cpu"), "bf16", None) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Unheard of")
    assert peak_flops(cuda, "bf16", None) is None
