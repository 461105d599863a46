"""AdamW in low precision as one launch a parameter: the same updates, which compile; what happens without Triton."""

import os
import subprocess
import sys

import pytest
import torch
from helpers import ROOT
from torch import nn

from trainapp.optim import fused_adamw
from trainapp.optim.low_precision import AdamW

CPU = torch.device("cpu")


class RecordedLaunches:
    """In place of the kernel: the arguments of its launches."""

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **kwargs):
        self.calls.append((args, kwargs))


@pytest.fixture
def launches(monkeypatch):
    """What would be launched, for tensors of the CPU."""
    pytest.importorskip("triton", reason="needs triton")
    recorded = RecordedLaunches()
    monkeypatch.setattr(fused_adamw, "_kernel", lambda: recorded)
    monkeypatch.setattr(fused_adamw, "_is_usable", lambda device: True)
    monkeypatch.setattr(fused_adamw, "DEVICE_TYPES", {"cpu"})
    return recorded


@pytest.mark.slow
def test_the_kernel_updates_as_torchs_kernels_do():
    """In Triton's interpreter, which a process chooses when it imports the kernel."""
    pytest.importorskip("triton", reason="needs triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/optim/adamw_in_interpreter.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def update_once(state_dtype, dtype=torch.float32, shape=(64, 128)):
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    optimizer = AdamW([parameter], state_dtype=state_dtype)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [75, 80, 90])
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "8bit", "4bit"])
def test_the_kernel_compiles(launches, architecture, state_dtype, monkeypatch, tmp_path):
    """Without a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    from trainapp.optim.adamw_kernel import adamw

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    update_once(state_dtype, dtype=torch.bfloat16 if state_dtype == "bf16" else torch.float32)
    ((args, kwargs),) = launches.calls
    target = GPUTarget("cuda", architecture, 32)
    backend = make_backend(target)
    binder = create_function_from_signature(adamw.signature, adamw.params, backend)
    bound, specialization, _ = binder(*args, **kwargs)
    options, signature, constants, attributes = adamw._pack_args(backend, kwargs, bound, specialization, None)
    source = ASTSource(adamw, signature, constants, attributes)
    ptx = triton.compile(source, target=target, options=options.__dict__).asm["ptx"]
    assert "sqrt.rn" in ptx
    assert ".local" not in ptx  # nothing is spilled from registers to memory


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "8bit", "4bit"])
def test_one_launch_a_parameter_allocates_nothing(launches, state_dtype):
    parameters = [nn.Parameter(torch.zeros(size, 64)) for size in (64, 3, 100)]
    optimizer = AdamW(parameters, state_dtype=state_dtype)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        launches.calls.clear()
        with torch.profiler.profile() as profile:
            optimizer.step()
        assert len(launches.calls) == 3
    names = {event.key for event in profile.key_averages() if event.key.startswith("aten::")}
    assert names <= {"aten::detach", "aten::view", "aten::reshape"}


def test_a_kernel_that_cannot_run_is_said_once(monkeypatch, caplog):
    """Without Triton here; torch's kernels update the parameter."""
    fused_adamw._is_usable.cache_clear()
    fused_adamw._kernel.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "trainapp.optim.adamw_kernel", raising=False)
    monkeypatch.setattr(fused_adamw, "DEVICE_TYPES", {"cpu"})
    update_once("bf16")
    update_once("bf16")
    fused_adamw._is_usable.cache_clear()
    (message,) = caplog.messages
    assert "by many kernels of torch" in message
