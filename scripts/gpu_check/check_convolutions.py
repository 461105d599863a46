"""A convolution under shrinking limits: which error it raises, and whether the program takes it for what it is.

cuDNN's search for an algorithm swallows the allocator's errors, tries another algorithm, and in the end raises one of
its own (aten/src/ATen/native/cudnn/Conv_v8.cpp, `try_configs`). The allocator counts swallowed ones in `num_ooms`; the
program judges that error by this count, since under a limit the device never looks full.
"""

import collections
import re

import pytest
import torch

from gpu_check import jobs
from trainapp.config.schema import Memory
from trainapp.memory.build import build_memory
from trainapp.memory.cuda import refused_allocations
from trainapp.memory.detection import is_out_of_memory

LIMITS = 20
SHAPES = {"cuda": (64, 64, 64, 64), "cpu": (4, 8, 16, 16)}  # samples, channels, height, width


@pytest.mark.parametrize("searches", [True, False], ids=["search on", "search off"])
def test_errors_under_20_limits(device, got, searches):
    """all errors, at least one, count as out of memory; from what it needs down to a tenth of that"""
    if searches and device == "cpu":
        pytest.skip("needs CUDA")
    torch.backends.cudnn.benchmark = searches
    place = torch.device(device)
    # A shape of its own for every limit: cuDNN remembers the algorithm that it has found for a shape.
    shapes = [(SHAPES[device][0] + number, *SHAPES[device][1:]) for number in range(LIMITS + 1)]
    jobs.lift_limit(device)
    needed = measured(place, shapes[-1])
    kinds: collections.Counter[str] = collections.Counter()
    missed, silent, raised = [], 0, 0
    for number, shape in enumerate(shapes[:LIMITS]):
        before = refused_allocations()  # 0 on the CPU
        error = failure(place, shape, int(needed * (1.0 - 0.9 * number / (LIMITS - 1))))
        more = refused_allocations() - before
        if error is None:
            silent += more > 0
            continue
        raised += 1
        text = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        kinds[re.sub(r"\d+(\.\d+)?", "N", text[:90]) + f" (num_ooms +{more})"] += 1  # one for all sizes
        if not is_out_of_memory(error, more):
            missed.append(text)
        del error
        jobs.lift_limit(device)
        jobs.live_bytes(device)  # collects
    got(f"{raised - len(missed)} of {raised}; limits at which an allocation failed without an error: {silent}")
    for kind, count in kinds.most_common(4):
        got(f"{count} x {kind}")
    assert raised
    assert not missed


def measured(device: torch.device, shape: tuple[int, ...]) -> int:
    """The peak of reserved bytes without a limit and after the search; on the CPU of live ones."""
    if device.type == "cuda":
        for _ in range(2):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            forward_and_backward(device, shape)
        return torch.cuda.max_memory_reserved()
    memory = build_memory(Memory(), device)
    with memory.watch({}):
        forward_and_backward(device, shape)
    return memory.peak


def failure(device: torch.device, shape: tuple[int, ...], limit: int) -> Exception | None:
    """The error under this limit, without the frames that would keep its tensors."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    memory = build_memory(Memory(limit=limit), device)
    try:
        with memory.watch({}):
            forward_and_backward(device, shape)
    except Exception as error:
        return error.with_traceback(None)
    return None


def forward_and_backward(device: torch.device, shape: tuple[int, ...]) -> None:
    """Two convolutions; the second one's backward needs the gradient of its input, too."""
    images = torch.ones(shape, device=device)
    kernels = [torch.ones(shape[1], shape[1], 3, 3, device=device, requires_grad=True) for _ in range(2)]
    for kernel in kernels:
        images = torch.nn.functional.conv2d(images, kernel, padding=1)
    images.sum().backward()
    jobs.synchronise(device.type)
