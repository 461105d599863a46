"""Kills sweeps at random moments, and compares what they end with to an undisturbed one.

    python benchmarks/sweep_soak.py [--kills N] [--seed N] [--sweep grid|random|tpe|halving]

Each time, SIGKILL goes to a job, to the sweep itself, to one of a job's two ranks (grid only), or to everything at
once; then `trainapp continue` follows. At the end configurations, losses and evaluations must be the same to the bit,
and no trial may be missing or have run to its end twice.
"""

import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from _common import machine, options_of

from trainapp.files import json_lines

JOB = (
    *("model=mlp", "model.width=8", "train.device=cpu", "tracker=[]", "train.max_epochs=null", "train.max_steps=300"),
    *("every.log=10", "every.eval=100", "every.save=50", "oom.grow=false"),
)
RATES = "optimizer.lr=tag(log,interval(1e-4,1e-1))"
SWEEPS = {
    "grid": ("train.seed=0,1,2,3,4,5", "sweep.parallel=2", "parallel=ddp", "parallel.devices=2"),
    "random": (RATES, "sweep.sampler=random", "sweep.trials=8", "sweep.parallel=2"),
    "tpe": (RATES, "sweep.sampler=tpe", "sweep.trials=14"),
    "halving": (
        RATES,
        "sweep.sampler=random",
        "sweep.trials=8",
        "sweep.pruner=halving",
        "sweep.eta=2",
        "sweep.rungs=1",
    ),
}


def start(*arguments: str) -> subprocess.Popen:
    """The command line."""
    return subprocess.Popen([sys.executable, "-m", "trainapp", *arguments], stdout=subprocess.DEVNULL)


def jobs_of(folder: Path) -> list[psutil.Process]:
    """The processes of the sweep's jobs, their ranks included."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TRAINAPP_SWEEP_JOB", "").startswith(str(folder)):
                found.append(process)
        except psutil.Error:
            continue
    return found


def outcome(folder: Path) -> dict[str, Any]:
    """What a sweep has ended with: by trial its values, state, losses and evaluations."""
    journal, found = json_lines(folder / "sweep.jsonl"), {}
    states = {line["number"]: line["state"] for line in journal if line["event"] == "end"}
    for line in (own for own in journal if own["event"] == "trial"):
        run = folder / str(line["number"])
        losses = [own["loss"] for own in json_lines(run / "metrics.jsonl")]
        found[str(line["values"])] = (states[line["number"]], losses, json_lines(run / "evaluations.jsonl"))
    return found


def main() -> None:
    """Print what was killed, and whether the sweep ended as the undisturbed one. Exit status 1 if not."""
    parser = options_of(__doc__, writes_json=False)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sweep", choices=SWEEPS, default="grid")
    options = parser.parse_args()
    rng, given, killed = random.Random(options.seed), ("-m", *JOB, *SWEEPS[options.sweep]), Counter()
    with tempfile.TemporaryDirectory() as place:
        undisturbed, folder = Path(place, "undisturbed").resolve(), Path(place, "killed").resolve()
        start(*given, f"hydra.sweep.dir={undisturbed}").wait()
        sweep = start(*given, f"hydra.sweep.dir={folder}")
        while sum(killed.values()) < options.kills:
            time.sleep(rng.uniform(1.0, 9.0))
            jobs = jobs_of(folder)
            what = rng.choice(("job", "sweep", "everything"))
            targets = {"job": jobs and [rng.choice(jobs)], "sweep": [], "everything": jobs}[what]
            for process in [*targets, *([sweep] if what != "job" else [])]:
                process.kill()
            killed[what] += 1
            if sweep.poll() is not None or what != "job":
                sweep.wait()
                has_begun = (folder / "sweep.jsonl").exists()
                sweep = start("continue", str(folder)) if has_begun else start(*given, f"hydra.sweep.dir={folder}")
        status = sweep.wait()
        while status == 75:  # killed jobs are to be continued
            status = start("continue", str(folder)).wait()
        same = outcome(folder) == outcome(undisturbed)
        ends = Counter(own["number"] for own in json_lines(folder / "sweep.jsonl") if own.get("state") == "finished")
    print(f"{options.sweep}: {dict(killed)}; {machine()}")
    print(f"status {status}; {len(ends)} finished, {sum(ends.values()) - len(ends)} twice; as undisturbed: {same}")
    sys.exit(int(not same or status != 0 or max(ends.values()) > 1))


if __name__ == "__main__":
    main()
