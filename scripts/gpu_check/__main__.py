"""The command: runs the steps one after another, each in a process with a time limit, and writes the page."""

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from .page import Findings, Outcome, Step
from .rows import Row, read

ROOT = Path(__file__).resolve().parents[2]
INTERRUPTED = 130  # as a shell reports Ctrl-C
BUDGET = 580  # seconds for all steps together: ten minutes with what lies around them
CPU_TIME_FACTOR = 7  # a step may take so many times its seconds on a CPU

# In order of risk: what is likeliest to be wrong, and would cost most, comes first. A new step is a line here and a
# module `check_NAME.py` of tests that use the fixtures of `rows`.
STEPS = (
    Step("convolutions", "a convolution under 20 shrinking limits, cuDNN's search on and off", 25),
    Step("limits", "model=resnet at 8 limits, the smallest workable limit, jobs in one process, new sizes", 95),
    Step("tests", "tests/gpu, with expandable segments", 80, "tests/gpu"),
    Step(
        "tests_without",
        "tests/gpu, without expandable segments",
        80,
        "tests/gpu",
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"},
    ),
    Step("defaults", "compiled steps, the allocator's cache, cuDNN's choices, LSTM dropout, pinned memory", 45),
    Step("memory", "20 errors each in forward, backward and recomputation; 40 evaluations", 50),
    Step("two_ranks", "two processes on one device over gloo, an error in each phase", 35),
    Step("one_rank", "one rank over NCCL: groups, mesh, rewrapping, background checkpoints", 40),
    Step("speed", "steps per second against hand-written loops; steps that wait for the device", 50),
    Step("draws", "the time of draws by sample, and of AdamW in low precision, against torch's kernels", 30),
    Step("planned_peaks", "the plan's peaks against those of 25 runs", 50),
)


def main(steps: Sequence[Step] = STEPS) -> int:
    """Returns the exit code: 0 if all checks passed, 1 if not, 2 where nothing could be checked, 130 after an
    interruption.

    steps: other ones, for tests.
    """
    options = arguments(steps)
    facts = machine_facts(options.device)
    if "problem" in facts:
        print(f"check_gpu: {facts['problem']}", file=sys.stderr)
        return 2
    chosen = [step for step in steps if not options.only or step.name in options.only]
    scratch = options.out or ROOT / "outputs" / "check_gpu" / datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    logs = scratch.resolve() / "steps"
    versions = ", ".join(f"{name} {facts[name]}" for name in ("driver", "torch", "CUDA", "Python") if name in facts)
    print(f"{facts['device']}; {versions}\n{len(chosen)} steps; logs in {logs}\n")
    with ended_like_ctrl_c():
        outcomes = run_all(chosen, options.device, logs)
    findings = Findings(facts, options.device, steps, outcomes)
    # Only a whole run on a GPU replaces the page in the documentation.
    is_whole = options.device == "cuda" and len(outcomes) == len(steps)
    page = findings.write(ROOT / "docs" if is_whole and not options.out else scratch)
    for outcome in outcomes:
        for row in outcome.rows:
            if row.outcome == "failed":
                print(f"{outcome.step.name}: {row.check}\n    expected  {row.expected}\n    got       {row.got}")
    print(f"\n{findings.summary}. The table is in {page}")
    if len(outcomes) < len(chosen):
        return INTERRUPTED
    return {None: 2, True: 0, False: 1}[findings.as_expected]


def arguments(steps: Sequence[Step]) -> argparse.Namespace:
    """The command line's."""
    parser = argparse.ArgumentParser(
        prog="scripts/check_gpu",
        description="Checks trainapp on this machine's GPU. Exit codes: 0 all passed, 1 not, 2 nothing could be "
        "checked, 130 interrupted.",
        epilog="As the first argument, --install first installs what is needed into .venv.",
    )
    names = [step.name for step in steps]
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda",
        help="cuda: the first GPU that CUDA_VISIBLE_DEVICES leaves (default), ten minutes at most; cpu: what needs "
        f"no GPU, with small sizes, {CPU_TIME_FACTOR} times as long at most",
    )
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"run only these: {', '.join(names)}")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="write gpu.md, gpu.json and the logs there (default: outputs/check_gpu; a whole run on a GPU: docs)",
    )
    return parser.parse_args()


def machine_facts(device: str) -> dict[str, Any]:
    """See `machine.facts`, which runs in a process of its own here."""
    done = subprocess.run([sys.executable, "-m", "gpu_check.machine", device], capture_output=True, text=True)
    if done.returncode:
        return {"problem": f"this machine could not be described:\n{done.stderr.strip()}"}
    return json.loads(done.stdout.splitlines()[-1])


def run_all(steps: Sequence[Step], device: str, logs: Path) -> list[Outcome]:
    """Run the steps, one line on the screen for each. Ctrl-C ends the step at work and leaves out the rest."""
    outcomes: list[Outcome] = []
    factor = CPU_TIME_FACTOR if device == "cpu" else 1
    started = time.monotonic()
    try:
        for number, step in enumerate(steps, start=1):
            print(f"{number:>2}/{len(steps)} {step.name:<22}", end="", flush=True)
            left = BUDGET * factor - (time.monotonic() - started)
            outcomes.append(run_step(step, device, logs, min(step.seconds * factor, max(1.0, left))))
            print(f"{outcomes[-1].verdict:<34}{outcomes[-1].seconds:>6.1f} s", flush=True)
    except KeyboardInterrupt:
        print("interrupted")
    return outcomes


@contextlib.contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """A time limit, a scheduler or a closed terminal must not leave a step on the device either."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_step(step: Step, device: str, folder: Path, seconds: float) -> Outcome:
    """Run the step for at most `seconds`. Its files and its log go to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows, log = folder / f"{step.name}.jsonl", folder / f"{step.name}.log"
    rows.unlink(missing_ok=True)
    path = step.path or f"scripts/gpu_check/check_{step.name}.py"
    command = [sys.executable, "-m", "pytest", path, "-m", "", "-s", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-p", "gpu_check.rows", "--device", device, "--rows", str(rows), "--basetemp", str(folder / step.name)]
    if (ROOT / path).is_dir():
        command += ["-n", "6", "--dist", "loadfile"]  # a process per file
    # As `trainapp.launch` sets it: torch reads it while it is imported (2.13, c10/cuda/CUDAAllocatorConfig.h).
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ, "COLUMNS": "200"}
    if device == "cpu":
        environment.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors gain nothing from threads
    started = time.monotonic()
    with log.open("w") as file:
        process = psutil.Popen(
            command,
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment | step.environment,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(seconds)
        except psutil.TimeoutExpired:
            code = None
        finally:
            end_family(process)
    outcome = Outcome(step, read(rows), time.monotonic() - started)
    if code not in (0, 1) or (code and not outcome.count("failed")):  # 1: of pytest, some checks failed
        got = f"stopped after {outcome.seconds:.0f} s" if code is None else f"exit code {code}: {last_line(log)}"[:160]
        outcome.rows.append(Row("the step ends by itself", f"within {seconds:.0f} s", got, "failed"))
    return outcome


def end_family(process: psutil.Popen) -> None:
    """Kill the process and all that it started: the next step needs the memory of the device that they hold."""
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = process.children(recursive=True)
    with contextlib.suppress(ProcessLookupError):  # its session, with those whose parent has ended
        os.killpg(process.pid, signal.SIGKILL)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    psutil.wait_procs(family, timeout=5)


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


if __name__ == "__main__":
    sys.exit(main())
