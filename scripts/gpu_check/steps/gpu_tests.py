"""tests/gpu, with expandable segments and without; a process per file, all at the same time."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

from ..table import Table

ROOT = Path(__file__).resolve().parents[3]
VARIANTS = {"with": "expandable_segments:True", "without": "expandable_segments:False"}
SECONDS = 85  # then pytest is asked to end, so that it reports what it has


def check(table: Table, device: str, folder: Path) -> None:
    """One row per variant and file, and one per test that failed."""
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    if device == "cpu":
        table.needs_cuda(*(f"{file.name} {name} expandable segments" for name in VARIANTS for file in files))
        return
    until = time.monotonic() + SECONDS
    started = {(name, file): start(folder, name, file) for name in VARIANTS for file in files}
    for (name, file), process in started.items():
        title, expected = f"{file.name} {name} expandable segments", "all pass, none is skipped"
        with table.attempt(title, expected):
            ended = wait(process, until)
            counts, problems = outcomes(folder / f"{name}_{file.stem}.xml")
            passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
            got = f"{passed} of {counts['tests']} passed, {counts['skipped']} skipped, exit code {process.returncode}"
            got += "" if ended else f", ended after {SECONDS} s"
            table.expect(title, expected, got, process.returncode == 0 and passed == counts["tests"] > 0)
            for test, message in problems:
                table.expect(f"{name}: {test}", "passes", message, False)


def start(folder: Path, name: str, file: Path) -> subprocess.Popen:
    """pytest on one file; its output goes to a log of its own."""
    place = folder / f"{name}_{file.stem}"
    command = [sys.executable, "-m", "pytest", str(file), "-m", "", "-p", "no:cacheprovider", "--tb=short"]
    command += [f"--junitxml={place}.xml", f"--basetemp={place}"]
    with Path(f"{place}.log").open("w") as log:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTORCH_CUDA_ALLOC_CONF": VARIANTS[name]},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def wait(process: subprocess.Popen, until: float) -> bool:
    """Whether it ended by itself before `until`, by `time.monotonic`."""
    try:
        process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.wait(10)
        return False
    return True


def outcomes(path: Path) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Counts, and the name and first line of every test that failed or was skipped."""
    suite = next(ElementTree.parse(path).getroot().iter("testsuite"))
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    problems = []
    for case in suite.iter("testcase"):
        for kind in ("failure", "error", "skipped"):
            for found in case.iter(kind):
                problems.append((case.get("name", "?"), f"{kind}: {found.get('message', '')}".splitlines()[0][:160]))
    return counts, problems
