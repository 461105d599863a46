"""Draws docs/images/recovery.png: a run in `other_trainers.py`, its memory and its micro-batches over the steps.

    python benchmarks/recovery_picture.py [--run DIRECTORY] [--to FILE]

Without --run, trains first (ten seconds on two cores). Any run with `every.log=1` will do: the picture is made of
metrics.jsonl, result.json and oom/*.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import other_trainers
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

HERE = Path(__file__).resolve().parent
PICTURE = HERE.parent / "docs/images/recovery.png"
MIB = other_trainers.MIB
BLUE, LIGHT, RED, GREEN = "#2f6db3", "#a9c7e8", "#c8372d", "#3a8a55"


def main() -> None:
    """Trains where no run is given, then draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, help="a run directory with a line in metrics.jsonl for every step")
    parser.add_argument("--to", type=Path, default=PICTURE)
    options = parser.parse_args()
    if options.run:
        draw(options.run, options.to)
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments = [*other_trainers.overrides(other_trainers.FULL), "every.log=1"]
        command = [sys.executable, "-m", "trainapp", *arguments, "train.device=cpu", f"hydra.run.dir={folder}/run"]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        subprocess.run(command, cwd=HERE, env=environment, check=True, stdout=subprocess.DEVNULL)
        draw(Path(folder, "run"), options.to)


def draw(run_dir: Path, path: Path) -> None:
    """Writes the picture of one run to `path`."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    errors = [json.loads(file.read_text()) for file in sorted((run_dir / "oom").glob("*.json"))]
    result = json.loads((run_dir / "result.json").read_text())
    figure = Figure(figsize=(8, 4.4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    memory, sizes = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    draw_memory(memory, lines, errors)
    draw_micro_batches(sizes, result, errors)
    figure.suptitle(
        f"{result['steps']} steps of {lines[-1]['batch/global_size']} samples, {len(errors)} out-of-memory errors, "
        f"{result['samples']} samples trained",
        fontsize=11,
    )
    figure.savefig(path)


def draw_memory(axes: Any, lines: list[dict[str, Any]], errors: list[dict[str, Any]]) -> None:
    """Bars: the peak of each step. Crosses: what its failed attempts would have needed at the least."""
    steps = [line["step"] for line in lines]
    limit = lines[-1]["memory/limit"] / MIB
    needed = [(error["used"] + error["requested"]) / MIB for error in errors]
    axes.bar(steps, [line["memory/peak"] / MIB for line in lines], color=LIGHT, label="peak of the step")
    axes.axhline(limit, color=RED, linewidth=1.2)
    axes.annotate(f"memory.limit={limit:.0f}MiB", (0.5, limit), (0, 4), textcoords="offset points", color=RED)
    failed = [error["step"] for error in errors]
    axes.plot(failed, needed, "x", color=RED, markeredgewidth=2, label="out of memory: rolled back")
    axes.set_ylabel("MiB")
    axes.set_ylim(0, 1.2 * max([limit, *needed]))
    finish(axes)


def draw_micro_batches(axes: Any, result: dict[str, Any], errors: list[dict[str, Any]]) -> None:
    """The size in force for each shape of data, and the sizes of the attempts that were rolled back."""
    plan = {int(step): sizes for step, sizes in result["micro_schedule"].items()}
    shapes = sorted({shape for sizes in plan.values() if isinstance(sizes, dict) for shape in sizes}, key=int)
    for shape, color in zip(shapes or [None], (GREEN, BLUE, "black"), strict=False):
        # A number holds for all shapes; before the first of its own, a shape has been met by no step.
        known = {s: v.get(shape) if isinstance(v, dict) else v for s, v in plan.items()}
        if shape != (shapes or [None])[0]:
            known = {s: v for s, v in known.items() if isinstance(plan[s], dict)}
        starts = sorted(step for step, size in known.items() if size is not None)
        values = [known[step] for step in starts]
        label = f"samples of up to {shape} numbers" if shape else "micro-batch"
        edges = [step - 0.5 for step in starts] + [result["steps"] + 0.5]
        axes.step(edges, [*values, values[-1]], where="post", color=color, linewidth=2, label=label)
        for edge, value, before in zip(edges, values, [None, *values], strict=False):
            if value != before:
                axes.annotate(str(value), (edge, value), (3, 4), textcoords="offset points", fontsize=9, color=color)
    axes.plot([e["step"] for e in errors], [e["old_size"] for e in errors], "x", color=RED, markeredgewidth=2)
    axes.set_ylabel("micro-batch")
    axes.set_xlabel("optimizer step")
    axes.set_ylim(0, 1.3 * max(e["old_size"] for e in errors))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    finish(axes)


def finish(axes: Any) -> None:
    """A legend outside, no frame above and to the right."""
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=9, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
