"""Writes the expected records: `python tests/golden/record.py [NAME ...]`, all of them without a name.

Read what `git diff tests/golden/expected` then shows: each line is a change for users, or of a file format.

Options:
    --check   compare with the expected records instead, and print the differences
    --before  record the folders of `before/` anew: only when the format of checkpoints or journals changes on purpose
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from golden.scenarios import Scenario

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "helpers"), str(TESTS.parent / "src")]
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, as tests/conftest.py does
# Runs are of this checkout, whatever is installed.
os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])


def main() -> None:
    """Record what the command line names."""
    from golden import recording  # not above: runs are forks of a process that has imported this module
    from golden.scenarios import SCENARIOS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--before", action="store_true")
    given = parser.parse_args()
    if unknown := set(given.names) - {scenario.name for scenario in SCENARIOS}:
        parser.error(f"no such scenarios: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRAINAPP_CACHE"] = cache
        if given.before:
            recording.record_before()
            return
        if not given.names and not given.check:
            shutil.rmtree(recording.EXPECTED, ignore_errors=True)  # some may be of scenarios that are gone
        for scenario in SCENARIOS:
            if not given.names or scenario.name in given.names:
                record(scenario, given.check)


def record(scenario: "Scenario", checks: bool) -> None:
    """Write the expected record of a scenario, or compare with it."""
    from golden import recording

    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        got = recording.record(scenario, Path(folder) / "work")
    print(f"{scenario.name:<24}{time.monotonic() - started:6.1f} s", flush=True)
    if not checks:
        recording.write_expected(scenario.name, got)
        return
    for difference in recording.differences(recording.read_expected(scenario.name), got):
        print(f"  {difference}")


if __name__ == "__main__":
    main()
