"""Kill workers, or stop the run, at random moments and check that it ends as if nothing had happened.

    python benchmarks/soak.py --kills 50
    python benchmarks/soak.py --signals 40
    python benchmarks/soak.py --signals 4 --strategy compile

In a run over two ranks, random workers are killed (-9) at random moments, including while they start or save. Or the
run is stopped by SIGUSR1, SIGTERM or SIGINT at random moments, most in long evaluations, and continued by the same
command: no stop may lose a step, be late or end with another status. At the end the weights must equal those of an
undisturbed run bit for bit, and the log must hold every step exactly once: then no sample was lost or trained twice.
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from _common import options_of
from safetensors.torch import load_file

from trainapp.files import json_lines, json_object

JOB = [
    "model=gpt", "data=synthetic_tokens", "model.depth=2", "model.width=32", "model.dropout=0.1", "train.device=cpu",
    "train.max_epochs=null", "batch.global_size=13", "every.log=1",
]  # fmt: skip
RANKS = ["parallel.devices=2", "parallel.timeout=60"]
STRATEGIES = {"ddp": ["parallel=ddp", *RANKS], "fsdp": ["parallel=fsdp", *RANKS], "compile": ["train.compile=true"]}
FOR_KILLS = ["every.eval=null", "every.save=5"]
FOR_SIGNALS = [
    "every.eval=10", "every.save=null", "data.val_size=16384", "batch.eval_micro_size=4", "data.num_workers=1",
]  # fmt: skip
SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


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


def kill_workers(launcher: subprocess.Popen, kills: int, longest: float, generator: random.Random) -> int:
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


def stop(run: Path, settings: list[str], options: argparse.Namespace, generator: random.Random) -> bool:
    """Start the run, stop it at a random moment and print how it ended. Whether that was right."""
    output, result = run.with_suffix(".out"), run / "result.json"
    begins = output.stat().st_size if output.exists() else 0
    process = start(run, *settings)
    if generator.random() < 0.7:  # from the first step on: to start takes longest on a busy machine
        while process.poll() is None and b"global batch" not in output.read_bytes()[begins:]:
            time.sleep(0.1)
    time.sleep(generator.uniform(0.2, options.longest))
    number, sent = generator.choice(SIGNALS), time.monotonic()
    process.send_signal(number)
    status = process.wait(timeout=600)
    status = status if status >= 0 else 128 - status  # as in a shell
    seconds = time.monotonic() - sent
    was_heard = f"{number.name}: ".encode() in output.read_bytes()[begins:]
    stopped = (json_object(result).get("stopped") if was_heard else None) or {}
    saved = max((int(path.parent.name[-8:]) for path in run.glob("checkpoints/step_*/manifest.json")), default=0)
    lost = max((line["step"] for line in lines(run, "metrics")), default=0) - saved
    statuses = {75} if was_heard and saved else {75, 128 + number} if saved else {128 + number}
    is_late = "evaluation" in stopped.get("during", "") and stopped["seconds"] > options.within
    is_right = not lost and status in statuses and not is_late
    print(
        f"{'right' if is_right else 'WRONG'}: {number.name}, step {saved}, {lost} lost, status {status} of {statuses}, "
        f"ended after {seconds:.1f} s, {stopped or ('heard' if was_heard else 'not heard')}",
        flush=True,
    )
    return is_right


def finish(process: subprocess.Popen, run: Path) -> None:
    """Wait for the end of a run, which must be a good one."""
    if process.wait(timeout=3600):
        sys.exit(run.with_suffix(".out").read_text()[-2000:])


def exported(run: Path, folder: Path) -> dict:
    """The final weights of a run."""
    finish(start(folder, "mode=export", f"checkpointing.resume={run}"), folder)
    return load_file(folder / "export" / "model.safetensors")


def lines(run: Path, name: str) -> list[dict]:
    """The lines of a run's metrics or evaluations."""
    return json_lines(run / f"{name}.jsonl")


def main() -> None:
    """Print the outcome; exit with 1 if anything was lost."""
    parser = options_of(__doc__, writes_json=False)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--signals", type=int, default=0, help="stop the run this many times instead")
    parser.add_argument("--steps", type=int, help="default: 80 per kill; about 50 run between two. 2 per signal")
    parser.add_argument("--longest", type=float, help="maximum seconds between two kills (9), or from a start (40)")
    parser.add_argument("--within", type=float, default=2.0, help="seconds from a signal in an evaluation to saved")
    parser.add_argument("--strategy", default="fsdp", choices=STRATEGIES)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    wanted = options.signals or options.kills
    total = options.steps or wanted * (2 if options.signals else 80)
    options.longest = options.longest or (40.0 if options.signals else 9.0)
    common = [*STRATEGIES[options.strategy], f"train.max_steps={total}"]
    common += FOR_SIGNALS if options.signals else FOR_KILLS
    base = Path(tempfile.mkdtemp(prefix="soak-"))
    calm, rough = base / "calm", base / "rough"
    finish(start(calm, *common), calm)
    began = time.monotonic()
    if options.signals:
        generator = random.Random(options.seed)
        done = sum(stop(rough, common, options, generator) for _ in range(options.signals))
        finish(start(rough, *common), rough)
    else:
        run = start(rough, *common, f"parallel.max_restarts={options.kills + 5}")
        done = kill_workers(run, options.kills, options.longest, random.Random(options.seed))
        finish(run, rough)
    seconds = time.monotonic() - began

    logs = [lines(folder, "metrics") for folder in (calm, rough)]
    steps = [[entry["step"] for entry in log] for log in logs]
    samples = [log[-1]["samples"] for log in logs]
    losses = all(a["loss"] == b["loss"] for a, b in zip(*logs, strict=False))
    evaluations = lines(calm, "evaluations") == lines(rough, "evaluations")
    weights = [exported(folder, base / f"{folder.name}-weights") for folder in (calm, rough)]
    equal = all((weights[0][name] == weights[1][name]).all() for name in weights[0])
    missing = len(set(steps[0]) - set(steps[1]))
    repeated = len(steps[1]) - len(set(steps[1]))
    print(f"{'right stops' if options.signals else 'kills'} {done} of {wanted}, {total} steps, {seconds:.0f} s")
    print(f"steps lost {missing}, steps repeated {repeated}, samples {samples[1]} of {samples[0]}")
    print(f"equal bit for bit: losses {losses}, evaluations {evaluations}, weights {equal}")
    same = losses and evaluations and equal and samples[0] == samples[1]
    if done < wanted or missing or repeated or not same:
        sys.exit(1)


if __name__ == "__main__":
    main()
