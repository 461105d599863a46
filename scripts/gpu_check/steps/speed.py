"""Steps per second relative to a loop written by hand: benchmarks/overhead.py, with a synchronised clock."""

import dataclasses
from pathlib import Path

import overhead
from _common import quartiles

from ..table import Table

CASES = {"cuda": ("small", "wide", "gpt", "resnet"), "cpu": ("small", "gpt", "resnet")}
STEPS, ROUNDS = 50, {"cuda": 6, "cpu": 2}
CPU_WIDTHS = {"small": 16, "gpt": 16, "resnet": 4}


def check(table: Table, device: str, folder: Path) -> None:
    """One row per case. On the CPU only whether the loops do the same work: two short rounds say nothing of speed."""
    for name in CASES[device]:
        case = dataclasses.replace(overhead.CASES[name], device=device, steps=STEPS, rounds=ROUNDS[device])
        if device == "cpu":
            case = dataclasses.replace(case, settings=(*case.settings, f"model.width={CPU_WIDTHS[name]}"))
        title = f"{name}: steps/s, and the ratio to a loop written by hand"
        expected = f"a ratio of at least {case.target}" if device == "cuda" else "the same losses"
        with table.attempt(title, expected):
            found = overhead.measure(case, folder / name, only_trainapp=True)["trainapp"]
            low, ratio, high = quartiles(found["ratios"])
            got = f"{1 / quartiles(found['seconds'])[1]:.0f}, {ratio:.3f} ({low:.3f} to {high:.3f})"
            table.expect(title, expected, got, device == "cpu" or ratio >= case.target)
