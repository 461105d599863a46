"""What the program weighs: every line is paid for by every reader. These totals only go down, unless a capability that
users asked for needs more.
"""

from pathlib import Path

import pytest
from helpers import ROOT


def lines_of(*folders: str) -> int:
    return sum(len(path.read_text().splitlines()) for folder in folders for path in (ROOT / folder).rglob("*.py"))


def modules() -> list[Path]:
    """Of the package, without empty `__init__.py`."""
    return [path for path in (ROOT / "src").rglob("*.py") if path.read_text().strip()]


def words_of_docs() -> int:
    """Without the reference of settings, which a script writes."""
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name != "configuration.md"]
    return sum(len(page.read_text().split()) for page in pages)


@pytest.mark.parametrize(
    ("what", "measured", "most"),
    [
        ("lines of the program", lambda: lines_of("src"), 26_377),
        ("files of the program", lambda: len(modules()), 141),
        ("lines of tests", lambda: lines_of("tests"), 32_617),
        ("lines of benchmarks", lambda: lines_of("benchmarks"), 2_500),
        ("lines of scripts", lambda: lines_of("scripts"), 1_350),
        ("words of documentation", words_of_docs, 21_826),
        ("words of the README", lambda: len((ROOT / "README.md").read_text().split()), 900),
        ("files in one room", lambda: max(len(list(p.parent.glob("*.py"))) for p in modules()) - 1, 14),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_totals(what, measured, most):
    assert measured() <= most, f"{what}: {measured()}, at most {most}"
