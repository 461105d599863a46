"""Writes `report.html`: one file that shows a run, several runs over each other, or a sweep. Imports no torch.

The page is `page.html` with its content as JSON inside: sections of texts and tables, made here, and the curves from
which its script draws the charts. It loads nothing.
"""

import os
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
_UNKNOWN = "–"
Section = dict[str, Any]  # `title`, `note`, and `items`: tables, texts, and names of groups of charts


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
    head = _head(runs[0]) if len(runs) == 1 else {"title": ", ".join(run["name"] for run in runs)}
    _write(path, {**head, "sections": list(_sections(runs)), "runs": runs})


def write_sweep(path: Path, rows: Sequence[Mapping[str, Any]], over_seeds: Sequence[Mapping[str, Any]] = ()) -> None:
    """Write the page of a sweep.

    rows: its jobs, the best first, each with `name`, `number` (its place in time), `settings` (those in which jobs
    differ, as text), `state`, `facts` (of its result.json), `spread`, `error` and `folder`. over_seeds: the same with
    one row for jobs that differ only in their seed, `spread` as the standard deviation, and no `number`. Raises OSError
    if the page cannot be written.
    """
    goals = {(row["facts"]["metric"], row["facts"]["direction"]) for row in rows if "metric" in row["facts"]}
    metric, direction = next(iter(goals)) if len(goals) == 1 else ("", "")
    states = [row["state"] for row in rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    goal = f"best {metric} ({direction})" if metric else "best"
    sections = [_section("Leaderboard", _leaderboard(rows[:MOST_JOBS], goal, path.parent))]
    if over_seeds:
        table = _leaderboard(over_seeds[:MOST_JOBS], goal, path.parent)
        sections.insert(0, _section("Over seeds: mean and standard deviation", table))
    if failed := [[row["name"], row["error"][: run_files.CHARACTERS]] for row in rows[:MOST_JOBS] if row["error"]]:
        sections.append(_section("Failed jobs", _table(["job", "error"], failed)))
    if metric:
        sections += [
            _section("History", "history"),
            _section(f"{metric} against each setting", "settings"),
            _section("All settings together", "parallel"),
        ]
    names = list(dict.fromkeys(name for row in rows for name in row["settings"]))
    known = [row for row in rows[:MOST_JOBS] if row["facts"].get("best_objective") is not None]
    jobs = [
        {
            "name": row["name"],
            "number": row["number"],
            "value": row["facts"]["best_objective"],
            "settings": [row["settings"].get(name, "") for name in names],
        }
        for row in known
    ]
    head = {"title": f"Sweep {path.parent.resolve().name}", "lines": [f"{len(rows)} jobs: {counts}", str(path.parent)]}
    goals_of = {"metric": metric, "direction": direction, "settings": names}
    _write(path, {**head, "sections": sections, **goals_of, "jobs": jobs})


def _leaderboard(rows: Sequence[Mapping[str, Any]], goal: str, folder: Path) -> dict[str, Any]:
    """A table of jobs. What is the same in all of them is its note."""
    settings = dict.fromkeys(name for row in rows for name in row["settings"])
    header = ["#", "job", goal, "last", *settings, "steps", "time", "micro-batch", "OOMs", "peak memory", "state"]
    table: list[list[Any]] = []
    for place, row in enumerate(rows, start=1):
        facts, own_page = row["facts"], Path(row["folder"]) / NAME
        is_job = row["number"] is not None and own_page.exists()
        best = facts.get("best_objective")
        spread = f" ± {row['spread']:.2g}" if row["spread"] is not None else ""
        table.append(
            [
                _UNKNOWN if best is None else str(place),
                {"text": row["name"], "page": os.path.relpath(own_page, folder)} if is_job else row["name"],
                _number(best) + spread,
                _number(facts.get("objective")),
                *(row["settings"].get(name, "") for name in settings),
                _number(facts.get("steps")),
                _seconds(facts.get("seconds")),
                _number(facts.get("micro_size")),
                _number(facts.get("oom_restarts")),
                _bytes(facts.get("peak_memory_bytes")),
                row["state"],
            ]
        )
    same = [at for at in range(4, len(header)) if len(rows) > 1 and all(row[at] == table[0][at] for row in table)]
    kept = [at for at in range(len(header)) if at not in same]
    note = ", ".join(f"{header[at]} {table[0][at]}" for at in same if table[0][at] not in ("", _UNKNOWN))
    cells = [[row[at] for at in kept] for row in table]
    return _table([header[at] for at in kept], cells, note=f"All: {note}." if note else "")


def _head(run: Mapping[str, Any]) -> dict[str, Any]:
    """What stands above the charts of one run."""
    ended = run["result"].get("ended")
    lines = [run["headline"], f"{run['state']}{f' by {ended}' if ended else ''}; {run['folder']}"]
    return {"title": run["name"], "lines": lines, "tiles": _facts(run)}


def _facts(run: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The numbers of a run: name, value, remark. Of one that has not ended, those that it has logged last."""
    result, train = run["result"], run["curves"]["train"]

    def logged(name: str) -> Any:
        return train[name]["y"][-1] if name in train else None

    steps = max((curve["x"][-1] for curve in train.values()), default=0)
    best, metric, limit = result.get("best_step"), result.get("metric"), logged("memory/limit")
    value = result.get("objective_note") or _number(result["objective"] if metric else logged("loss"))
    samples = f"{result['samples']:,} samples" if "samples" in result else ""
    accumulated = f"x {result['accumulation']} accumulated" if "accumulation" in result else ""
    speed = result.get("samples_per_second") or logged("samples_per_second")
    peak = result.get("peak_memory_bytes") or logged("memory/peak")
    return [
        (metric or "last loss", value, f"best {_number(result['best_objective'])} at step {best}" if best else ""),
        ("steps", _number(result.get("steps", steps)), samples),
        ("time", _seconds(result.get("seconds")), ""),
        ("throughput", _UNKNOWN if speed is None else f"{speed:,.0f}/s", "samples"),
        ("peak memory", _bytes(peak), f"of {_bytes(limit)}" if limit else ""),
        ("micro-batch", _number(result.get("micro_size", logged("batch/micro_size"))), accumulated),
        ("OOMs", _number(result.get("oom_restarts", len(run["ooms"]))), ""),
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
        [{"text": run["name"], "color": number}, run["state"], *(value for _, value, _ in own)]
        for number, (run, own) in enumerate(zip(runs, facts, strict=True))
    ]
    return _table(["run", "state", *(name for name, _, _ in facts[0])], rows)


def _differences(runs: Sequence[Mapping[str, Any]]) -> Any:
    names = dict.fromkeys(name for run in runs for name in run["settings"])
    rows = [[name, *(run["settings"].get(name, _UNKNOWN) for run in runs)] for name in names]
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
            sizes = (_bytes(own[name]) for name in ("requested", "used", "limit"))
            ooms.append([*name, str(own["step"]), place, *sizes, own["action"], _seconds(own["seconds_lost"])])
        notes += [[*name, own["time"], own["level"].lower(), own["text"]] for own in run["notes"]]
    header = ["step", "out of memory in", "asked for", "in use", "limit", "what followed", "time lost"]
    tables = [_table([*first, *header], ooms)] if ooms else [{"kind": "text", "text": "No out-of-memory errors."}]
    return [*tables, _table([*first, "time", "level", "notes and warnings"], notes)] if notes else tables


def _section(title: str, *items: Any, note: str = "") -> Section:
    return {"title": title, "note": note, "items": items}


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]], **more: Any) -> dict[str, Any]:
    """note: a line above. folded: the title of a table that is opened by a click. marked: rows, by number."""
    return {"kind": "table", "header": header, "rows": rows, **more}


def _number(value: float | None) -> str:
    if value is None:
        return _UNKNOWN
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1e4 else f"{value:.4g}"


def _bytes(value: float | None) -> str:
    return _UNKNOWN if value is None else bytes_text(value)


def _seconds(value: float | None) -> str:
    if value is None:
        return _UNKNOWN
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
