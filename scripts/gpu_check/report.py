"""docs/gpu.md and gpu.json: the machine, and the table of what was expected and what was found."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from .plan import STEPS
from .supervise import Outcome
from .table import MEASURED, MISSED

HEAD = """# On a GPU

`scripts/check_gpu` runs the steps below on this machine's first GPU, each in a process of its own with a time limit, in
at most ten minutes and without network, and writes this page and `gpu.json`. It needs torch 2.11 or newer and what the
tests need. `--only NAME ...` runs some of the steps, `--out FOLDER` writes elsewhere, `--device cpu` runs what needs no
GPU, with small sizes. The exit code is 0 if all that was expected was found, 1 if not.
"""


def page(facts: dict[str, Any] | None = None, outcomes: list[Outcome] | None = None) -> str:
    """The Markdown page; without arguments, the one that says that nothing has run yet."""
    lines = [HEAD]
    if facts is None or outcomes is None:
        lines += ["**Not run yet**: so far no GPU has been at hand.", "", "| step | what it checks |"]
        lines += ["|---|---|", *(f"| {step.name} | {step.about} |" for step in STEPS), ""]
        return "\n".join(lines)
    missed = sum(len(outcome.missed) for outcome in outcomes)
    rows = sum(len(outcome.rows) for outcome in outcomes)
    verdict = f"Not as expected: {missed} of {rows} rows" if missed else "All that was expected was found"
    lines += ["| what | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in facts.items()), ""]
    lines += [f"{verdict}, in {sum(outcome.seconds for outcome in outcomes):.0f} s.", ""]
    for outcome in outcomes:
        lines += [f"## {outcome.step.name}: {outcome.step.about}", f"{outcome.seconds:.1f} s.", ""]
        lines += ["| check | expected | got |", "|---|---|---|"]
        for row in outcome.rows:
            got = f"**{_cell(row.got)}**" if row.verdict == MISSED else _cell(row.got)
            expected = "(measured)" if row.verdict == MEASURED else _cell(row.expected)
            lines.append(f"| {_cell(row.check)} | {expected} | {got} |")
        lines.append("")
    return "\n".join(lines)


def write(folder: Path, facts: dict[str, Any], outcomes: list[Outcome]) -> Path:
    """Write `gpu.md` and `gpu.json`. Returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = [
        {
            "name": outcome.step.name,
            "about": outcome.step.about,
            "seconds": round(outcome.seconds, 2),
            "rows": [dataclasses.asdict(row) for row in outcome.rows],
        }
        for outcome in outcomes
    ]
    met = not any(outcome.missed for outcome in outcomes)
    text = json.dumps({"machine": facts, "as_expected": met, "steps": steps}, indent=1)
    (folder / "gpu.json").write_text(text + "\n")
    path = folder / "gpu.md"
    path.write_text(page(facts, outcomes))
    return path


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
