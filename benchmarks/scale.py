"""The cost of a large data set: time and memory until the first step, and per step, by number of samples.

    python benchmarks/scale.py [--sizes 1000 100000 10000000 1000000000] [--runs 3] [--json FILE]

The first table is the order of an epoch alone, each size in a process of its own: until the samples of the first step
are known, per step of 64 samples from the middle of the epoch on, and until the first evaluation batch. "list" is the
order as a Python list, which is left out where it would take more than 3 GB. The second table is a whole run of three
steps of `python -m trainapp`, with generated images.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time

from _common import machine, options_of, quartiles, table, write

MOST_LISTED = 5 * 10**7
STEPS = 2000
RUN = (
    "model=mlp", "model.width=16", "data=synthetic_images", "data.image_shape=[1,4,4]", "train.device=cpu",
    "train.max_steps=3", "train.max_epochs=null", "every.eval=null", "checkpointing=off",
)  # fmt: skip


def main() -> None:
    """Measure and print the tables."""
    parser = options_of(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**3, 10**5, 10**7, 10**9], help="samples")
    parser.add_argument("--runs", type=int, default=3, help="repetitions; the tables have medians")
    parser.add_argument("--child", choices=("order", "list"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps((ordered if options.child == "order" else listed)(options.sizes[0])))
        return
    print(f"{machine()}; median of {options.runs} run(s)\n")
    orders = {size: [child("order", size) for _ in range(options.runs)] for size in options.sizes}
    lists = {size: [child("list", size) for _ in range(options.runs)] for size in options.sizes if size <= MOST_LISTED}
    rows = []
    for size in options.sizes:
        cells = [f"{median(orders[size], name):.3g}" for name in ("first", "step", "evaluation", "memory")]
        before = [f"{median(lists[size], name):.3g}" for name in ("first", "memory")] if size in lists else ["", ""]
        rows.append([f"{size:.0e}", *cells, *before])
    header = ["samples", "first step, ms", "per step, us", "first eval. batch, ms", "MiB", "list: ms", "list: MiB"]
    print(table(header, rows), "\n")
    whole = {size: [run(size) for _ in range(options.runs)] for size in options.sizes}
    rows = [[f"{size:.0e}", *(f"{median(found, name):.4g}" for name in ("seconds", "memory"))]
            for size, found in whole.items()]  # fmt: skip
    print(table(["a run of 3 steps, samples", "seconds", "peak MiB"], rows))
    write(options.json, {"orders": orders, "lists": lists, "runs": whole})


def median(found: list[dict[str, float]], name: str) -> float:
    """Of one measurement over the repetitions."""
    return quartiles([one[name] for one in found])[1]


def child(kind: str, size: int) -> dict[str, float]:
    """What a process of its own measures."""
    command = [sys.executable, __file__, "--child", kind, "--sizes", str(size)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def peak_mib() -> float:
    """The highest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


class Virtual:
    """So many samples, none of which exists."""

    in_memory = True

    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def ordered(size: int) -> dict[str, float]:
    """The application's sampler."""
    import torch

    from trainapp.data.eval_batches import EvalBatches
    from trainapp.data.progress import Progress
    from trainapp.data.train_batches import TrainBatches
    from trainapp.parallel.ranks import SingleRank

    before, started = peak_mib(), time.perf_counter()
    arguments = {"seed": 0, "device": torch.device("cpu")}
    batches, progress = TrainBatches(Virtual(size), global_size=64, **arguments), Progress()
    batches.share(progress)
    first = time.perf_counter() - started
    progress.consumed = size // 2 // 64 * 64
    started = time.perf_counter()
    for _ in range(STEPS):
        batches.share(progress)
        batches.advance(progress)
    step = (time.perf_counter() - started) / STEPS
    started = time.perf_counter()
    next(EvalBatches(Virtual(size), **arguments).from_sample(0, 64, SingleRank()))
    evaluation = time.perf_counter() - started
    return {"first": first * 1e3, "step": step * 1e6, "evaluation": evaluation * 1e3, "memory": peak_mib() - before}


def listed(size: int) -> dict[str, float]:
    """The order of an epoch as a list, as most samplers have it."""
    import torch

    before, started = peak_mib(), time.perf_counter()
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0)).tolist()
    first = time.perf_counter() - started
    assert len(order) == size
    return {"first": first * 1e3, "memory": peak_mib() - before}


def run(size: int) -> dict[str, float]:
    """Three steps of the application."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        command = [sys.executable, "-m", "trainapp", *RUN, f"data.size={size}", f"hydra.run.dir={folder}/run"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"the run with {size} samples ended with exit code {process.returncode}")
        memory = usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
        return {"seconds": time.perf_counter() - started, "memory": memory}


if __name__ == "__main__":
    main()
