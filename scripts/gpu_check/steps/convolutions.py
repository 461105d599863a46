"""A convolution under shrinking limits: which error it raises, and whether the program takes it for what it is.

cuDNN's search for an algorithm swallows the allocator's errors, tries another algorithm, and in the end raises one of
its own (aten/src/ATen/native/cudnn/Conv_v8.cpp, `try_configs`). The allocator counts swallowed ones in `num_ooms`; the
program judges that error by this count, since under a limit the device never looks full.
"""

import collections
import re
from pathlib import Path

import torch

from trainapp.config.schema import Memory
from trainapp.memory import device as device_memory
from trainapp.memory.cuda import refused_allocations
from trainapp.memory.detection import is_out_of_memory

from .. import jobs
from ..table import Table, failure_text

LIMITS = 20
SHAPES = {"cuda": (64, 64, 64, 64), "cpu": (4, 8, 16, 16)}  # samples, channels, height, width


def check(table: Table, device: str, folder: Path) -> None:
    """Rows for cuDNN's search on and off."""
    for search in (True, False) if device == "cuda" else (False,):
        torch.backends.cudnn.benchmark = search
        with table.attempt(f"cuDNN's search {'on' if search else 'off'}", "errors that count as out of memory"):
            under_limits(table, device, search)


def under_limits(table: Table, device: str, search: bool) -> None:
    """From what the convolution needs down to a tenth of it."""
    place = torch.device(device)
    # A shape of its own for every limit: cuDNN remembers the algorithm that it has found for a shape.
    shapes = [(SHAPES[device][0] + number, *SHAPES[device][1:]) for number in range(LIMITS + 1)]
    jobs.lift_limit(device)
    needed = measured(place, shapes[-1])
    kinds: collections.Counter[str] = collections.Counter()
    missed, silent, raised = [], 0, 0
    for number, shape in enumerate(shapes[:LIMITS]):
        limit = int(needed * (1.0 - 0.9 * number / (LIMITS - 1)))
        before = refused_allocations()  # 0 on the CPU
        error = failure(place, shape, limit)
        more = refused_allocations() - before
        if error is None:
            silent += more > 0
            continue
        raised += 1
        text = re.sub(r"\d+(\.\d+)?", "N", failure_text(error)[:90])  # one row for all sizes
        kinds[f"{text} (num_ooms +{more})"] += 1
        if not is_out_of_memory(error, more):
            missed.append(failure_text(error))
        del error
        jobs.lift_limit(device)
        jobs.live_bytes(device)  # collects
    name = f"search {'on' if search else 'off'}"
    table.expect(
        f"{name}: errors under {LIMITS} limits that count as out of memory",
        "all, and at least 1",
        f"{raised - len(missed)} of {raised}" + (f"; not: {missed[0]}" if missed else ""),
        raised > 0 and not missed,
    )
    for kind, count in kinds.most_common(4):
        table.measured(f"{name}: error", f"{count} x {kind}")
    if device == "cuda":
        table.measured(f"{name}: limits at which an allocation failed and no error was raised", str(silent))


def measured(device: torch.device, shape: tuple[int, ...]) -> int:
    """The peak of reserved bytes without a limit and after the search; on the CPU of live ones."""
    if device.type == "cuda":
        for _ in range(2):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            forward_and_backward(device, shape)
        return torch.cuda.max_memory_reserved()
    memory = device_memory.build(Memory(), device)
    with memory.watch({}):
        forward_and_backward(device, shape)
    return memory.peak


def failure(device: torch.device, shape: tuple[int, ...], limit: int) -> Exception | None:
    """The error under this limit, without the frames that would keep its tensors."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    memory = device_memory.build(Memory(limit=limit), device)
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
