"""Writes `report.html`: one file that shows a run, several runs over each other, or a sweep. Imports no torch.

The page is `page.html` with its content as JSON inside: sections of texts and tables, made here, and the curves from
which its script draws the charts. It loads nothing.
"""

import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import trainapp
from trainapp.errors import UserError
from trainapp.files import PACKAGE, atomic_write, strict_json
from trainapp.report import run_files
from trainapp.units import bytes_text

NAME = "report.html"
MOST_JOBS = 1000  # of a sweep's page
_TEMPLATE, _PLACE = PACKAGE / "report" / "page.html", "{{data}}"
UNKNOWN = "-"
Section = dict[str, Any]  # `title`, `note`, and `items`: tables, texts, and names of groups of charts
Table = tuple[str, Sequence[str], Sequence[Sequence[Any]]]  # title, header, rows
Job = Mapping[str, Any]  # of a sweep: `name`, `number` (its place in time), `value`, and `settings` as texts
Goal = tuple[str, str] | None  # metric, and max or min


def write_runs(folders: Sequence[Path], path: Path) -> None:
    """Write the page of one run, or of several over each other; they may still be training.

    Raises UserError for a directory that is not of a run, and OSError if the page cannot be written.
    """
    for folder in folders:
        if not run_files.is_run(folder):
            raise UserError(f"{folder}: no run is here; name the directory of one, or of a sweep alone")
    runs = [run_files.read(folder) for folder in folders]
    groups = [group for run in runs for group in run["curves"].values()]
    points = iter(run_files.points_of_all([curve for group in groups for curve in group.values()]))
    for group in groups:
        group.update({name: next(points) for name in group})
    for run, name in zip(runs, _names(folders), strict=True):
        run["name"] = name
    head = _head(runs[0]) if len(runs) == 1 else {"title": ", ".join(run["name"] for run in runs)}
    _write(path, {**head, "sections": list(_sections(runs)), "runs": runs})


def write_sweep(
    path: Path, lines: Sequence[str], tables: Iterable[Table], jobs: Sequence[Job], names: Sequence[str], goal: Goal
) -> None:
    """Write the page of a sweep. lines: below its title. names: of the settings in which jobs differ. goal: the metric
    and its direction; None: nothing is charted. Raises OSError if the page cannot be written.
    """
    sections = []
    for title, header, rows in tables:
        note, header, rows = without_constant(header, rows[:MOST_JOBS])
        sections.append(_section(title, _table(header, rows, note=f"All: {note}." if note else "")))
    if goal is not None:
        sections += [_section("History", "history"), _section(f"{goal[0]} against each setting", "settings")]
        sections.append(_section("All settings together", "parallel"))
    metric, direction = goal or ("", "")
    charted = {"metric": metric, "direction": direction, "settings": names, "jobs": jobs[:MOST_JOBS]}
    _write(path, {"title": f"Sweep {path.parent.resolve().name}", "lines": lines, "sections": sections, **charted})


def without_constant(header: Sequence[str], rows: Sequence[Sequence[Any]], first: int = 4) -> Table:
    """A text with what is the same in all rows, from the column `first` on, and the table without it."""
    same = [at for at in range(first, len(header)) if len(rows) > 1 and all(row[at] == rows[0][at] for row in rows)]
    kept = [at for at in range(len(header)) if at not in same]
    note = ", ".join(f"{header[at]} {rows[0][at]}" for at in same if rows[0][at] not in ("", UNKNOWN))
    return note, [header[at] for at in kept], [[row[at] for at in kept] for row in rows]


def _head(run: Mapping[str, Any]) -> dict[str, Any]:
    """What stands above the charts of one run."""
    state = run["state"]
    if ended := run["result"].get("ended"):
        state += f" by {ended}"
    elif failed := run["result"].get("failed"):
        state += f": {failed.splitlines()[0]}"
    lines = [run["headline"], f"{state}; {run['folder']}"]
    return {"title": run["name"], "lines": lines, "tiles": _facts(run)}


def _facts(run: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The numbers of a run: name, value, remark. Of one that has not ended, those that it has logged last."""
    result, train = run["result"], run["curves"]["train"]

    def logged(name: str) -> Any:
        return train[name]["y"][-1] if name in train else None

    steps = max((curve["x"][-1] for curve in train.values()), default=0)
    best, metric, limit = result.get("best_step"), result.get("metric"), logged("memory/limit")
    value = result.get("objective_note") or number_text(result["objective"] if metric else logged("loss"))
    samples = f"{result['samples']:,} samples" if "samples" in result else ""
    accumulated = f"x {result['accumulation']} accumulated" if "accumulation" in result else ""
    speed = result.get("samples_per_second") or logged("samples_per_second")
    peak = result.get("peak_memory_bytes") or logged("memory/peak")
    return [
        (metric or "last loss", value, f"best {number_text(result['best_objective'])} at step {best}" if best else ""),
        ("steps", number_text(result.get("steps", steps)), samples),
        ("time", seconds_text(result.get("seconds")), ""),
        ("throughput", UNKNOWN if speed is None else f"{speed:,.0f}/s", "samples"),
        ("peak memory", memory_text(peak), f"of {memory_text(limit)}" if limit else ""),
        ("micro-batch", number_text(result.get("micro_size", logged("batch/micro_size"))), accumulated),
        ("OOMs", number_text(result.get("oom_restarts", len(run["ooms"]))), ""),
    ]


def _sections(runs: Sequence[Mapping[str, Any]]) -> Iterable[Section]:
    is_one = len(runs) == 1
    if not is_one:
        yield _section("Runs", _runs_table(runs))
        yield _section("Settings that differ", _differences(runs))
    yield _section("Training", "training", note="Drag in a chart to zoom into steps; a double click zooms out.")
    yield _section("Memory", "memory")
    yield _section("Callbacks", "callbacks")
    yield _section("Incidents", *_incidents(runs))
    yield _section("Everything else that was logged", "rest")
    settings: list[Any] = []
    for run in runs:
        given = {text.partition("=")[0].lstrip("+~") for text in run["overrides"]}
        overrides = "\n".join(map(shlex.quote, run["overrides"])) or "nothing: all settings have their defaults"
        rows = [[name, value] for name, value in run["settings"].items()]
        marked = [at for at, row in enumerate(rows) if row[0] in given]
        settings += [
            {"kind": "code", "title": "Changed on the command line" if is_one else run["name"], "text": overrides},
            _table(["setting", "value"], rows, folded=f"All {len(rows)} settings", marked=marked),
        ]
    yield _section("Configuration", *settings)
    environment: list[Any] = []
    for run in runs:
        facts = {"directory": run["folder"], "model and device": run["headline"], **run["environment"]}
        rows = [[name, value] for name, value in facts.items() if value]
        environment.append(_table(["" if is_one else run["name"], ""], rows))
        if run["command"]:
            environment.append({"kind": "code", "title": "", "text": shlex.join(["trainapp", *run["command"]])})
    yield _section("Environment and command", *environment)


def _runs_table(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    facts = [_facts(run) for run in runs]
    rows = [
        [
            {"text": run["name"], "color": number},
            run["state"],
            *(f"{value} ({note})" if note.startswith("best") else value for _, value, note in own),
        ]
        for number, (run, own) in enumerate(zip(runs, facts, strict=True))
    ]
    return _table(["run", "state", *(name for name, _, _ in facts[0])], rows)


def _differences(runs: Sequence[Mapping[str, Any]]) -> Any:
    names = dict.fromkeys(name for run in runs for name in run["settings"])
    rows = [[name, *(run["settings"].get(name, UNKNOWN) for run in runs)] for name in names]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    return _table(["setting", *(run["name"] for run in runs)], rows) if rows else {"kind": "text", "text": "None."}


def _incidents(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Out-of-memory errors, and what the log has of notes and warnings."""
    first = ["run"] if len(runs) > 1 else []
    ooms, notes = [], []
    for run in runs:
        name = [run["name"]] if first else []
        for own in run["ooms"]:
            place = f"{own['phase']} ({own['module']})" if own["module"] else own["phase"]
            sizes = (memory_text(own[name]) for name in ("requested", "used", "limit"))
            ooms.append([*name, str(own["step"]), place, *sizes, own["action"], seconds_text(own["seconds_lost"])])
        notes += [[*name, own["time"], own["level"].lower(), own["text"]] for own in run["notes"]]
    header = ["step", "out of memory in", "asked for", "in use", "limit", "what followed", "time lost"]
    tables = [_table([*first, *header], ooms)] if ooms else [{"kind": "text", "text": "No out-of-memory errors."}]
    return [*tables, _table([*first, "time", "level", "notes and warnings"], notes)] if notes else tables


def _section(title: str, *items: Any, note: str = "") -> Section:
    return {"title": title, "note": note, "items": items}


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]], **more: Any) -> dict[str, Any]:
    """note: a line above. folded: the title of a table that is opened by a click. marked: rows, by number."""
    return {"kind": "table", "header": header, "rows": rows, **more}


def number_text(value: float | None) -> str:
    """`1,234` or `0.1234`; UNKNOWN for None, as below."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 1e4 else f"{value:.4g}"


def memory_text(value: float | None) -> str:
    """`47.9 MiB`."""
    return UNKNOWN if value is None else bytes_text(value)


def seconds_text(value: float | None) -> str:
    """`14.8 s`, `2.5 min` or `3.1 h`."""
    if value is None:
        return UNKNOWN
    unit, size = next((own for own in (("h", 3600), ("min", 60)) if value >= 2 * own[1]), ("s", 1))
    return f"{value / size:.1f} {unit}"


def _names(folders: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    counts = range(1, max(map(len, parts)))
    count = next((count for count in counts if len({own[-count:] for own in parts}) == len(parts)), 1)
    return ["/".join(own[-count:]) for own in parts]


def _write(path: Path, data: Mapping[str, Any]) -> None:
    written = f"Written by trainapp {trainapp.__version__}, {time.strftime('%Y-%m-%d %H:%M')}."
    before, _, after = _TEMPLATE.read_text(encoding="utf-8").partition(_PLACE)
    text = strict_json({**data, "written": written}, separators=(",", ":"))
    with atomic_write(path) as file:
        # Escaped, no text of a user can end the script element that holds the data.
        file.write(before + text.replace("<", "\\u003c") + after)
