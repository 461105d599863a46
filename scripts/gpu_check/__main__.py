"""The command: runs the steps one after another, says how each went, writes the table."""

import argparse
import datetime
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import machine
from .plan import BUDGET, CPU_TIME_FACTOR, STEPS, Step

if TYPE_CHECKING:
    from .supervise import Outcome

ROOT = Path(__file__).resolve().parents[2]
INTERRUPTED = 130  # as a shell reports Ctrl-C


def main(steps: Sequence[Step] = STEPS) -> int:
    """Returns the exit code: 0 if all that was expected was found, 1 if not, 2 where nothing could be run.

    steps: other ones, for tests.
    """
    options = arguments(steps)
    lacking = machine.missing()
    if lacking:
        return refuse(
            f"{sys.executable} lacks {', '.join(lacking)}; scripts/test installs them into .venv, or PYTHON=... names "
            "another Python"
        )
    facts = machine_facts(options.device)
    if "problem" in facts:
        return refuse(facts["problem"])
    chosen = [step for step in steps if not options.only or step.name in options.only]
    is_whole = options.device == "cuda" and len(chosen) == len(steps)
    scratch = ROOT / "outputs" / "check_gpu" / datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    # Only a whole run on a GPU replaces the table in the documentation.
    out = options.out or (ROOT / "docs" if is_whole else scratch)
    logs = (options.out or scratch).resolve() / "steps"
    versions = ", ".join(f"{name} {facts[name]}" for name in ("driver", "torch", "CUDA", "Python") if name in facts)
    print(f"{facts['device']}; {versions}\n{len(chosen)} steps; logs in {logs}\n")
    outcomes = run_all(chosen, options.device, logs)
    if len(outcomes) < len(chosen):
        report_on(outcomes, facts, options.out or scratch)
        return INTERRUPTED
    return report_on(outcomes, facts, out)


def arguments(steps: Sequence[Step]) -> argparse.Namespace:
    """The command line's."""
    parser = argparse.ArgumentParser(prog="scripts/check_gpu", description="Checks trainapp on this machine's GPU.")
    names = [step.name for step in steps]
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"run only these: {', '.join(names)}")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write gpu.md, gpu.json and the logs there")
    return parser.parse_args()


def refuse(problem: str) -> int:
    """Say why nothing can be run."""
    print(f"check_gpu: {problem}", file=sys.stderr)
    return 2


def machine_facts(device: str) -> dict[str, Any]:
    """See `machine.facts`, which runs in a process of its own here."""
    done = subprocess.run([sys.executable, "-m", "gpu_check.machine", device], capture_output=True, text=True)
    if done.returncode:
        return {"problem": f"this machine could not be described:\n{done.stderr.strip()}"}
    return json.loads(done.stdout.splitlines()[-1])


def run_all(steps: Sequence[Step], device: str, logs: Path) -> list["Outcome"]:
    """Run the steps, one line on the screen for each. Ctrl-C ends the step at work and leaves out the rest."""
    from .supervise import run_step  # late: it needs psutil, which may be missing

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


def report_on(outcomes: list["Outcome"], facts: dict[str, Any], out: Path) -> int:
    """Write the table, print what was not as expected. Returns the exit code."""
    from . import report

    page = report.write(out, facts, outcomes)
    print()
    for outcome in outcomes:
        for row in outcome.missed:
            print(f"{outcome.step.name}: {row.check}\n    expected  {row.expected}\n    got       {row.got}")
    missed = sum(len(outcome.missed) for outcome in outcomes)
    rows = sum(len(outcome.rows) for outcome in outcomes)
    summary = f"Not as expected: {missed} of {rows} rows" if missed else "All that was expected was found"
    print(f"{summary}, in {sum(outcome.seconds for outcome in outcomes):.0f} s. The table is in {page}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
