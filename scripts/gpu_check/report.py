"""docs/gpu.md and gpu.json: the machine, and the table of what was expected and what was found."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .plan import STEPS, Step
from .table import MEASURED, MET, MISSED, NEEDS_CUDA, Row

HEAD = """# On a GPU

`scripts/check_gpu` runs the steps below on this machine's first GPU, each in a process of its own with a time limit, in
at most ten minutes and without network, and writes this page and `gpu.json`. It needs torch 2.11 or newer and what
the tests need. `--only NAME ...` runs some of the steps, `--out FOLDER` writes elsewhere, `--device cpu` runs what
needs no GPU, with small sizes. The exit code is 0 if all that was expected was found, 1 if not, 2 if nothing could be
checked, 130 after an interruption. In the tables, what was not as expected is bold, and *(measured)* stands where
nothing is expected. The steps' logs lie beside `gpu.json`.
"""


@dataclass
class Outcome:
    """How a step ended."""

    step: Step
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0

    def count(self, *verdicts: str) -> int:
        """Rows with one of these verdicts."""
        return sum(row.verdict in verdicts for row in self.rows)

    @property
    def verdict(self) -> str:
        """In a few words, for the screen."""
        expected, left_out = self.count(MET, MISSED), self.count(NEEDS_CUDA)
        if self.count(MISSED):
            return f"{self.count(MISSED)} of {expected} NOT as expected"
        if not expected:
            return "needs CUDA" if left_out else "measured"
        return f"as expected ({expected})" + (f", {left_out} need CUDA" if left_out else "")


@dataclass(frozen=True)
class Findings:
    """What the steps have found on the machine that `facts` describe. steps: how many were to run."""

    facts: dict[str, Any]
    device: str
    steps: int
    outcomes: Sequence[Outcome]

    def count(self, *verdicts: str) -> int:
        """Rows of all steps with one of these verdicts."""
        return sum(outcome.count(*verdicts) for outcome in self.outcomes)

    @property
    def as_expected(self) -> bool | None:
        """None where nothing was checked or measured."""
        return self.count(MISSED) == 0 if self.count(MET, MISSED, MEASURED) else None

    @property
    def summary(self) -> str:
        """One line, without a full stop."""
        checks = f"{self.count(MET, MISSED)} checks"
        verdict = {
            None: "Nothing was checked",
            False: f"Not as expected: {self.count(MISSED)} of {checks}",
            True: f"All that was expected was found ({checks})",
        }[self.as_expected]
        left_out = f"; {self.count(NEEDS_CUDA)} left out, for want of CUDA" if self.count(NEEDS_CUDA) else ""
        part = f"; {len(self.outcomes)} of {self.steps} steps run" if len(self.outcomes) < self.steps else ""
        return f"{verdict}{left_out}{part}, in {sum(outcome.seconds for outcome in self.outcomes):.0f} s"


def page(findings: Findings | None = None) -> str:
    """The Markdown page; without arguments, the one that says that nothing has run yet."""
    lines = [HEAD]
    if findings is None:
        lines += ["**Not run yet**: so far no GPU has been at hand.", "", "| step | what it checks |"]
        lines += ["|---|---|", *(f"| {step.name} | {step.about} |" for step in STEPS), ""]
        return "\n".join(lines)
    facts = {"run on": findings.device, **findings.facts}
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
    facts = {"machine": findings.facts, "device": findings.device, "as_expected": findings.as_expected}
    steps = [dataclasses.asdict(outcome) for outcome in findings.outcomes]
    (folder / "gpu.json").write_text(json.dumps(facts | {"steps": steps}, indent=1) + "\n")
    path = folder / "gpu.md"
    path.write_text(page(findings))
    return path


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
