"""docs/gpu.md and gpu.json: the machine, and the table of what was expected and what was found."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .plan import STEPS
from .supervise import Outcome
from .table import MEASURED, MET, MISSED, NEEDS_CUDA

HEAD = """# On a GPU

`scripts/check_gpu` runs the steps below on this machine's first GPU, each in a process of its own with a time limit, in
at most ten minutes and without network, and writes this page and `gpu.json`. It needs torch 2.11 or newer and what
the tests need. `--only NAME ...` runs some of the steps, `--out FOLDER` writes elsewhere, `--device cpu` runs what
needs no GPU, with small sizes. CUDA_VISIBLE_DEVICES chooses the GPU; nothing else should use it meanwhile. The exit
code is 0 if all that was expected was found, 1 if not, 2 if nothing could be checked, 130 after an interruption. In the
tables, what was not as expected is bold, and *(measured)* stands where nothing is expected. The steps' logs lie beside
`gpu.json`.
"""


@dataclass(frozen=True)
class Extent:
    """How much was run. device: cuda or cpu. steps: all of them; ran: those that have ended."""

    device: str
    steps: int
    ran: int
    interrupted: bool


@dataclass(frozen=True)
class Findings:
    """What the steps have found on the machine that `facts` describe."""

    facts: dict[str, Any]
    extent: Extent
    outcomes: list[Outcome]

    @property
    def counts(self) -> dict[str, int]:
        """Rows by verdict."""
        verdicts = [row.verdict for outcome in self.outcomes for row in outcome.rows]
        return {verdict: verdicts.count(verdict) for verdict in (MET, MISSED, MEASURED, NEEDS_CUDA)}

    @property
    def as_expected(self) -> bool | None:
        """None where nothing was checked or measured."""
        counts = self.counts
        return None if not counts[MET] + counts[MISSED] + counts[MEASURED] else counts[MISSED] == 0

    @property
    def summary(self) -> str:
        """One line, without a full stop."""
        counts, extent = self.counts, self.extent
        checks = counts[MET] + counts[MISSED]
        if self.as_expected is None:
            verdict = "Nothing was checked"
        elif counts[MISSED]:
            verdict = f"Not as expected: {counts[MISSED]} of {_checks(checks)}"
        else:
            verdict = f"All that was expected was found ({_checks(checks)})"
        parts = [verdict]
        if counts[NEEDS_CUDA]:
            parts.append(f"{_checks(counts[NEEDS_CUDA])} left out, for want of CUDA")
        if extent.ran < extent.steps:
            parts.append(f"{extent.ran} of {extent.steps} steps run")
        if extent.interrupted:
            parts.append("interrupted")
        return f"{'; '.join(parts)}, in {sum(outcome.seconds for outcome in self.outcomes):.0f} s"


def page(findings: Findings | None = None) -> str:
    """The Markdown page; without arguments, the one that says that nothing has run yet."""
    lines = [HEAD]
    if findings is None:
        lines += ["**Not run yet**: so far no GPU has been at hand.", "", "| step | what it checks |"]
        lines += ["|---|---|", *(f"| {step.name} | {step.about} |" for step in STEPS), ""]
        return "\n".join(lines)
    facts = {"run on": findings.extent.device, **findings.facts}
    lines += ["| what | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in facts.items()), ""]
    lines += [f"{findings.summary}.", ""]
    for outcome in findings.outcomes:
        lines += [f"## {outcome.step.name}: {outcome.step.about}", f"{outcome.seconds:.1f} s.", ""]
        lines += ["| check | expected | got |", "|---|---|---|"]
        for row in outcome.rows:
            got = f"**{_cell(row.got)}**" if row.verdict == MISSED else _cell(row.got)
            expected = "(measured)" if row.verdict == MEASURED else _cell(row.expected)
            lines.append(f"| {_cell(row.check)} | {expected} | {got} |")
        lines.append("")
    return "\n".join(lines)


def write(folder: Path, findings: Findings) -> Path:
    """Write `gpu.md` and `gpu.json`. Returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = [
        {
            "name": outcome.step.name,
            "about": outcome.step.about,
            "seconds": round(outcome.seconds, 2),
            "rows": [dataclasses.asdict(row) for row in outcome.rows],
        }
        for outcome in findings.outcomes
    ]
    facts = {"machine": findings.facts, "extent": dataclasses.asdict(findings.extent), "checks": findings.counts}
    facts |= {"as_expected": findings.as_expected, "steps": steps}
    (folder / "gpu.json").write_text(json.dumps(facts, indent=1) + "\n")
    path = folder / "gpu.md"
    path.write_text(page(findings))
    return path


def _checks(count: int) -> str:
    return f"{count} check{'s' * (count != 1)}"


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
