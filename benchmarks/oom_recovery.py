"""What a search for the micro-batch costs and finds: 12 pairs of a model and a limit, and one far from its start.

    python benchmarks/oom_recovery.py [--only TEXT] [--json FILE]

A run starts with its whole global batch as micro-batch, under a limit that a known share of it fits: it lies between
the peaks of steps of three such micro-batches and of three with one sample more, exact on the CPU. The models are
large enough that a sample costs about the same in a small micro-batch. Printed are the size at which the search ends,
the attempts that failed, and the time in relation to the same run without the limit plus its failed attempts. The exit
code is 1 where a size is below 95% of the largest (below 20 samples: more than one less), more than 4 attempts failed
(6 where 1/64 fits), or a process was started.
"""

import contextlib
import json
import logging
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import machine, options_of, table, write

STEPS = 40
BASE = (
    "train.device=cpu", "train.max_epochs=null", "every.log=null", "every.eval=null", "every.save=null",
    "checkpointing=off", "memory.guard=false", "tracker=[]",
)  # fmt: skip
MODELS = {
    "mlp": ("model=mlp", "data=digits", "model.width=512", "batch.global_size=512"),
    "gpt": (
        "model=gpt", "model.depth=2", "model.width=64", "model.context_length=64", "data=synthetic_tokens",
        "data.vocab_size=256", "data.size=512", "batch.global_size=160",
    ),
    "resnet": ("model=resnet", "model.width=32", "model.norm=group", "data=digits", "batch.global_size=192"),
    "vit": (
        "model=vit", "model.width=96", "model.heads=3", "model.depth=2", "data=digits", "batch.global_size=128",
    ),
}  # fmt: skip
PAIRS = [(name, part) for name in MODELS for part in (2, 4, 8)] + [("mlp", 64)]
PROCESSES = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system")
STARTED: list[str] = []  # processes, by the event that told of them


def main() -> None:
    """Print one row per pair."""
    parser = options_of(__doc__)
    parser.add_argument("--only", default="", help="models with this text in their name")
    options = parser.parse_args()
    sys.addaudithook(lambda event, _: STARTED.append(event) if event in PROCESSES else None)
    found = []
    for name, part in PAIRS:
        if options.only in name:
            found.append(pair(name, part))
            print(found[-1], file=sys.stderr, flush=True)
    print(f"{STEPS} steps; {machine()}:\n\n{report(found)}")
    ratio = statistics.median(row["ratio"] for row in found)
    print(f"\nmedian ratio of the times {ratio:.3f} (target: at most 1.10)")
    write(options.json, found)
    sys.exit(int(not all(is_good(row) for row in found)))


def pair(name: str, part: int) -> dict[str, Any]:
    """One model, under a limit that 1/part of its first size fits."""
    overrides = (*MODELS[name], *(("batch.global_size=2048",) if part == 64 else ()))
    first = int(overrides[-1].partition("=")[2])
    largest = first // part
    peaks = []
    for size in (largest, largest + 1):
        sizes = f"batch.global_size={3 * size}", f"batch.micro_size={size}"
        peaks.append(run(*overrides, *sizes, "train.max_steps=3")[0].peak_memory_bytes)
    assert peaks[0] < peaks[1], "the limit would not tell the two apart"
    steps = f"train.max_steps={STEPS}"
    free, free_seconds = run(*overrides, steps)[:2]
    STARTED.clear()
    searched, seconds, retried = run(*overrides, steps, f"memory.limit={sum(peaks) // 2}")
    return {
        "model": name,
        "first": first,
        "largest": largest,
        "found": searched.micro_size,
        "errors": searched.oom_restarts,
        "processes": len(STARTED),
        "settled": max(map(int, searched.micro_schedule)),
        "same": searched.samples == free.samples,
        "ratio": seconds / (free_seconds + retried),
    }


def run(*overrides: str) -> tuple[Any, float, float]:
    """The result of a run, its seconds, and those of its failed attempts. Pictures of errors are left out: each takes
    half a second when the run ends.
    """
    from trainapp.config import compose
    from trainapp.run import runner
    from trainapp.tracking.tracker import Tracker

    logging.disable(logging.WARNING)
    Tracker.queue_picture = lambda *_: None
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        config = compose.from_command_line([*BASE, *overrides], folder)
        started = time.monotonic()
        result = runner.run(config)
        seconds = time.monotonic() - started
        reports = [json.loads(path.read_text()) for path in Path(folder).glob("oom/*.json")]
    return result, seconds, sum(report["seconds_lost"] for report in reports)


def is_good(row: dict[str, Any]) -> bool:
    """Whether the row is as docs/oom.md says."""
    least = row["largest"] - 1 if row["largest"] < 20 else math.ceil(0.95 * row["largest"])
    most = 6 if row["first"] >= 64 * row["largest"] else 4
    return row["found"] >= least and row["errors"] <= most and not row["processes"] and row["same"]


def report(found: list[dict[str, Any]]) -> str:
    """The table, as Markdown."""
    header = ["model", "first size", "largest that fits", "found", "failed", "last change in step", "time", "as said"]
    return table(header, [
        [
            row["model"], str(row["first"]), str(row["largest"]), f"{row['found']}", str(row["errors"]),
            str(row["settled"]), f"x {row['ratio']:.2f}", "yes" if is_good(row) else "no",
        ]
        for row in found
    ])  # fmt: skip


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
