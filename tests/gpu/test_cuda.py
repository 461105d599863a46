"""What only a GPU shows: the allocator's own cap and errors, streams, half precision. Skipped without one."""

import contextlib
import gc
import pickle

import helpers
import pytest
import runs
import torch
from on_gpu import LARGE, LARGE_MODELS, MIB, ON_GPU, forget, launched, limit_of
from torch.profiler import ProfilerActivity, profile

import trainapp
from trainapp.config import schema
from trainapp.data.progress import Progress
from trainapp.data.sets.digits import Digits
from trainapp.data.train_batches import TrainBatches
from trainapp.memory.build import build_memory
from trainapp.memory.cuda import refused_allocations
from trainapp.training import loop

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_real_out_of_memory_error_and_the_recovery_from_it(tmp_path):
    """A cap at half of what the whole batch needs: each sample once, and the weights of a run that never failed."""
    free = launched(tmp_path / "free", *LARGE, "train.max_steps=3")
    assert free.oom_restarts == 0
    limit = free.peak_memory_bytes // 2
    run = runs.prepare(tmp_path / "start", *LARGE)
    start = runs.weights(run.state.model)
    run.tracker.close()
    del run
    gc.collect()
    capped = launched(tmp_path / "capped", *LARGE, "train.max_steps=3", f"memory.limit={limit}")
    assert capped.oom_restarts >= 1
    assert capped.micro_size < 256
    # What is reserved is bounded, too: with expandable segments, up to 20 MiB more.
    assert capped.peak_memory_bytes <= capped.peak_reserved_bytes <= limit + 20 * MIB
    assert capped.peak_memory_bytes <= limit
    assert (capped.steps, capped.samples) == (3, 768)
    ends = [
        torch.cat([v.flatten().float().cpu() for k, v in runs.saved(tmp_path / name, 3)["model"].items()])
        for name in ("free", "capped")
    ]
    moved = float((ends[0] - start.cpu()).norm())
    assert float((ends[1] - ends[0]).norm()) / moved < 1e-2
    for incident in helpers.incidents(tmp_path / "capped"):
        assert incident["limit"] == limit
        assert incident["new_size"] < incident["old_size"] or "again" in incident["action"]


def test_the_allocators_snapshot_can_be_read(tmp_path):
    free = launched(tmp_path / "free", *LARGE, "train.max_steps=1")
    launched(tmp_path / "capped", *LARGE, "train.max_steps=1", f"memory.limit={free.peak_memory_bytes // 2}")
    (path, *_) = sorted((tmp_path / "capped" / "oom").glob("*.snapshot.pickle"))
    with path.open("rb") as file:
        snapshot = pickle.load(file)
    actions = {entry["action"] for trace in snapshot["device_traces"] for entry in trace}
    assert {"alloc", "free_completed", "oom"} <= actions
    assert snapshot["segments"]


def test_a_deterministic_job_after_another(tmp_path):
    """In one process, as in a sweep: the first job's matmuls must not forbid those of the second."""
    launched(tmp_path / "first", *runs.MODELS["mlp"], *ON_GPU)
    launched(tmp_path / "second", *runs.MODELS["mlp"], *ON_GPU, "train.deterministic=true")
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("workers", [0, 2])
def test_copying_changes_no_batch(workers):
    """Copied from pinned memory while the device works: the tensors equal the host's, also across an epoch's end."""
    data, found = Digits("train", augment=True), {}
    for device in (torch.device("cpu"), torch.device("cuda")):
        batches = TrainBatches(data, global_size=500, seed=0, device=device, workers=workers)
        progress, samples = Progress(), []
        for _ in range(4):
            for micro in batches.micro_batches(progress, [128]):
                if device.type == "cuda":
                    torch.cuda._sleep(1_000_000)  # the host runs ahead of the device
                samples.append(micro.data["inputs"].clone())
            batches.advance(progress)
        found[device.type] = [sample.cpu() for sample in samples]
        batches.close()
    assert runs.differences(found["cpu"], found["cuda"]) == []
    assert len(found["cpu"]) == 4 + 4 + 4 + 4


@pytest.mark.parametrize("case", runs.MODELS)
@pytest.mark.parametrize("mode", ["tf32", "bf16", "fp16"])
def test_precisions_train(tmp_path, mode, case):
    scale = ("precision.initial_scale=256.0",) if mode == "fp16" else ()
    launched(tmp_path / "fp32", *runs.MODELS[case], *ON_GPU, "train.max_steps=8")
    launched(tmp_path / mode, *runs.MODELS[case], *ON_GPU, f"precision={mode}", *scale, "train.max_steps=8")
    losses = [[line["loss"] for line in helpers.metrics(tmp_path / name)] for name in ("fp32", mode)]
    assert losses[1] == pytest.approx(losses[0], rel=0.1)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_an_overflow_skips_the_step(tmp_path, optimizer):
    run = runs.prepare(
        tmp_path,
        *runs.MODELS["mlp"],
        *ON_GPU,
        f"optimizer={optimizer}",
        "precision=fp16",
        "precision.initial_scale=1e9",
    )
    before = runs.weights(run.state.model)
    loop.train_step(run)
    assert (run.state.progress.step, run.state.progress.skipped, run.state.progress.samples) == (0, 1, 16)
    assert torch.equal(runs.weights(run.state.model), before)
    assert run.state.precision.scaler.get_scale() == 5e8
    loop.train(run)
    run.tracker.close()
    assert run.state.progress.step == 4
    assert all(torch.isfinite(p).all() for p in run.state.model.parameters())


@pytest.mark.parametrize("case", runs.MODELS)
def test_resumed_is_uninterrupted(tmp_path, case):
    """With deterministic kernels, bit-identical, including the GPU's own generator."""
    overrides = (*runs.MODELS[case], *ON_GPU, "train.deterministic=true", "train.max_steps=6", "data.num_workers=0")
    launched(tmp_path / "a", *overrides)
    runs.run_until(tmp_path / "b", 3, *overrides)
    launched(tmp_path / "b", *overrides, "data.num_workers=2")
    torch.use_deterministic_algorithms(False)
    for part in ("model", "optimizer"):
        assert runs.differences(runs.saved(tmp_path / "a", 6)[part], runs.saved(tmp_path / "b", 6)[part]) == []


def test_a_bad_step_reaches_no_checkpoint(tmp_path):
    """On a GPU it is detected only at a check, which happens before anything is saved."""
    from trainapp.errors import TrainingStopped

    run = runs.prepare(tmp_path, *runs.MODELS["mlp"], *ON_GPU, "every.log=null", "every.save=4", "train.max_steps=8")
    loop.train_step(run)
    data = run.batches.dataset
    data._images = data._images * float("nan")
    with pytest.raises(TrainingStopped, match=r"step [23]: loss or gradients are not finite"):
        loop.train(run)
    run.tracker.close()
    assert not (tmp_path / "checkpoints").exists()


def test_the_counters_are_the_allocators(tmp_path):
    launched(tmp_path, *LARGE, "train.max_steps=2")
    total = torch.cuda.get_device_properties(0).total_memory
    for line in helpers.metrics(tmp_path):
        assert line["memory/limit"] == total
        assert 0 < line["memory/allocated"] <= line["memory/reserved"]
        assert line["memory/allocated"] <= line["memory/peak"] <= total
        assert line["memory/percent_of_limit"] <= 100
        assert 0 <= line["memory/fragmentation"] < 1
        assert line["memory/allocator_retries"] == 0


def test_a_backend_without_a_history(tmp_path):
    """cudaMallocAsync cannot record; the run recovers all the same. In a process of its own: the backend is fixed."""
    free = launched(tmp_path / "free", *LARGE, "train.max_steps=1")
    limit = f"memory.limit={free.peak_memory_bytes // 2}"
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    helpers.train(tmp_path / "capped", *runs.TINY, *LARGE, "train.max_steps=1", limit, env=environment, timeout=300)
    assert helpers.result(tmp_path / "capped")["oom_restarts"] >= 1
    assert not list((tmp_path / "capped" / "oom").glob("*.snapshot.pickle"))


def test_without_a_limit_the_cap_is_below_what_is_free():
    memory = build_memory(schema.Memory(), torch.device("cuda", 0))
    free, total = torch.cuda.mem_get_info(0)
    assert memory.enforced < free + torch.cuda.memory_reserved(0)
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory"):
        torch.empty(memory.enforced + 64 * MIB, dtype=torch.uint8, device="cuda")
    assert memory.budget == memory.total
    assert memory.total == pytest.approx(total, rel=0.01)


def test_a_refused_allocation_is_counted_though_the_error_is_caught():
    build_memory(schema.Memory(limit="512MiB"), torch.device("cuda", 0))
    before = refused_allocations()
    with contextlib.suppress(torch.OutOfMemoryError):
        torch.empty(600 * MIB, dtype=torch.uint8, device="cuda")
    assert refused_allocations() == before + 1
    torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    assert refused_allocations() == before + 1


def kernels(work):
    """How many kernels run in `work()`."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    return sum(event.count for event in profiler.key_averages())


@pytest.mark.parametrize(("deterministic_before", "times"), [(True, True), (False, False)])
def test_cudnn_times_a_shape_that_has_no_plan_for_this_kind_of_algorithm(deterministic_before, times):
    """What `Autotuner` rests on. Without the change of `deterministic` the plan from heuristics would stay for good."""
    width = 24 if deterministic_before else 40  # a shape of its own: plans are kept for the whole process
    conv, images = torch.nn.Conv2d(3, width, 3).cuda(), torch.randn(16, 3, 64, 64, device="cuda")
    before = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    try:
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, deterministic_before
        conv(images)
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = True, False
        first, second = kernels(lambda: conv(images)), kernels(lambda: conv(images))
    finally:
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = before
    assert (first > second) == times


def test_a_plan_is_for_this_gpu():
    plan = trainapp.plan(["model=mlp", "plan.techniques=false"])
    assert plan["method"] == "traced"
    assert plan["peak_bytes"] % 512 == 0  # CUDA's allocator rounds each tensor up to so much


STEPS = (*LARGE_MODELS["gpt"], "checkpointing=off", "train.max_steps=4", "every.eval=null")


def test_a_run_with_the_planned_size_fits(tmp_path):
    limit = limit_of(tmp_path / "limit", 0.5, *STEPS)
    forget()
    largest = trainapp.plan([*STEPS, f"memory.limit={limit}", "plan.techniques=false"])["largest_micro_size"]
    assert 1 < largest < 128
    planned = runs.run(tmp_path / "planned", *STEPS, f"memory.limit={limit}", f"batch.micro_size={largest}")
    assert planned.micro_schedule == {1: largest}
    assert planned.oom_restarts == 0
