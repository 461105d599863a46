"""What docs/configuration.md, docs/extending.md and docs/parallel.md say of settings on CUDA."""

import pickle

import helpers
import pytest
import runs
import torch
from on_gpu import LARGE, ON_GPU, command, forget, launched, limit_of

from trainapp.errors import TrainingStopped, UserError
from trainapp.training import loop

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def large_limit(tmp_path_factory):
    """Too little for LARGE."""
    limit = limit_of(tmp_path_factory.mktemp("limit"), 0.4, *LARGE)
    forget()
    return limit


def test_auto_is_cuda(tmp_path):
    run = runs.prepare(tmp_path, *runs.MODELS["mlp"], "train.device=auto", "checkpointing=off")
    run.close()
    assert run.state.device.type == "cuda"
    assert {p.device.type for p in run.state.model.parameters()} == {"cuda"}


@pytest.mark.parametrize(
    ("variable", "setting", "expected"),
    [(None, True, True), (None, False, False), ("expandable_segments:False", True, False)],
    ids=["default", "switched off", "set by the user"],
)
def test_expandable_segments(tmp_path, large_limit, variable, setting, expected):
    """On by default, unless the user's variable says otherwise: read from the snapshot of a run that ran out."""
    settings = [f"memory.limit={large_limit}", f"memory.expandable_segments={str(setting).lower()}"]
    environment = {"PYTORCH_CUDA_ALLOC_CONF": variable, "PYTORCH_ALLOC_CONF": None}
    done = command(tmp_path / "run", *LARGE, *settings, "train.max_steps=1", env=environment)
    assert done.returncode == 0, done.stderr
    path = next((tmp_path / "run" / "oom").glob("*.snapshot.pickle"))
    assert pickle.loads(path.read_bytes())["allocator_settings"]["expandable_segments"] is expected


def test_a_limit_as_a_fraction(tmp_path):
    launched(tmp_path, *runs.MODELS["mlp"], *ON_GPU, "memory.limit=0.25", "train.max_steps=2")
    total = torch.cuda.get_device_properties(0).total_memory
    assert {line["memory/limit"] for line in helpers.metrics(tmp_path)} == {int(0.25 * total)}


def test_the_timeline_of_a_healthy_step(tmp_path):
    launched(tmp_path, *LARGE, "train.max_steps=8", "memory.timeline=true", "checkpointing=off")
    snapshot = pickle.loads((tmp_path / "memory_timeline.snapshot.pickle").read_bytes())
    assert snapshot["device_traces"]


def test_checkpointing_changes_no_bit(tmp_path):
    """Whether activations are kept or recomputed, with dropout and CUDA's attention kernels."""
    found = {}
    for mode in ("none", "full", "selective"):
        overrides = (*runs.MODELS["gpt"], *ON_GPU, "train.deterministic=true", f"activation_checkpointing={mode}")
        launched(tmp_path / mode, *overrides, "train.max_steps=4")
        found[mode] = runs.saved(tmp_path / mode, 4)["model"]
    assert runs.differences(found["none"], found["full"]) == []
    assert runs.differences(found["none"], found["selective"]) == []


def test_checkpointing_takes_less_memory(tmp_path):
    peaks = []
    for mode in ("none", "selective", "full"):
        forget()
        overrides = (*LARGE, "checkpointing=off", f"activation_checkpointing={mode}", "train.max_steps=2")
        peaks.append(launched(tmp_path / mode, *overrides).peak_memory_bytes)
    assert peaks[0] > peaks[1] > peaks[2]


def test_a_step_that_is_not_finite_is_skipped(tmp_path):
    """train.nonfinite=skip: neither parameters nor BatchNorm's statistics have seen it."""
    settings = ("train.nonfinite=skip", "data.augment=false", "checkpointing=off")
    run = runs.prepare(tmp_path, *runs.MODELS["resnet"], *ON_GPU, *settings)
    loop.train_step(run)
    before = {name: value.clone() for name, value in run.state.model.state_dict().items()}
    data = run.batches.dataset
    images, data._images = data._images, data._images * float("nan")
    run.batches.close()  # what was fetched ahead is finite
    loop.train_step(run)
    assert (run.state.progress.step, run.state.progress.skipped) == (1, 1)
    assert runs.differences(before, dict(run.state.model.state_dict())) == []
    data._images = images
    run.batches.close()
    loop.train_step(run)
    run.close()
    assert run.state.progress.step == 2


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_count_of_zero_on_the_device(tmp_path, policy):
    """A tensor on the GPU is not read in every step: it ends the run, unless train.nonfinite=skip."""
    task = ("user_packages=[on_gpu]", "task=on_gpu.counting_nothing", "objective='min loss'")
    settings = (*runs.MODELS["mlp"], *ON_GPU, *task, f"train.nonfinite={policy}", "checkpointing=off")
    run = runs.prepare(tmp_path, *settings, "train.max_steps=3")
    if policy == "stop":
        with pytest.raises(TrainingStopped, match="count"):
            loop.train(run)
    else:
        for _ in range(3):
            loop.train_step(run)
        assert (run.state.progress.step, run.state.progress.skipped) == (0, 3)
    run.close()


def test_one_rank_over_nccl(tmp_path):
    """Through the launcher, checkpoints in the background: as the run in a single process, and it resumes."""
    overrides = (*runs.MODELS["gpt"], *ON_GPU, "train.deterministic=true", "every.save=2", "schedule=constant")
    launched(tmp_path / "single", *overrides, "train.max_steps=4")
    ranks = ("parallel=ddp", "parallel.devices=1", "checkpointing.asynchronous=true", "parallel.timeout=60")
    launched(tmp_path / "ranks", *overrides, *ranks, "train.max_steps=2")
    launched(tmp_path / "ranks", *overrides, *ranks, "train.max_steps=4")
    for part in ("model", "optimizer"):
        assert runs.differences(runs.saved(tmp_path / "single", 4)[part], runs.saved(tmp_path / "ranks", 4)[part]) == []


def test_more_ranks_than_gpus_are_refused(tmp_path):
    count = torch.cuda.device_count()
    with pytest.raises(UserError, match=f"this machine has {count} GPUs"):
        launched(tmp_path, *runs.MODELS["mlp"], *ON_GPU, "parallel=ddp", f"parallel.devices={count + 1}")
