"""What a step has found, row by row; and the process of one step:

python -m gpu_check.table MODULE:FUNCTION --device DEVICE --folder FOLDER --rows FILE
"""

import argparse
import contextlib
import importlib
import json
import logging
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

MET, MISSED, MEASURED, NEEDS_CUDA = "met", "not met", "measured", "needs CUDA"


@dataclass(frozen=True)
class Row:
    """One check. verdict: MET, MISSED, MEASURED (nothing was expected) or NEEDS_CUDA."""

    check: str
    expected: str
    got: str
    verdict: str


class Table:
    """Appends each row to a file at once, so that a crash keeps those before it."""

    def __init__(self, path: Path):
        self._path = path
        path.touch()

    def expect(self, check: str, expected: str, got: str, met: bool) -> None:
        """A row whose expectation is met or not."""
        self._add(Row(check, expected, got, MET if met else MISSED))

    def measured(self, check: str, got: str) -> None:
        """A row without an expectation."""
        self._add(Row(check, "", got, MEASURED))

    def needs_cuda(self, *checks: str) -> None:
        """Rows for what only CUDA can show."""
        for check in checks:
            self._add(Row(check, "", "needs CUDA", NEEDS_CUDA))

    @contextlib.contextmanager
    def attempt(self, check: str, expected: str) -> Iterator[None]:
        """Inside the block, an error is a row that is not met; its traceback goes to the log, the step continues."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.expect(check, expected, failure_text(error), False)

    def _add(self, row: Row) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")


def read(path: Path) -> list[Row]:
    """The rows that a step has written; none if it never got that far. An interrupted last line is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            rows.append(Row(**json.loads(line)))
    return rows


def failure_text(error: BaseException) -> str:
    """An error's type and the first line of its message, cut to 160 characters."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:160]


def main() -> None:
    """Import the step and let it fill its table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("function")
    parser.add_argument("--device", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # what the runs say goes to the step's log
    module, _, name = options.function.partition(":")
    getattr(importlib.import_module(module), name)(Table(options.rows), options.device, options.folder)


if __name__ == "__main__":
    main()
