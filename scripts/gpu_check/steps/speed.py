"""benchmarks/overhead.py: steps per second relative to a loop written by hand, with a synchronised clock."""

import json
import subprocess
import sys
from pathlib import Path

import _common
import overhead

from ..table import Table

# (steps per round, rounds); on the CPU only whether it runs can be shown
ROUNDS = {"cuda": ("50", "8"), "cpu": ("50", "2")}
CASES = {"cuda": ("small", "wide", "gpt", "resnet"), "cpu": ("small", "gpt", "resnet")}
CPU_WIDTHS = {"small": 16, "gpt": 16, "resnet": 4}


def check(table: Table, device: str, folder: Path) -> None:
    """One row per case. On the CPU, whose other load nobody controls, the ratio is only reported."""
    steps, rounds = ROUNDS[device]
    script = str(Path(overhead.__file__))
    for case in CASES[device]:
        file = folder / f"{case}.json"
        options = ["--device", device, "--steps", steps, "--rounds", rounds, "--only-trainapp", "--json", str(file)]
        target = overhead.CASES[case].target
        name, expected = f"{overhead.CASES[case].about}: ratio to a loop written by hand", f"at least {target}"
        with table.attempt(name, expected if device == "cuda" else "the same losses"):
            width = ("--width", str(CPU_WIDTHS[case])) if device == "cpu" else ()
            subprocess.run([sys.executable, script, "--cases", case, *options, *width], check=True)
            one = json.loads(file.read_text())[case]["trainapp"]
            low, ratio, high = _common.quartiles(one["ratios"])
            speed = 1 / _common.quartiles(one["seconds"])[1]
            got = f"{ratio:.3f} ({low:.3f} to {high:.3f}), {speed:.0f} steps/s"
            if device == "cuda":
                table.expect(name, expected, got, ratio >= target)
            else:
                table.expect(name, "the same losses", got, True)
