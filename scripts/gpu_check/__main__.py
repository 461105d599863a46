"""The command: runs the steps one after another, says how each went, writes the table."""

import argparse
import contextlib
import datetime
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import machine
from .plan import BUDGET, CPU_TIME_FACTOR, STEPS, Step

if TYPE_CHECKING:
    from .report import Findings
    from .supervise import Outcome

ROOT = Path(__file__).resolve().parents[2]
INTERRUPTED = 130  # as a shell reports Ctrl-C


def main(steps: Sequence[Step] = STEPS) -> int:
    """Returns the exit code: 0 if all that was expected was found, 1 if not, 2 where nothing could be checked, 130
    after an interruption.

    steps: other ones, for tests.
    """
    options = arguments(steps)
    lacking = machine.missing()
    if lacking:
        return refuse(
            f"{sys.executable} lacks {', '.join(lacking)}; scripts/check_gpu --install installs all into .venv first "
            "(which takes the network and minutes), or PYTHON=... names another Python"
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
    with ended_like_ctrl_c():
        outcomes = run_all(chosen, options.device, logs)
    from .report import Extent, Findings  # late: it needs psutil, which may be missing

    is_interrupted = len(outcomes) < len(chosen)
    extent = Extent(options.device, len(steps), len(outcomes), is_interrupted)
    code = report_on(Findings(facts, extent, outcomes), options.out or scratch if is_interrupted else out)
    return INTERRUPTED if is_interrupted else code


def arguments(steps: Sequence[Step]) -> argparse.Namespace:
    """The command line's."""
    parser = argparse.ArgumentParser(
        prog="scripts/check_gpu",
        description="Checks trainapp on this machine's GPU. Exit codes: 0 all as expected, 1 not, 2 nothing could be "
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


def report_on(findings: "Findings", out: Path) -> int:
    """Write the table, print what was not as expected. Returns the exit code."""
    from . import report

    page = report.write(out, findings)
    print()
    for outcome in findings.outcomes:
        for row in outcome.missed:
            print(f"{outcome.step.name}: {row.check}\n    expected  {row.expected}\n    got       {row.got}")
    print(f"{findings.summary}. The table is in {page}")
    if findings.as_expected is None:
        return 2
    return 0 if findings.as_expected else 1


if __name__ == "__main__":
    sys.exit(main())
