"""The memory that a run reports, compared with independent counts."""

import helpers
import psutil
import pytest
import runs
import torch
from torch.profiler import ProfilerActivity, profile

from trainapp.config import schema
from trainapp.data.batch import tensors_in
from trainapp.errors import UserError
from trainapp.memory import cpu
from trainapp.memory.build import build_memory
from trainapp.memory.host import total_bytes
from trainapp.memory.live_tensors import Category
from trainapp.memory.static import static_bytes
from trainapp.training import loop

MEASURED = (
    "allocated reserved peak peak_reserved limit percent_of_limit fragmentation allocator_retries out_of_memory_count "
    "host_rss host_rss_peak parameters gradients optimizer_state buffers left_for_activations"
)
TAGS = {"batch/micro_size", "batch/accumulation", *(f"memory/{name}" for name in MEASURED.split())}
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("case", "overrides", "copies"),
    [
        ("mlp", (), 2),
        ("mlp", ("optimizer=sgd",), 1),
        ("mlp", ("optimizer=sgd", "optimizer.momentum=0", "optimizer.nesterov=false"), 0),
        ("resnet", (), 2),
        ("gpt", (), 2),
    ],
)
def test_the_static_part_by_kind(tmp_path, case, overrides, copies):
    """4 bytes per number; AdamW keeps two copies of the parameters and a step count for each, SGD one copy."""
    run = runs.prepare(tmp_path, *runs.MODELS[case], *overrides, "train.ema=0.9")
    loop.train(run)
    run.tracker.close()
    model, line = run.state.model, helpers.metrics(tmp_path)[-1]
    parameters = sum(4 * p.numel() for p in model.parameters())
    assert line["memory/parameters"] == line["memory/gradients"] == parameters
    counts = 4 * len(list(model.parameters())) if copies == 2 else 0
    assert line["memory/optimizer_state"] == copies * parameters + counts
    assert line["memory/buffers"] == sum(b.numel() * b.element_size() for b in model.buffers())
    assert line["memory/weight_average"] == parameters
    static = sum(line[f"memory/{kind}"] for kind in static_bytes(model, run.state.optimizers, []))
    assert line["memory/left_for_activations"] == line["memory/limit"] - static


def profiled_peak(work):
    """The peak of allocated bytes inside `work()`, by the profiler's record of every allocation and free."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@pytest.mark.parametrize(
    ("case", "micro", "within"),
    [("mlp", 64, 0.002), ("mlp", 20, 0.002), ("resnet", 64, 0.08), ("gpt", 64, 0.002), ("gpt", 20, 0.002)],
)
def test_the_peak_is_the_profilers(tmp_path, case, micro, within):
    """The profiler also sees a kernel's internal allocations: oneDNN's convolutions have workspaces."""
    overrides = (*runs.MODELS[case], "batch.global_size=64", f"batch.micro_size={micro}", "checkpointing.save=false")
    run = runs.prepare(tmp_path / "a", *overrides)
    for _ in range(2):
        loop.train_step(run)
    run.tracker.close()
    reported = run.memory.peak
    run = runs.prepare(tmp_path / "b", *overrides, "every.log=null", "oom.clean_steps=1")
    for _ in range(2):  # in which checksums are made
        loop.train_step(run)
    assert not run.sizes.train.is_unvalidated  # otherwise the counter itself would be in the profile
    run.state.optimizer.zero_grad(set_to_none=True)
    resident = sum(static_bytes(run.state.model, run.state.optimizers, []).values())
    resident -= run.meter.static[Category.GRADIENTS]
    resident += sum(t.nbytes for t in tensors_in(run.batches.example(micro)))  # NumPy's memory, not the allocator's
    peak = resident + profiled_peak(lambda: loop.train_step(run))
    run.tracker.close()
    state = 5600  # of the generator, and the samples' numbers, while a forward that draws is computed
    assert reported == pytest.approx(peak, rel=within, abs=state if case == "gpt" else 0)
    assert reported > 1.2 * resident  # this includes activations and gradients


def test_values_are_plausible(tmp_path):
    runs.run(tmp_path, *runs.MODELS["resnet"], "memory.limit=64MiB")
    for line in helpers.metrics(tmp_path):
        assert line.keys() >= TAGS
        static = line["memory/parameters"] + line["memory/optimizer_state"] + line["memory/buffers"]
        assert line["memory/limit"] == 64 * 2**20
        assert 0 < line["memory/percent_of_limit"] <= 100
        assert line["memory/percent_of_limit"] == pytest.approx(100 * line["memory/peak"] / line["memory/limit"])
        assert static <= line["memory/allocated"] <= line["memory/peak"]
        assert line["memory/allocated"] == pytest.approx(static + line["memory/gradients"], rel=0.1)
        assert line["memory/fragmentation"] == 0
        assert line["memory/out_of_memory_count"] == 0
        assert 50 * 2**20 < line["memory/host_rss"] < psutil.virtual_memory().total
        assert line["memory/host_rss_peak"] >= line["memory/host_rss"] * 0.9


def test_an_evaluation_does_not_hide_what_a_step_needs(tmp_path, monkeypatch):
    """Few steps of a validated size are counted: those after an evaluation need what the last counted one did."""
    monkeypatch.setattr(cpu, "WATCH_INTERVAL", 1e9)
    settings = (
        "every.log=1",
        "every.eval=2",
        "batch.eval_micro_size=1",
        "oom.clean_steps=1",
        "train.max_steps=8",
        "checkpointing=off",
    )
    runs.run(tmp_path, *runs.MODELS["resnet"], *settings)
    peaks = [line["memory/peak"] for line in helpers.metrics(tmp_path) if "memory/peak" in line]
    assert len(peaks) == 8
    assert min(peaks[1:]) == max(peaks[1:])


def test_counting_takes_at_most_a_tenth_of_the_time(monkeypatch):
    """After a counted step of 2 s, the next is counted in 20 s, not in 5."""
    now = [1000.0]
    monkeypatch.setattr(cpu.time, "monotonic", lambda: now[0])
    memory = build_memory(schema.Memory(), CPU)
    assert memory.watch_is_due
    for seconds, waits in ((2.0, 20.0), (0.1, 5.0)):
        with memory.watch({}):
            now[0] += seconds
        now[0] += waits - 0.5
        assert not memory.watch_is_due
        now[0] += 1.0
        assert memory.watch_is_due


def test_the_limit_is_a_size_or_a_fraction():
    total = total_bytes()
    for setting, expected in (
        (0.5, total // 2),
        ("1GiB", 2**30),
        ("500MB", 500_000_000),
        (123456, 123456),
        (None, None),
    ):
        found = build_memory(schema.Memory(limit=setting), CPU).limit
        assert found == expected or abs(found - expected) <= 1
    with pytest.raises(UserError, match=r"memory\.limit=100000GiB: .* are more than the"):
        build_memory(schema.Memory(limit="100000GiB"), CPU)


@pytest.mark.slow
def test_watching_changes_no_bit(tmp_path):
    """Every step measured, compared with only the first."""
    ends = []
    for number, overrides in enumerate((("every.log=1",), ("every.log=null", "oom.clean_steps=1"))):
        run = runs.prepare(tmp_path / str(number), *runs.MODELS["gpt"], *overrides)
        loop.train(run)
        run.tracker.close()
        ends.append(runs.weights(run.state.model))
    assert torch.equal(ends[0], ends[1])
