"""Shared by the benchmarks: options, statistics over repeated measurements, tables, a description of the machine."""

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def options_of(page: str, writes_json: bool = True) -> argparse.ArgumentParser:
    """A parser of options. page: the script's docstring. writes_json: whether the script calls `write`."""
    parser = argparse.ArgumentParser(description=page.splitlines()[0])
    if writes_json:
        parser.add_argument("--json", type=Path, help="also write all figures to this file")
    return parser


def write(path: Path | None, found: Any) -> None:
    """Write the figures, if `--json` asks for them."""
    if path:
        path.write_text(json.dumps(found, indent=1) + "\n")


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile; a single value is returned three times."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def ratios(seconds: dict[str, list[float]], name: str) -> list[float]:
    """Steps per second relative to the reference, the first, by round."""
    return [reference / own for reference, own in zip(next(iter(seconds.values())), seconds[name], strict=True)]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, first column left-aligned, the others right-aligned, padded for the terminal."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(cells[1:], widths[1:], strict=True))]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (w + 1) + ":" for w in widths[1:])]) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])


def machine() -> str:
    """Processor, cores, load and Python version, for the line above a table."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{platform.machine()}, {cores} cores{load}, Python {platform.python_version()}"


def keep_freed_memory() -> None:
    """Re-execute with a malloc that keeps freed memory, if malloc is glibc's.

    What takes turns in a process shares its heap, and otherwise their order decides which one pays for the pages of
    freed memory: in `overhead.py` one loop took 6000 to 8000 page faults per step and another few, and equal work
    seemed 1.3 times as fast.
    """
    settings = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
    if sys.platform == "linux" and not settings.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **settings})
