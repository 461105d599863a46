"""Watched steps of a compiled model on a device whose allocator counts, as CUDA's does: no hook breaks its graphs.

Played on the CPU, whose counter is replaced by none: there, unlike here, watched work runs uncompiled.
"""

import json

import pytest
import runs
import torch
from torch import nn

from trainapp.memory.cpu import CpuMemory
from trainapp.memory.device import DeviceMemory

GPT = (
    *runs.MODELS["gpt"],
    *("model.depth=2", "train.compile=true", "train.device=cpu", "train.max_steps=8", "batch.global_size=16"),
    *("every.eval=null", "every.save=null"),
)


class CountingCompiler:
    """A compiler that only counts the operations of each graph, and runs it as it is.

    fails_in: the number of the call of a compiled graph that runs out of memory, from 1.
    """

    def __init__(self):
        self.sizes = []
        self.fails_in = None
        self.calls = 0

    def __call__(self, graph, inputs):
        self.sizes.append(sum(node.op.startswith("call_") for node in graph.graph.nodes))

        def run(*arguments):
            self.calls += 1
            if self.calls == self.fails_in:
                raise torch.OutOfMemoryError("CUDA out of memory. (injected)")
            return graph.forward(*arguments)

        return run


@pytest.fixture
def compiler(monkeypatch):
    compiler = CountingCompiler()
    compile_in_place = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compile_in_place(self, backend=compiler))
    for name in ("measuring", "lap", "sees_modules"):
        monkeypatch.setattr(CpuMemory, name, getattr(DeviceMemory, name))
    torch.compiler.reset()
    yield compiler
    torch.compiler.reset()


@pytest.mark.slow
def test_the_first_steps_are_watched(compiler, tmp_path):
    runs.run(tmp_path, *GPT, "batch.micro_size=auto")
    (operations,) = compiler.sizes
    assert operations > 50


@pytest.mark.slow
def test_two_graphs_for_all_sizes(compiler, tmp_path):
    """One for the first size, one for any other. That of a single sample, and models with BatchNorm, have more."""
    runs.run(tmp_path, *GPT, "batch.micro_schedule={1: 16, 2: 8, 3: 5, 4: 3, 5: 2, 6: 7}")
    assert len(compiler.sizes) == 2
    assert compiler.sizes[0] == compiler.sizes[1]


@pytest.mark.slow
def test_hooks_would_break_the_graph(compiler, tmp_path, monkeypatch):
    """Negative control."""
    monkeypatch.setattr(CpuMemory, "sees_modules", True)
    runs.run(tmp_path, *GPT, "batch.micro_size=auto")
    assert len(compiler.sizes) > 3


@pytest.mark.slow
def test_a_report_says_compiled(compiler, tmp_path):
    """No frame of a module is on the stack of compiled code."""
    compiler.fails_in = 3
    runs.run(tmp_path, *GPT, "batch.micro_size=8")
    (report,) = [json.loads(path.read_text()) for path in (tmp_path / "oom").glob("*.json")]
    assert (report["step"], report["phase"], report["module"]) == (2, "forward", "compiled")
