"""Writes `report.html`: one file that shows a run, several runs over each other, or a sweep. Imports no torch.

The page is `page.html` with the data as JSON inside. Its script draws everything and loads nothing.
"""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import trainapp
from trainapp.errors import UserError
from trainapp.files import PACKAGE, atomic_write, strict_json
from trainapp.report import run_files

NAME = "report.html"
MOST_JOBS = 1000  # of a sweep's page
_TEMPLATE, _PLACE = PACKAGE / "report" / "page.html", "{{data}}"
_FACTS = (
    *("metric", "direction", "objective", "best_objective", "best_step", "steps", "seconds", "micro_size"),
    *("oom_restarts", "peak_memory_bytes"),
)


def write_runs(folders: Sequence[Path], path: Path) -> None:
    """Write the page of one run, or of several over each other; they may still be training.

    Raises UserError for a directory that is not of a run, and OSError if the page cannot be written.
    """
    for folder in folders:
        if not any((folder / name).exists() for name in (*run_files.CURVES.values(), ".hydra/config.yaml")):
            raise UserError(f"{folder}: no run is here; name the directory of one, or of a sweep alone")
    runs = [run_files.read(folder) for folder in folders]
    groups = [group for run in runs for group in run["curves"].values()]
    points = iter(run_files.shared_out([curve for group in groups for curve in group.values()]))
    for group in groups:
        group.update({name: next(points) for name in group})
    for run, name in zip(runs, _names(folders), strict=True):
        run["name"] = name
    _write(path, {"kind": "runs", "runs": runs})


def write_sweep(path: Path, rows: Sequence[Mapping[str, Any]], over_seeds: Sequence[Mapping[str, Any]] = ()) -> None:
    """Write the page of a sweep.

    rows: its jobs, the best first, each with `name`, `number` (its place in time), `settings` (those in which jobs
    differ, as text), `state`, `facts` (of its result.json), `spread`, `error` and `folder`. over_seeds: the same with
    one row for jobs that differ only in their seed, `spread` as the standard deviation, and no `number`. Raises OSError
    if the page cannot be written.
    """
    goals = {(row["facts"]["metric"], row["facts"]["direction"]) for row in rows if "metric" in row["facts"]}
    metric, direction = next(iter(goals)) if len(goals) == 1 else (None, None)
    shown, merged = ([_job(row, path.parent) for row in own[:MOST_JOBS]] for own in (rows, over_seeds))
    facts = {
        "folder": str(path.parent.resolve()),
        "metric": metric,
        "direction": direction,
        "left_out": len(rows) - len(shown),
    }
    _write(path, {"kind": "sweep", "jobs": shown, "over_seeds": merged, **facts})


def _job(row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    page = Path(row["folder"]) / NAME
    return {
        **{name: row[name] for name in ("name", "number", "settings", "state", "spread")},
        "error": row["error"][: run_files.CHARACTERS],
        "facts": {name: row["facts"].get(name) for name in _FACTS},
        "page": os.path.relpath(page, folder) if row["number"] is not None and page.exists() else None,
    }


def _names(folders: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    count = next(
        (count for count in range(1, max(map(len, parts))) if len({own[-count:] for own in parts}) == len(parts)), 1
    )
    return ["/".join(own[-count:]) for own in parts]


def _write(path: Path, data: Mapping[str, Any]) -> None:
    about = {"program": f"trainapp {trainapp.__version__}", "written": time.strftime("%Y-%m-%d %H:%M")}
    before, _, after = _TEMPLATE.read_text(encoding="utf-8").partition(_PLACE)
    text = strict_json({**data, **about}, separators=(",", ":"))
    with atomic_write(path) as file:
        # Escaped, no text of a user can end the script element that holds the data.
        file.write(before + text.replace("<", "\\u003c") + after)
