"""Where torch's fake kernels need other memory than the CPU's: torch's own samples of operators and modules, both ways.

    python benchmarks/fake_kernels.py [--only TEXT] [--samples N] [--part K/N] [--json FILE]

Each sample goes forward and backward twice, on real tensors and on tensors without data as a plan traces them. This
compares the highest live bytes, and the bytes of each operation's results. Needs the package expecttest, which the
tests of torch import.
"""

import argparse
import collections
import contextlib
import itertools
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _common import table
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from trainapp.memory.live_tensors import LiveTensors
from trainapp.planning.values import MadeUpValues
from trainapp.torch_private import fake_tensor_mode

Operations = list[tuple[str, int]]  # names, and the bytes of their results


class Recorder(LiveTensors):
    """Also lists the operations that allocate."""

    def __init__(self) -> None:
        super().__init__(devices=None)
        self.operations: Operations = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._number
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self._number > before:
            added = sum(size for number, size in self.events if number > before and size > 0)
            self.operations.append((str(func), added))
        return result


def recorded(function: Callable[[], Any], inputs: Any) -> Recorder:
    """A forward and backward of `function`."""
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    for leaf in leaves:
        leaf.grad = None
    with Recorder() as recorder:
        results = [r for r in tree_leaves(function()) if isinstance(r, Tensor) and r.requires_grad]
        if results:
            torch.autograd.backward(results, [torch.ones_like(r) for r in results])
        del results
    for leaf in leaves:
        leaf.grad = None
    return recorder


def operators(most: int) -> Iterator[tuple[str, torch.dtype, Callable[[Any], Any], Any]]:
    """Name, dtype, function and inputs."""
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        for dtype in (torch.float32, torch.bfloat16):
            if dtype not in info.supported_dtypes("cpu"):
                continue
            grad = info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
            samples: Any = []
            with contextlib.suppress(Exception):
                samples = list(itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=grad), most))
            for sample in samples:
                inputs = (sample.input, sample.args, sample.kwargs)
                yield info.full_name, dtype, lambda given, op=info.op: op(given[0], *given[1], **given[2]), inputs


def modules(most: int) -> Iterator[tuple[str, torch.dtype, Callable[[Any], Any], Any]]:
    """The same of torch's modules, whose parameters are fp32 or bf16."""
    from torch.func import functional_call
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        for dtype in (torch.float32, torch.bfloat16):
            samples: Any = []
            with contextlib.suppress(Exception):
                given = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=True)
                samples = list(itertools.islice(given, most))
            for sample in samples:
                with contextlib.suppress(Exception):
                    built = sample.constructor_input
                    module = info.module_cls(*built.args, **built.kwargs).to(dtype)
                    state = dict(module.named_parameters()) | dict(module.named_buffers())
                    inputs = (state, sample.forward_input.args, sample.forward_input.kwargs)

                    def call(given: Any, module: torch.nn.Module = module) -> Any:
                        return functional_call(module, given[0], given[1], given[2])

                    yield f"module {info.name}", dtype, call, inputs


def compared(function: Callable[[Any], Any], inputs: Any) -> tuple[int, int, list[str], list[str]] | None:
    """Real and fake peak, and the operations that only one of them has; None where the real one fails."""
    try:
        real = recorded(lambda: function(inputs), inputs)
    except Exception:
        return None
    with fake_tensor_mode() as mode, MadeUpValues():
        unreal = tree_map(lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, inputs)
        fake = recorded(lambda: function(unreal), unreal)
    ours, theirs = collections.Counter(real.operations), collections.Counter(fake.operations)
    only = [f"{name} {size}" for name, size in (ours - theirs).elements()]
    return real.peak, fake.peak, only, [f"{name} {size}" for name, size in (theirs - ours).elements()]


def main() -> None:
    """Print where the peaks differ, and where the trace fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names with this text in them")
    parser.add_argument("--samples", type=int, default=4, help="of each operator and dtype")
    parser.add_argument("--part", default="1/1", help="every N-th sample, from the K-th")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    part, parts = map(int, options.part.split("/"))
    try:
        everything = itertools.chain(modules(options.samples), operators(options.samples))
        chosen = [one for one in everything if options.only in one[0]][part - 1 :: parts]
    except ImportError as error:
        sys.exit(f"{error}: pip install expecttest")
    found, failed, count = [], collections.Counter(), 0
    for name, dtype, function, inputs in chosen:
        try:
            both = compared(function, inputs)
        except Exception as error:
            failed[name, type(error).__name__] += 1
            continue
        count += both is not None
        if both is not None and both[0] != both[1]:
            found.append((name, str(dtype).removeprefix("torch."), *both))
    print(f"{count} samples, {len(found)} with another peak, {sum(failed.values())} not traceable")
    rows = [[n, d, str(r), str(f), "; ".join(a)[:150], "; ".join(b)[:150]] for n, d, r, f, a, b in found]
    print(table(["sample", "dtype", "real", "traced", "only real", "only traced"], rows))
    print(table(["not traceable", "error", "samples"], [[*key, str(value)] for key, value in sorted(failed.items())]))
    if options.json:
        options.json.write_text(json.dumps({"differ": found, "failed": sorted(failed)}, indent=1))


if __name__ == "__main__":
    main()
