"""Halving by pausing, compared with the same configurations trained to the end: the best found, and the steps it took.

    python benchmarks/sweep_asha.py [--trials N] [--seeds N] [--parallel N]

An MLP on digits for 27 epochs; random learning rates (log, 1e-4 to 1), widths (8 to 256) and weight decays. Each seed
draws its own configurations, and both sweeps of a seed have the same ones. Needs about 3 s per start of a job.
"""

import argparse
import csv
import subprocess
import sys
import tempfile
from pathlib import Path

from _common import machine, options_of, table

IMAGES = 360  # in the validation split
SPACE = (
    "optimizer.lr=tag(log,interval(1e-4,1))",
    "model.width=int(tag(log,interval(8,256)))",
    "optimizer.weight_decay=interval(0,0.3)",
)
JOB = ("model=mlp", "train.max_epochs=27", "train.device=cpu", "train.nonfinite=stop", "tracker=[]", "every.log=null")


def swept(folder: Path, options: argparse.Namespace, seed: int, pruner: str) -> list[dict[str, str]]:
    """The rows of a sweep's leaderboard.csv."""
    own = ("sweep.sampler=random", f"sweep.trials={options.trials}", f"sweep.seed={seed}", f"sweep.pruner={pruner}")
    own = (*own, f"sweep.parallel={options.parallel}", f"hydra.sweep.dir={folder}")
    subprocess.run([sys.executable, "-m", "trainapp", "-m", *JOB, *SPACE, *own], capture_output=True, check=False)
    with open(folder / "leaderboard.csv", newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    """Print a row per seed."""
    parser = options_of(__doc__, writes_json=False)
    parser.add_argument("--trials", type=int, default=27, help="configurations per sweep")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--parallel", type=int, default=2, help="jobs at a time")
    options = parser.parse_args()
    rows = []
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            whole, halved = (swept(Path(folder, name), options, seed, name) for name in ("none", "halving"))
        steps = [sum(int(row["steps"] or 0) for row in found) for found in (whole, halved)]
        best = [max(float(row["best_objective"] or 0) for row in found) for found in (whole, halved)]
        behind = f"{round((best[0] - best[1]) * IMAGES)}"
        rows.append(
            [str(seed), *(f"{value:.4f}" for value in best), behind, *map(str, steps), f"{steps[1] / steps[0]:.2f}"]
        )
        print(f"seed {seed} done", file=sys.stderr)
    print(f"{options.trials} configurations, {options.parallel} at a time; {machine()}\n")
    print(table(["seed", "best of all", "of halving", "images behind", "steps of all", "of halving", "ratio"], rows))


if __name__ == "__main__":
    main()
