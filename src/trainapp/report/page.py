"""`report.html`: one file that shows a run, several runs over each other, or a sweep. Imports no torch.

The page is `page.html` with its content as JSON inside: sections of texts and tables, made here, and the curves from
which its script draws the charts. It loads nothing.
"""

import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import trainapp
from trainapp.errors import UserError
from trainapp.files import PACKAGE, atomic_write, strict_json
from trainapp.report import run_files
from trainapp.units import bytes_text

NAME = "report.html"
MOST_JOBS = 1000  # of a sweep's page
_TEMPLATE = PACKAGE / "report" / "page.html"
_PLACEHOLDER = "{{data}}"
BLANK = "-"
Section = dict[str, Any]  # `title`, `note` and `items`: tables, texts, and names of groups of charts
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
    names = _names(folders)
    for run, name in zip(runs, names, strict=True):
        run["name"] = name
    _replace_curves_by_points(runs)

    # A single run also has its numbers above the charts; those of several are in a table.
    if len(runs) == 1:
        head = _head(runs[0])
    else:
        head = {"title": ", ".join(names)}
    sections = list(_sections(runs))
    _write(path, {**head, "sections": sections, "runs": runs})


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the last parts of the paths, as many as tell them apart."""
    parts_of_paths = [folder.resolve().parts for folder in folders]
    longest = max(len(parts) for parts in parts_of_paths)
    for count in range(1, longest):
        names = ["/".join(parts[-count:]) for parts in parts_of_paths]
        if len(set(names)) == len(names):
            return names
    return [parts[-1] for parts in parts_of_paths]  # one folder is given twice


def _replace_curves_by_points(runs: Sequence[Mapping[str, Any]]) -> None:
    """Replace the curves of all runs by the points that the page draws."""
    groups: list[dict[str, Any]] = []  # the curves of a file, by name
    for run in runs:
        groups.extend(run["curves"].values())

    # All curves together: they share the number of points of a page.
    curves: list[run_files.Curve] = []
    for group in groups:
        curves.extend(group.values())
    points = iter(run_files.points_of_all(curves))

    for group in groups:
        for name in group:
            group[name] = next(points)


def write_sweep(
    path: Path, lines: Sequence[str], tables: Iterable[Table], jobs: Sequence[Job], names: Sequence[str], goal: Goal
) -> None:
    """Write the page of a sweep. Raises OSError if the page cannot be written.

    Args:
        path: of the page, in the sweep's folder.
        lines: below its title.
        tables: its tables.
        jobs: the jobs that are charted.
        names: of the settings in which jobs differ.
        goal: the metric and its direction; None: nothing is charted.
    """
    metric, direction = goal or ("", "")
    sections = []
    for title, header, rows in tables:
        constants, header, rows = without_constant(header, rows[:MOST_JOBS])
        note = f"All: {constants}." if constants else ""
        sections.append(_section(title, _table(header, rows, note=note)))

    # Charts, which the page's script draws from the jobs.
    if goal is not None:
        sections.append(_section("History", "history"))
        sections.append(_section(f"{metric} against each setting", "settings"))
        sections.append(_section("All settings together", "parallel"))
    content = {
        "title": f"Sweep {path.parent.resolve().name}",
        "lines": lines,
        "sections": sections,
        "metric": metric,
        "direction": direction,
        "settings": names,
        "jobs": jobs[:MOST_JOBS],
    }
    _write(path, content)


def without_constant(header: Sequence[str], rows: Sequence[Sequence[Any]], first: int = 4) -> Table:
    """Return a text with what is the same in all rows, from the column `first` on, and the table without it."""
    # A column of equal cells goes into the text, or nowhere if it says nothing. That of a single row stays.
    notes = []
    columns_to_keep = list(range(min(first, len(header))))
    for column in range(first, len(header)):
        cells = [row[column] for row in rows]
        differs = any(cell != cells[0] for cell in cells)
        if differs or len(rows) < 2:
            columns_to_keep.append(column)
        elif cells[0] not in ("", BLANK):
            notes.append(f"{header[column]} {cells[0]}")

    shorter_header = [header[column] for column in columns_to_keep]
    shorter_rows = []
    for row in rows:
        shorter_rows.append([row[column] for column in columns_to_keep])
    return ", ".join(notes), shorter_header, shorter_rows


def _head(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return what stands above the charts of one run."""
    state = run["state"]
    ended_by = run["result"].get("ended")
    error = run["result"].get("failed")
    if ended_by:
        state += f" by {ended_by}"
    elif error:
        state += f": {error.splitlines()[0]}"
    lines = [run["headline"], f"{state}; {run['folder']}"]
    return {"title": run["name"], "lines": lines, "tiles": _facts(run)}


class Fact(NamedTuple):
    """A number of a run, as text."""

    name: str
    value: str
    remark: str = ""


def _facts(run: Mapping[str, Any]) -> list[Fact]:
    """Return the numbers of a run; of one that has not ended, those that it has logged last."""
    result = run["result"]
    curves = run["curves"]["train"]

    def last_logged(name: str) -> Any:
        return curves[name]["y"][-1] if name in curves else None

    # The objective, and when it was best.
    metric = result.get("metric")
    objective = result.get("objective_note")
    if not objective and metric:
        objective = number_text(result["objective"])
    elif not objective:
        objective = number_text(last_logged("loss"))
    best_step = result.get("best_step")
    best = f"best {number_text(result['best_objective'])} at step {best_step}" if best_step else ""

    # How far, and how fast.
    last_steps = [curve["x"][-1] for curve in curves.values()]
    step_count = result.get("steps", max(last_steps, default=0))
    samples = f"{result['samples']:,} samples" if "samples" in result else ""
    speed = result.get("samples_per_second") or last_logged("samples_per_second")
    throughput = BLANK if speed is None else f"{speed:,.0f}/s"

    # Memory, and what it has led to.
    peak = result.get("peak_memory_bytes") or last_logged("memory/peak")
    limit = last_logged("memory/limit")
    limit_text = f"of {memory_text(limit)}" if limit else ""
    micro_size = result.get("micro_size", last_logged("batch/micro_size"))
    accumulation = f"x {result['accumulation']} accumulated" if "accumulation" in result else ""
    oom_count = result.get("oom_restarts", len(run["ooms"]))
    turned_on = result.get("turned_on") or [{"settings": ""}]
    techniques = turned_on[-1]["settings"]
    return [
        Fact(metric or "last loss", objective, best),
        Fact("steps", number_text(step_count), samples),
        Fact("time", seconds_text(result.get("seconds"))),
        Fact("throughput", throughput, "samples"),
        Fact("peak memory", memory_text(peak), limit_text),
        Fact("micro-batch", number_text(micro_size), accumulation),
        Fact("OOMs", number_text(oom_count), f"turned on: {techniques}" if techniques else ""),
    ]


def _sections(runs: Sequence[Mapping[str, Any]]) -> Iterable[Section]:
    """Yield the sections of the page of one run or of several."""
    if len(runs) > 1:
        yield _section("Runs", _runs_table(runs))
        yield _section("Settings that differ", _differences(runs))
    yield _section("Training", "training", note="Drag in a chart to zoom into steps; a double click zooms out.")
    yield _section("Memory", "memory")
    yield _section("Callbacks", "callbacks")
    yield _section("Incidents", *_incidents(runs))
    yield _section("Everything else that was logged", "rest")
    yield _section("Configuration", *_configuration(runs))
    yield _section("Environment and command", *_environment(runs))


def _runs_table(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a table with a row of numbers for each run."""
    fact_names = [fact.name for fact in _facts(runs[0])]
    rows = []
    for number, run in enumerate(runs):
        row = [{"text": run["name"], "color": number}, run["state"]]
        for fact in _facts(run):
            text = fact.value
            if fact.remark.startswith("best"):
                text += f" ({fact.remark})"
            row.append(text)
        rows.append(row)
    return _table(["run", "state", *fact_names], rows)


def _differences(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a table of the settings in which the runs differ."""
    names: dict[str, None] = {}  # in order, each once
    for run in runs:
        names |= dict.fromkeys(run["settings"])
    rows = []
    for name in names:
        values = [run["settings"].get(name, BLANK) for run in runs]
        if len(set(values)) > 1:
            rows.append([name, *values])
    if not rows:
        return _text("None.")
    run_names = [run["name"] for run in runs]
    return _table(["setting", *run_names], rows)


def _incidents(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tables of out-of-memory errors, and of the notes and warnings in the log."""
    # A row per incident; where there are several runs, it begins with the name of its run.
    oom_header = ["step", "out of memory in", "asked for", "in use", "limit", "what followed", "time lost"]
    note_header = ["time", "level", "notes and warnings"]
    oom_rows: list[list[str]] = []
    note_rows: list[list[str]] = []
    for run in runs:
        rows_of_ooms = [_oom_cells(oom) for oom in run["ooms"]]
        rows_of_notes = [[note["time"], note["level"].lower(), note["text"]] for note in run["notes"]]
        if len(runs) > 1:
            for row in (*rows_of_ooms, *rows_of_notes):
                row.insert(0, run["name"])
        oom_rows += rows_of_ooms
        note_rows += rows_of_notes
    if len(runs) > 1:
        oom_header.insert(0, "run")
        note_header.insert(0, "run")

    if oom_rows:
        items = [_table(oom_header, oom_rows)]
    else:
        items = [_text("No out-of-memory errors.")]
    if note_rows:
        items.append(_table(note_header, note_rows))
    return items


def _oom_cells(oom: Mapping[str, Any]) -> list[str]:
    """Return a row about an out-of-memory error."""
    location = oom["phase"]
    if oom["module"]:
        location += f" ({oom['module']})"
    return [
        str(oom["step"]),
        location,
        memory_text(oom["requested"]),
        memory_text(oom["used"]),
        memory_text(oom["limit"]),
        oom["action"],
        seconds_text(oom["seconds_lost"]),
    ]


def _configuration(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each run's overrides, and a table of its settings in which those that they set are marked."""
    items = []
    for run in runs:
        title = "Changed on the command line" if len(runs) == 1 else run["name"]
        quoted_overrides = [shlex.quote(override) for override in run["overrides"]]
        text = "\n".join(quoted_overrides) or "nothing: all settings have their defaults"
        items.append(_code(title, text))

        overridden = {override.partition("=")[0].lstrip("+~") for override in run["overrides"]}
        rows = []
        marked = []  # numbers of rows
        for number, (name, value) in enumerate(run["settings"].items()):
            rows.append([name, value])
            if name in overridden:
                marked.append(number)
        items.append(_table(["setting", "value"], rows, folded=f"All {len(rows)} settings", marked=marked))
    return items


def _environment(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return for each run a table of where and with what it was started, and its command."""
    items = []
    for run in runs:
        title = "" if len(runs) == 1 else run["name"]
        facts = {"directory": run["folder"], "model and device": run["headline"], **run["environment"]}
        rows = [[name, value] for name, value in facts.items() if value]
        items.append(_table([title, ""], rows))
        if run["command"]:
            command = shlex.join(["trainapp", *run["command"]])
            items.append(_code("", command))
    return items


def _section(title: str, *items: Any, note: str = "") -> Section:
    return {"title": title, "note": note, "items": items}


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]], **options: Any) -> dict[str, Any]:
    """Return a table. options: `note`, a line above; `folded`, the title of a table that a click opens; `marked`, rows
    by number.
    """
    return {"kind": "table", "header": header, "rows": rows, **options}


def _text(text: str) -> dict[str, Any]:
    return {"kind": "text", "text": text}


def _code(title: str, text: str) -> dict[str, Any]:
    return {"kind": "code", "title": title, "text": text}


def number_text(value: float | None) -> str:
    """Return `1,234` or `0.1234`; BLANK for None, as below."""
    if value is None:
        return BLANK
    needs_no_fraction = float(value).is_integer() or abs(value) >= 1e4
    if needs_no_fraction:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def memory_text(value: float | None) -> str:
    """Return `47.9 MiB`."""
    if value is None:
        return BLANK
    return bytes_text(value)


def seconds_text(value: float | None) -> str:
    """Return `14.8 s`, `2.5 min` or `3.1 h`."""
    if value is None:
        return BLANK
    if value >= 2 * 3600:
        return f"{value / 3600:.1f} h"
    if value >= 2 * 60:
        return f"{value / 60:.1f} min"
    return f"{value:.1f} s"


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Write the page. Raises OSError if it cannot be written."""
    now = time.strftime("%Y-%m-%d %H:%M")
    written = f"Written by trainapp {trainapp.__version__}, {now}."
    data = strict_json({**content, "written": written}, separators=(",", ":"))
    data = data.replace("<", "\\u003c")  # otherwise a text of a user could end the script element that holds the data

    template = _TEMPLATE.read_text(encoding="utf-8")
    before, _, after = template.partition(_PLACEHOLDER)
    with atomic_write(path) as file:
        file.write(before + data + after)
