"""What only a GPU shows: the allocator's own cap and errors, streams, half precision. Skipped without one."""

import gc
import pickle

import helpers
import pytest
import runs
import torch

from trainapp.config import schema
from trainapp.data.digits import Digits
from trainapp.data.progress import Progress
from trainapp.data.sampler import TrainBatches
from trainapp.memory import backends
from trainapp.train import loop

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
MIB = 2**20
ON_GPU = ("train.device=cuda",)
# GroupNorm: the result does not depend on the micro-batch that the search finds.
LARGE = (
    "model=resnet",
    "model.width=32",
    "model.norm=group",
    "data=synthetic_images",
    "data.image_shape=[3,64,64]",
    "data.size=1024",
    "data.val_size=64",
    "batch.global_size=256",
    "optimizer=sgd",
    "optimizer.lr=0.01",
    *ON_GPU,
)


@pytest.fixture(autouse=True)
def clean_device():
    """Free the memory of earlier tests and remove their cap."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_real_out_of_memory_error_and_the_recovery_from_it(tmp_path):
    """A cap at half of what the whole batch needs: each sample once, and the weights of a run that never failed."""
    free = runs.run(tmp_path / "free", *LARGE, "train.max_steps=3")
    assert free.oom_restarts == 0
    limit = free.peak_memory_bytes // 2
    run = runs.prepare(tmp_path / "start", *LARGE)
    start = runs.weights(run.state.model)
    run.tracker.close()
    del run
    gc.collect()
    capped = runs.run(tmp_path / "capped", *LARGE, "train.max_steps=3", f"memory.limit={limit}", "oom.remember=false")
    assert capped.oom_restarts >= 1
    assert capped.micro_size < 256
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


def test_memory_is_given_back(tmp_path):
    """After a recovery no tensor of the failed step is left on the device."""
    free = runs.run(tmp_path / "free", *LARGE, "train.max_steps=1")
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    runs.run(tmp_path / "capped", *LARGE, "train.max_steps=3", f"memory.limit={free.peak_memory_bytes // 2}")
    assert helpers.result(tmp_path / "capped")["oom_restarts"] >= 1
    for line in helpers.metrics(tmp_path / "capped"):
        static = sum(line[f"memory/{kind}"] for kind in ("parameters", "gradients", "optimizer_state", "buffers"))
        assert line["memory/allocated"] < static + before + 64 * MIB  # the next batch and cuBLAS's workspace
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= before + 16 * MIB


def test_the_allocators_snapshot_can_be_read(tmp_path):
    free = runs.run(tmp_path / "free", *LARGE, "train.max_steps=1")
    runs.run(tmp_path / "capped", *LARGE, "train.max_steps=1", f"memory.limit={free.peak_memory_bytes // 2}")
    (path, *_) = sorted((tmp_path / "capped" / "oom").glob("*.snapshot.pickle"))
    with path.open("rb") as file:
        snapshot = pickle.load(file)
    actions = {entry["action"] for trace in snapshot["device_traces"] for entry in trace}
    assert {"alloc", "free_completed"} <= actions
    assert snapshot["segments"]


def test_the_same_error_every_time(tmp_path):
    free = runs.run(tmp_path / "free", *LARGE, "train.max_steps=1")
    ends = set()
    for number in range(5):
        run = runs.run(
            tmp_path / str(number),
            *LARGE,
            "train.max_steps=1",
            f"memory.limit={free.peak_memory_bytes // 3}",
            "oom.remember=false",
        )
        ends.add((run.micro_size, run.oom_restarts))
    assert len(ends) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_prefetching_changes_no_batch(workers):
    """Pinned memory, a separate stream, one batch ahead: the tensors equal the host's, also across an epoch's end."""
    data, found = Digits("train", augment=True), {}
    for device in (torch.device("cpu"), torch.device("cuda")):
        batches = TrainBatches(data, global_size=500, seed=0, device=device, workers=workers)
        progress, samples = Progress(), []
        for _ in range(4):
            for micro in batches.micro_batches(progress, 128):
                if device.type == "cuda":
                    torch.cuda._sleep(1_000_000)  # the copy stream runs ahead of the work
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
    runs.run(tmp_path / "fp32", *runs.MODELS[case], *ON_GPU, "train.max_steps=8")
    runs.run(tmp_path / mode, *runs.MODELS[case], *ON_GPU, f"precision={mode}", *scale, "train.max_steps=8")
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
    runs.run(tmp_path / "a", *overrides)
    runs.run_until(tmp_path / "b", 3, *overrides)
    runs.run(tmp_path / "b", *overrides, "data.num_workers=2")
    torch.use_deterministic_algorithms(False)
    for part in ("model", "optimizer", "rng"):
        assert runs.differences(runs.saved(tmp_path / "a", 6)[part], runs.saved(tmp_path / "b", 6)[part]) == []


def test_a_bad_step_reaches_no_checkpoint(tmp_path):
    """On a GPU it is detected only at a check, which happens before anything is saved."""
    from trainapp.errors import TrainingStopped

    run = runs.prepare(tmp_path, *runs.MODELS["mlp"], *ON_GPU, "every.log=null", "every.save=4", "train.max_steps=8")
    loop.train_step(run)
    data = run.batches._source.fetcher.dataset
    data._images = data._images * float("nan")
    with pytest.raises(TrainingStopped, match=r"step [23]: the loss is not finite"):
        loop.train(run)
    run.tracker.close()
    assert not (tmp_path / "checkpoints").exists()


def test_the_counters_are_the_allocators(tmp_path):
    runs.run(tmp_path, *LARGE, "train.max_steps=2")
    total = torch.cuda.get_device_properties(0).total_memory
    for line in helpers.metrics(tmp_path):
        assert line["memory/limit"] == total
        assert 0 < line["memory/allocated"] <= line["memory/reserved"]
        assert line["memory/allocated"] <= line["memory/peak"] <= total
        assert line["memory/percent_of_limit"] <= 100
        assert 0 <= line["memory/fragmentation"] < 1
        assert line["memory/allocator_retries"] == 0


def test_the_cap_is_the_limit():
    backends.build(schema.Memory(limit="512MiB"), torch.device("cuda", 0))
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(600 * MIB, dtype=torch.uint8, device="cuda")
    torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
