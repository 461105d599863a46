"""The peaks that CUDA's allocator reports, and when cuDNN times its algorithms. Skipped without a GPU."""

import pytest
import runs
import torch
from on_gpu import LARGE, MIB
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_the_limit_bounds_what_is_reserved(tmp_path):
    """With expandable segments up to 20 MiB more."""
    free = runs.run(tmp_path / "free", *LARGE, "train.max_steps=1")
    limit = free.peak_memory_bytes // 2
    capped = runs.run(tmp_path / "capped", *LARGE, "train.max_steps=3", f"memory.limit={limit}")
    assert capped.peak_memory_bytes <= capped.peak_reserved_bytes <= limit + 20 * MIB


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
