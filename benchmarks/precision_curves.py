"""Draws docs/images/precision_curves.png: gpt's loss with fewer bits in weights and moments, and prints where it ends.

    python benchmarks/precision_curves.py [--steps 300] [--width 32] [--to FILE]

Every run has the same data, initial weights and rate. `rounded to nearest` is not a setting of trainapp: it is what
`precision=bf16_pure` would be without rounding by chance. The final loss is the mean over the last fifth of the steps.
"""

import contextlib
import io
import logging
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from _common import options_of, table
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from trainapp.config import compose
from trainapp.files import json_lines
from trainapp.run import runner

PICTURE = Path(__file__).resolve().parent.parent / "docs/images/precision_curves.png"
COMMON = (
    *("model=gpt", "model.depth=2", "model.heads=2", "model.context_length=32", "model.dropout=0"),
    *("data=synthetic_tokens", "data.vocab_size=256", "data.size=4000", "data.val_size=40"),
    *("train.device=cpu", "train.max_epochs=null", "batch.global_size=16", "batch.micro_size=16"),
    *("every.log=1", "every.eval=null", "every.save=null", "checkpointing=off"),
    *("schedule=constant", "optimizer.lr=3e-4", "memory.guard=false"),
)
PURE = "precision=bf16_pure"
NEAREST = f"{PURE}, rounded to nearest"
RUNS = {
    "precision=fp32": ("optimizer=adamw",),
    f"{PURE} optimizer=adamw_bf16": (PURE, "optimizer=adamw_bf16"),
    f"{PURE} optimizer=adamw_8bit": (PURE, "optimizer=adamw_8bit"),
    f"{PURE} optimizer=adamw_4bit": (PURE, "optimizer=adamw_4bit"),
    NEAREST: (PURE, "optimizer=adamw_bf16"),
}


def main() -> None:
    """Trains every run, prints a table and draws."""
    parser = options_of(__doc__, writes_json=False)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--to", type=Path, default=PICTURE)
    options = parser.parse_args()
    logging.getLogger("trainapp").setLevel(logging.ERROR)
    curves = {name: losses(name, options.steps, options.width) for name in RUNS}
    print(report(curves))
    draw(curves, options.to)


def losses(name: str, steps: int, width: int) -> list[float]:
    """The loss of every step."""
    overrides = (*COMMON, f"train.max_steps={steps}", f"model.width={width}", *RUNS[name])
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        with to_nearest() if name == NEAREST else contextlib.nullcontext():
            runner.run(compose.from_command_line(overrides, folder))
        return [line["loss"] for line in json_lines(Path(folder, "metrics.jsonl"))]


@contextlib.contextmanager
def to_nearest() -> Iterator[None]:
    """Round weights and moments as torch does."""

    def copy(target: Tensor, source: Tensor, _: object) -> None:
        target.copy_(source)

    with mock.patch("trainapp.optim.low_precision.copy_rounded", copy):
        yield


def final(curve: list[float]) -> float:
    """The mean over the last fifth of the steps."""
    return statistics.fmean(curve[-max(1, len(curve) // 5) :])


def report(curves: dict[str, list[float]]) -> str:
    """One row per run."""
    reference = final(curves["precision=fp32"])
    rows = [[name, f"{final(curve):.4f}", f"{final(curve) / reference - 1:+.2%}"] for name, curve in curves.items()]
    return table(["run", "final loss", "against fp32"], rows)


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Writes the picture to `path`."""
    figure = Figure(figsize=(8, 4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, curve in curves.items():
        smooth = [statistics.fmean(curve[max(0, step - 9) : step + 1]) for step in range(len(curve))]
        axes.plot(range(1, len(curve) + 1), smooth, label=name, linestyle="--" if name == NEAREST else "-")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, mean of 10 steps")
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
