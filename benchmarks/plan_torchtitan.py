"""torchtitan's own program on 8 and on 128 GPUs, traced without one, against the memory that it has published.

    python benchmarks/plan_torchtitan.py CHECKOUT

CHECKOUT is github.com/pytorch/torchtitan (BSD 3-clause; commit 9dec370, of 2024-12-26). Its Llama 3.1 8B, selective
checkpointing and FSDP2 run as they are, with 2 texts of 8192 tokens per GPU; what its train.py does in a step is
repeated here. The published figures, of what is reserved, are those of that commit, in
benchmarks/llama3_h100_202412_torchtitan.md of later ones. Nothing is downloaded. The exit code is 1 if one is off by
more than 10%.
"""

import argparse
import contextlib
import sys
import types
from pathlib import Path
from typing import Any

from _common import machine, table
from plan_cuda import in_a_process

GIB = 2**30
TEXTS, LENGTH, VOCABULARY = 2, 8192, 128256
PUBLISHED = {8: 82.4, 128: 67.0}  # GiB reserved by number of GPUs; "FSDP", without torch.compile


def traced(checkout: Path, world: int) -> tuple[int, int]:
    """Bytes allocated and reserved at the peak of a warm step of that program's first rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from trainapp.planning.cuda import allocations, devices, place, pretend, self_test
    from trainapp.planning.ranks import EqualChunks
    from trainapp.planning.values import MadeUpValues
    from trainapp.torch_private import fake_tensor_mode, outside_dispatch_modes

    llama, parallelize = _program(checkout)
    dist.init_process_group("fake", rank=0, world_size=world)
    device = devices.find("h100-80gb")  # theirs have 96 GB, which changes no kernel
    pretend.give_autograd_a_device()
    with contextlib.ExitStack() as stack:
        stack.enter_context(pretend.pretended(device))
        stack.enter_context(fake_tensor_mode())
        stack.enter_context(MadeUpValues())
        with pretend.EngineOnCuda() as engine:
            self_test.require(device, engine)
        with outside_dispatch_modes():
            mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("dp",))
        settings = llama.llama3_configs["8B"]
        settings.vocab_size, settings.max_seq_len = VOCABULARY, LENGTH
        with torch.device("meta"):
            model = llama.Transformer.from_model_args(settings)
        parallelize.apply_ac(model, types.SimpleNamespace(mode="selective", selective_ac_option="op"))
        with EqualChunks():
            parallelize.apply_fsdp(model, mesh, torch.bfloat16, torch.float32, pp_enabled=False)
        counter = stack.enter_context(allocations.CountedByStream())
        stack.enter_context(pretend.EngineOnCuda())
        model.to_empty(device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
        for number in range(3):
            if number:
                counter.peak = counter.live
            inputs = torch.empty(TEXTS, LENGTH, dtype=torch.int64, device="cuda")
            targets = torch.empty_like(inputs)
            optimizer.zero_grad()
            logits = model(inputs)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))
            del logits
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
        workspaces = place.THREADS * device.cublas_workspace
        events = [(-1 - n, device.cublas_workspace) for n in range(place.THREADS)] + counter.events
        recorded = allocations.Allocations(workspaces, events, streams=counter.streams)
        return counter.peak + workspaces, recorded.replayed(expandable=True).peak_reserved


def _program(checkout: Path) -> tuple[Any, Any]:
    """torchtitan's model, and what makes it parallel. Its Triton kernels, which are not used here, need no Triton."""
    sys.path.insert(0, str(checkout))
    package = types.ModuleType("torchtitan.parallelisms")  # without what its `__init__` imports
    package.__path__ = [str(checkout / "torchtitan" / "parallelisms")]
    sys.modules[package.__name__] = package
    absent = {name: _Absent(name) for name in ("triton", "triton.language")}
    sys.modules.update(absent)
    from torchtitan.models import llama  # type: ignore[import-not-found]

    for name in absent:
        del sys.modules[name]  # torch asks whether it is there
    from torchtitan.parallelisms import parallelize_llama  # type: ignore[import-not-found]

    return llama, parallelize_llama


class _Absent(types.ModuleType):
    """Whose names are decorators, or arguments of decorators, that do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return args[0] if args and callable(args[0]) else lambda function: function


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="of github.com/pytorch/torchtitan, at commit 9dec370")
    checkout = parser.parse_args().checkout
    if not (checkout / "torchtitan" / "parallelisms").is_dir():
        parser.error(f"{checkout}: has no torchtitan/parallelisms, as commit 9dec370 has")
    print(f"{machine()}\n", flush=True)
    rows, worst = [], 0.0
    for world, real in PUBLISHED.items():
        allocated, reserved = in_a_process(traced, checkout, world)
        error = reserved / GIB / real - 1
        worst = max(worst, abs(error))
        rows.append((f"{world} GPUs", f"{real}", f"{allocated / GIB:.1f}", f"{reserved / GIB:.1f}", f"{error:+.1%}"))
    print(table(("GiB", "reserved", "allocated, predicted", "reserved, predicted", ""), rows), flush=True)
    sys.exit(worst > 0.1)


if __name__ == "__main__":
    main()
