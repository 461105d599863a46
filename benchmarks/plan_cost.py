"""What a plan of large shapes costs: processor time and memory of the planner's process.

    python benchmarks/plan_cost.py [--world N] [--device NAME] [--only TEXT]

GPTs of the shapes of an 8B and a 70B language model, context 8192, on N ranks (512) of FSDP, HSDP and DDP, with one
text per rank, bf16 and full activation checkpointing. `trace`: a step and an evaluation, once. `plan`: `mode=plan` with
a given size, which searches for the largest one, too. Memory is the growth of the process's peak over what it has once
everything is imported. --device: the same on CUDA tensors of a device that is not here.
"""

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from _common import machine, table

BASE = (
    "train.max_epochs=null", "train.max_steps=3", "every.save=null", "checkpointing=off",
    "precision=bf16", "activation_checkpointing=full", "model=gpt", "model.context_length=8192",
    "data=synthetic_tokens", "data.vocab_size=128256", "memory.limit=null",
)  # fmt: skip
SHAPES = {
    "8B": ("model.depth=32", "model.width=4096", "model.heads=32"),
    "70B": ("model.depth=80", "model.width=8192", "model.heads=64"),
}


def overrides(shape: str, spread: str, world: int, device: str = "") -> list[str]:
    """The configuration: one text per rank, in training and in evaluation. device: see `plan.device`; "" is the CPU."""
    data = (f"batch.global_size={world}", f"data.size={world}", f"data.val_size={world}")
    sizes = ("batch.micro_size=1", "batch.eval_micro_size=1")
    place = (f"plan.device={device}", "plan.levers=false") if device else ("train.device=cpu",)
    return [*BASE, *SHAPES[shape], *data, *sizes, *place, f"parallel={spread}", f"plan.world={world}"]


def measure(what: str, settings: Sequence[str]) -> dict[str, Any]:
    """Processor seconds, memory above the imports, and the plan. In this process, which is used for nothing else."""
    from torch.distributed.fsdp import fully_shard  # noqa: F401  # a part of the imports

    from trainapp.assembly.components import load_components
    from trainapp.config import compose
    from trainapp.planning import planner, ranks, sizes
    from trainapp.planning.cuda import planner as cuda_planner
    from trainapp.torch_private import fake_tensor_mode

    fake_tensor_mode()
    config = compose.from_command_line(settings)
    gc.freeze()  # as `plan.process` does
    before, peak = _seconds(), _peak()
    if what == "plan":
        facts = planner.plan(config)[0]
    else:
        if config.plan.device is None:
            plans = sizes.Planner(config, load_components(config))
        else:
            plans = cuda_planner.for_device(config, load_components)
        rank = ranks.highest_ranks(plans.world, plans.shards, config.batch.global_size)[0]
        facts = {
            "peak_bytes": plans.at_rank(rank, 1, 1).peak.total,
            "traces": plans.traces,
        }
    return {
        "processor_seconds": _seconds() - before,
        "memory_bytes": _peak() - peak,
        "peak_bytes": facts.get("peak_bytes"),
        "certainty": facts.get("certainty", ""),
        "reason": facts.get("reason", ""),
        "traces": facts.get("traces"),
    }


def in_child(what: str, settings: Sequence[str]) -> dict[str, Any]:
    """`measure` in a new process."""
    command = [sys.executable, __file__, "--child", what, *settings]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def main() -> None:
    """Print one row per shape, strategy and kind of work."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=512, help="ranks")
    parser.add_argument("--device", default="", help="a device as in plan.device, such as h100-80gb; else the CPU")
    parser.add_argument("--only", default="", help="rows with this text in their name, such as 70B fsdp trace")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child[0], options.child[1:])), flush=True)
        os._exit(0)
    rows = []
    for shape in SHAPES:
        for spread in ("fsdp", "hsdp", "ddp"):
            for what in ("trace", "plan"):
                if options.only not in f"{shape} {spread} {what}":
                    continue
                found = in_child(what, overrides(shape, spread, options.world, options.device))
                size = "-" if found["peak_bytes"] is None else f"{found['peak_bytes'] / 2**30:.2f}"
                seconds, memory = f"{found['processor_seconds']:.1f}", f"{found['memory_bytes'] / 2**20:.0f}"
                rows.append([shape, spread, what, str(found["traces"]), seconds, memory, size, found["reason"]])
    print(machine())
    columns = ["shape", "strategy", "what", "traces", "processor s", "MiB above imports", "planned peak GiB", ""]
    print(table(columns, rows))


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
