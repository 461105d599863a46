"""`tracker=csv`: metrics.csv and evaluations.csv, for spreadsheets and pandas."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainapp.files import atomic_write
from trainapp.tracking.outlet import Outlet, Start

NAMES = {"train": "metrics", "eval": "evaluations"}  # other groups: as they are called


class Csv(Outlet):
    """A table per group, one row per step. A number that appears later adds a column."""

    def start(self, start: Start) -> None:
        self._start = start
        self._tables: dict[str, _Table] = {}
        for name in NAMES.values():
            self._table(name)

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        self._table(NAMES.get(group, group)).append({"step": step, **values})

    def _table(self, name: str) -> "_Table":
        if name not in self._tables:
            path = self._start.run_dir / f"{name}.csv"
            self._tables[name] = _Table(path, self._start.step if self._start.continues else None)
        return self._tables[name]


class _Table:
    """last_step: of the rows to keep of an earlier part of the run; None: all."""

    def __init__(self, path: Path, last_step: int | None):
        self._path = path
        self._columns: list[str] = []
        if not path.exists():
            return
        rows = self._read()
        kept = rows if last_step is None else [row for row in rows if _step_of(row) <= last_step]
        if len(kept) < len(rows):
            self._write(kept)

    def append(self, row: Mapping[str, Any]) -> None:
        """Each row is on the disk when this returns. Raises OSError."""
        new = [name for name in row if name not in self._columns]
        if new:
            rows = self._read() if self._path.exists() else []
            self._columns = [*self._columns, *(name for name in new if name not in self._columns)]
            self._write([*rows, row])
            return
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns, restval="", lineterminator="\n").writerow(row)

    def _read(self) -> list[dict[str, Any]]:
        with self._path.open(newline="") as file:
            reader = csv.DictReader(file, restval="")
            rows = list(reader)
        self._columns = list(reader.fieldnames or ())
        return [{name: row[name] for name in self._columns} for row in rows]

    def _write(self, rows: list[Any]) -> None:
        with atomic_write(self._path) as file:
            writer = csv.DictWriter(file, self._columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def _step_of(row: Mapping[str, Any]) -> float:
    """Infinity for half a row, which a killed run has left."""
    try:
        return int(row["step"])
    except (KeyError, TypeError, ValueError):
        return float("inf")
