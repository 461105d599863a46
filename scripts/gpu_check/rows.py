"""A pytest plugin: each check is a row in a file, written at once, so that a crash keeps those before it.

A check's docstring says what is expected. The fixture `got` takes what was found, as text.
"""

import contextlib
import inspect
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Row:
    """One check. outcome: "passed", "failed" or "skipped", with the reason in `got`."""

    check: str
    expected: str
    got: str
    outcome: str


def read(path: Path) -> list[Row]:
    """The rows so far; none if the step never got that far. An interrupted last line is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            rows.append(Row(**json.loads(line)))
    return rows


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cuda", "cpu"), default="cuda", help="of the checks")
    parser.addoption("--rows", type=Path, help="the file for what was found")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--rows") and not hasattr(config, "workerinput"):  # not in the workers of pytest-xdist
        config.pluginmanager.register(_Writer(config.getoption("--rows")))


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """cuda, or cpu, where sizes are small."""
    return request.config.getoption("--device")


@pytest.fixture
def needs_cuda(device: str) -> None:
    """For what only CUDA can show."""
    if device == "cpu":
        pytest.skip("needs CUDA")


@pytest.fixture
def got(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Takes what a check has found; each call adds to it."""
    return lambda text: record_property("got", text)


def pytest_runtest_setup(item: pytest.Item) -> None:
    documented = inspect.getdoc(getattr(item, "function", None)) or ""
    item.user_properties.append(("expected", " ".join(documented.partition("\n\n")[0].split())))


class _Writer:
    def __init__(self, path: Path):
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        found = [str(value) for name, value in report.user_properties if name == "got"]
        if report.skipped and isinstance(report.longrepr, tuple):
            found.append(report.longrepr[2].removeprefix("Skipped: "))
        elif report.failed:
            found.append(_message(report))
        expected = next((value for name, value in report.user_properties if name == "expected"), "")
        row = Row(report.nodeid.partition("::")[2] or report.nodeid, expected, "; ".join(found), report.outcome)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")


def _message(report: pytest.TestReport) -> str:
    """The error's type and the first line of its message."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash is not None else report.longreprtext).strip().splitlines()
    return (lines or ["failed"])[0][:160]
