"""Steps per second relative to a loop written by hand: benchmarks/overhead.py, with a synchronised clock."""

import dataclasses
from pathlib import Path

import overhead
from _common import quartiles

from ..table import Table

CASES = {"cuda": ("small", "wide", "gpt", "resnet"), "cpu": ("small", "gpt", "resnet")}
STEPS, ROUNDS = {"cuda": 50, "cpu": 10}, {"cuda": 6, "cpu": 1}
CPU_SETTINGS = {
    "small": ("model.width=16",),
    "gpt": ("model.width=16", "model.depth=1", "model.context_length=16"),
    "resnet": ("model.width=4", "data.image_shape=[3,8,8]"),
}


def check(table: Table, device: str, folder: Path) -> None:
    """One row per case. On the CPU only whether the loops do the same work: one short round says nothing of speed."""
    for name in CASES[device]:
        case = dataclasses.replace(overhead.CASES[name], device=device, steps=STEPS[device], rounds=ROUNDS[device])
        if device == "cpu":
            tokens = 16 if name == "gpt" else 1
            case = dataclasses.replace(case, settings=(*case.settings, *CPU_SETTINGS[name]), counted=tokens)
        title = f"{name}: steps/s, and the ratio to a loop written by hand"
        if device == "cpu":
            title = f"{name}: the losses of a loop written by hand"
        expected = f"a ratio of at least {case.target}" if device == "cuda" else "the same"
        with table.attempt(title, expected):
            found = overhead.measure(case, folder / name, only_trainapp=True)["trainapp"]  # raises where they differ
            low, ratio, high = quartiles(found["ratios"])
            got = f"{1 / quartiles(found['seconds'])[1]:.0f}, {ratio:.3f} ({low:.3f} to {high:.3f})"
            if device == "cuda":
                table.expect(title, expected, got, ratio >= case.target)
            else:
                table.expect(title, expected, "the same", True)
