"""Startup time: --help, --cfg job, and until the first optimizer step ends.

    python benchmarks/startup.py [--runs 7] [--json FILE]

The first step of `python -m trainapp model=mlp` is compared with a script that imports torch, builds the same model and
runs one step. Times are from the start of the process to the line it prints; the commands take turns. The last table
breaks the difference down, from one run of each with `-X importtime`, which makes imports a little slower.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from _common import machine, options_of, quartiles, table, write

APP = ("-m", "trainapp")
# every.log=1: the first step ends with the line that `until` waits for.
FIRST_STEP = ("model=mlp", "train.device=cpu", "train.max_steps=1", "train.max_epochs=null", "every.log=1")
BARE = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
loss = nn.functional.cross_entropy(model(torch.randn(64, 64)), torch.randint(10, (64,)))
loss.backward()
nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
print("step 1", flush=True)
"""


def main() -> None:
    """Measure and print the tables."""
    parser = options_of(__doc__)
    parser.add_argument("--runs", type=int, default=7, help="runs per command, after one that warms the disk cache")
    options = parser.parse_args()
    print(f"{machine()}; median of {options.runs} run(s)\n")
    with tempfile.TemporaryDirectory() as folder:
        light = {"--help": (*APP, "--help"), "--cfg job": (*APP, "--cfg", "job")}
        seconds = measure({name: (command, None) for name, command in light.items()}, options.runs, folder)
        rows = []
        for name, command in light.items():
            imported = import_times(command, None, folder)[1]
            found = f"{quartiles(seconds[name])[1]:.2f}"
            rows.append([f"trainapp {name}", found, "yes" if "torch" in imported else "no"])
        print(table(["command", "seconds", "imports torch"], rows))
        print("target: at most 1 s, without torch\n")
        first = {"bare script": (("-c", BARE), "step 1"), "trainapp model=mlp": ((*APP, *FIRST_STEP), "step 1/")}
        walls = measure(first, options.runs, folder)
        bare, app = walls.values()
        walls["difference"] = [slow - fast for slow, fast in zip(app, bare, strict=True)]
        rows = [[name, *(f"{value:.2f}" for value in quartiles(found))] for name, found in walls.items()]
        print(table(["until the first step ends, s", "lower quartile", "median", "upper quartile"], rows))
        print("target: a difference of at most 1 s\n")
        seconds |= walls
        print(table(["part of the difference", "ms"], breakdown(folder)))
    write(options.json, seconds)


def measure(commands: dict[str, tuple[Sequence[str], str | None]], runs: int, folder: str) -> dict[str, list[float]]:
    """Seconds of each run of each command, until its line (None: until it ends). Commands take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(runs + 1):
        for name, (command, line) in commands.items():
            elapsed, _ = until(command, line, folder)
            if number:
                seconds[name].append(elapsed)
    return seconds


def until(command: Sequence[str], line: str | None, folder: str) -> tuple[float, str]:
    """Seconds from the start of the process to the first line that starts with `line`, and its output.

    The process is then killed. Raises RuntimeError if it fails, or ends without printing the line.
    """
    out = Path(tempfile.mkdtemp(dir=folder))
    arguments = [f"hydra.run.dir={out}"] if line and "trainapp" in command else []
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=os.environ | {"TRAINAPP_CACHE": str(out / "cache")},
    )
    printed, found = [], False
    for text in process.stdout:
        printed.append(text)
        if line and text.startswith(line):
            found = True
            process.kill()
            break
    elapsed = time.perf_counter() - started
    process.wait()
    process.stdout.close()
    if not found and (process.returncode or line):
        raise RuntimeError(f"python {' '.join(command)} failed:\n{''.join(printed)}")
    return elapsed, "".join(printed)


def import_times(command: Sequence[str], line: str | None, folder: str) -> tuple[float, dict[str, float]]:
    """Seconds until the line, and the self time of each imported module in seconds."""
    elapsed, printed = until(("-X", "importtime", *command), line, folder)
    found = re.findall(r"^import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)$", printed, re.MULTILINE)
    return elapsed, {name: int(microseconds) / 1e6 for microseconds, name in found}


def breakdown(folder: str) -> list[list[str]]:
    """Table rows for what trainapp does beyond the bare script: imports by package, and the rest."""
    bare_total, bare = import_times(("-c", BARE), "step 1", folder)
    total, app = import_times((*APP, *FIRST_STEP), "step 1/", folder)
    packages: Counter[str] = Counter()
    for name, seconds in app.items():
        if name not in bare:
            packages[_package(name)] += seconds
    rows = [[f"import {name}", f"{1000 * seconds:.0f}"] for name, seconds in packages.most_common(12)]
    others = sum(packages.values()) - sum(seconds for _, seconds in packages.most_common(12))
    rows.append(["other imports", f"{1000 * others:.0f}"])
    slower = sum(seconds - bare[name] for name, seconds in app.items() if name in bare)
    rows.append(["the same modules, slower or faster", f"{1000 * slower:.0f}"])
    work = (total - sum(app.values())) - (bare_total - sum(bare.values()))
    rows.append(["work: composing, validating, building, the step", f"{1000 * work:.0f}"])
    return rows


def _package(module: str) -> str:
    """The row of a module: its package, but torch is split by subpackage."""
    return ".".join(module.split(".")[: 2 if module.startswith("torch.") else 1])


if __name__ == "__main__":
    main()
