"""Kill workers at random moments and check that the run ends as if nothing had happened.

    python benchmarks/soak.py --kills 50

In a run over two ranks, random workers are killed (-9) at random moments, including while they start or save. At the
end the weights must equal those of an undisturbed run bit for bit, and the log must hold every step exactly once: then
no sample was lost or trained twice.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from safetensors.torch import load_file

JOB = [
    "model=gpt", "data=synthetic_tokens", "model.depth=2", "model.width=32", "model.dropout=0.1", "train.device=cpu",
    "train.max_epochs=null", "batch.global_size=13", "every.log=1", "every.eval=null",
]  # fmt: skip


def start(folder: Path, *overrides: str) -> subprocess.Popen:
    """Start the real command line; its output goes to a file next to the run."""
    command = [sys.executable, "-m", "trainapp", *JOB, *overrides, f"hydra.run.dir={folder}"]
    with folder.with_suffix(".out").open("ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)


def workers(launcher: int) -> list[psutil.Process]:
    """The processes of the ranks; empty during a restart."""
    try:
        children = psutil.Process(launcher).children()
        return [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    except psutil.Error:
        return []


def disturb(launcher: subprocess.Popen, kills: int, longest: float, generator: random.Random) -> int:
    """Kill random workers at random moments, `kills` times or until the run ends. Returns the number of kills."""
    done = 0
    while done < kills and launcher.poll() is None:
        time.sleep(generator.uniform(0.2, longest))
        alive = workers(launcher.pid)
        if alive:
            try:
                generator.choice(alive).kill()
                done += 1
            except psutil.NoSuchProcess:
                continue
    return done


def exported(run: Path, folder: Path) -> dict:
    """The final weights of a run."""
    status = start(folder, "mode=export", f"checkpointing.resume={run}").wait(timeout=300)
    if status:
        sys.exit(f"export failed: {folder.with_suffix('.out').read_text()[-2000:]}")
    return load_file(folder / "export" / "model.safetensors")


def main() -> None:
    """Print the outcome; exit with 1 if anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, help="default: 80 per kill; about 50 run between two kills")
    parser.add_argument("--longest", type=float, default=9.0, help="maximum seconds between two kills")
    parser.add_argument("--strategy", default="fsdp", choices=["ddp", "fsdp"])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    total = options.steps or 80 * options.kills
    base = Path(tempfile.mkdtemp(prefix="soak-"))
    common = [f"parallel={options.strategy}", "parallel.devices=2", "parallel.timeout=60"]
    common += [f"train.max_steps={total}", "every.save=5"]

    calm, rough = base / "calm", base / "rough"
    if start(calm, *common).wait(timeout=3600):
        sys.exit(calm.with_suffix(".out").read_text()[-2000:])
    began = time.monotonic()
    run = start(rough, *common, f"parallel.max_restarts={options.kills + 5}")
    killed = disturb(run, options.kills, options.longest, random.Random(options.seed))
    if run.wait(timeout=3600):
        sys.exit(rough.with_suffix(".out").read_text()[-2000:])
    seconds = time.monotonic() - began

    logs = [[json.loads(line) for line in (folder / "metrics.jsonl").open()] for folder in (calm, rough)]
    steps = [[entry["step"] for entry in log] for log in logs]
    samples = [log[-1]["samples"] for log in logs]
    losses = all(a["loss"] == b["loss"] for a, b in zip(*logs, strict=False))
    weights = [exported(folder, base / f"{folder.name}-weights") for folder in (calm, rough)]
    equal = all((weights[0][name] == weights[1][name]).all() for name in weights[0])
    missing = len(set(steps[0]) - set(steps[1]))
    repeated = len(steps[1]) - len(set(steps[1]))
    print(f"kills {killed} of {options.kills}, {total} steps, {seconds:.0f} s")
    print(f"steps lost {missing}, steps repeated {repeated}, samples {samples[1]} of {samples[0]}")
    print(f"losses equal bit for bit: {losses}; weights equal bit for bit: {equal}")
    if killed < options.kills or missing or repeated or samples[0] != samples[1] or not losses or not equal:
        sys.exit(1)


if __name__ == "__main__":
    main()
