"""docs/gpu.md and gpu.json: the machine, and what each step has found."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .rows import Row

HEAD = """# On a GPU

`scripts/check_gpu` runs the steps below on this machine's first GPU, each in a process of its own with a time limit, in
at most ten minutes and without network, and writes this page and `gpu.json`. It needs torch 2.11 or newer and what
the tests need. `--only NAME ...` runs some of the steps, `--out FOLDER` writes elsewhere, `--device cpu` runs what
needs no GPU, with small sizes. The exit code is 0 if all checks passed, 1 if not, 2 if nothing could be checked, 130
after an interruption. What failed is bold. The steps' logs lie beside `gpu.json`.
"""
FAULTS = (Path(__file__).parent / "faults.md").read_text()


@dataclass(frozen=True)
class Step:
    """One process of pytest. seconds: its time limit on a GPU. path: in the repository; None: of its own module.
    environment: what differs in it.
    """

    name: str
    about: str
    seconds: int
    path: str | None = None
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """How a step ended."""

    step: Step
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0

    def count(self, outcome: str) -> int:
        """Rows with this outcome."""
        return sum(row.outcome == outcome for row in self.rows)

    @property
    def verdict(self) -> str:
        """In a few words, without a full stop."""
        failed, passed, skipped = map(self.count, ("failed", "passed", "skipped"))
        verdict = f"{failed} of {failed + passed} FAILED" if failed else f"{passed} passed" if passed else "nothing ran"
        return verdict + (f", {skipped} skipped" if skipped else "")


@dataclass(frozen=True)
class Findings:
    """What the steps have found on the machine that `facts` describe. steps: all that could run."""

    facts: dict[str, Any]
    device: str
    steps: Sequence[Step]
    outcomes: Sequence[Outcome]

    @property
    def whole(self) -> Outcome:
        """All steps as one."""
        rows = [row for outcome in self.outcomes for row in outcome.rows]
        return Outcome(Step("", "", 0), rows, sum(outcome.seconds for outcome in self.outcomes))

    @property
    def as_expected(self) -> bool | None:
        """None where nothing was checked."""
        whole = self.whole
        return not whole.count("failed") if whole.count("failed") + whole.count("passed") else None

    @property
    def summary(self) -> str:
        """One line, without a full stop."""
        run = len(self.outcomes)
        part = f"; {run} of {len(self.steps)} steps run" if run < len(self.steps) else ""
        return f"{self.whole.verdict}{part}, in {self.whole.seconds:.0f} s"

    def page(self) -> str:
        """In Markdown. A check that passed without having anything to show is only counted."""
        if not self.outcomes:
            steps = [f"| {step.name} | {step.about} |" for step in self.steps]
            head = "**Not run yet**: so far no GPU has been at hand.\n\n| step | what it checks |\n|---|---|"
            return "\n".join([HEAD, head, *steps, "", FAULTS])
        facts = {"run on": self.device, **self.facts}
        lines = [HEAD, "| what | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in facts.items())]
        lines += ["", f"{self.summary}.", ""]
        for outcome in self.outcomes:
            lines += [f"## {outcome.step.name}: {outcome.step.about}", f"{outcome.verdict}, {outcome.seconds:.1f} s."]
            shown = [row for row in outcome.rows if row.got]
            lines += ["", "| check | expected | got |", "|---|---|---|"] if shown else []
            for row in shown:
                got = f"**{_cell(row.got)}**" if row.outcome == "failed" else _cell(row.got)
                lines.append(f"| {_cell(row.check)} | {_cell(row.expected)} | {got} |")
            lines.append("")
        return "\n".join([*lines, FAULTS])

    def write(self, folder: Path) -> Path:
        """Write `gpu.md` and `gpu.json`. Returns the page's path."""
        folder.mkdir(parents=True, exist_ok=True)
        facts = {"machine": self.facts, "device": self.device, "as_expected": self.as_expected}
        steps = [dataclasses.asdict(outcome) for outcome in self.outcomes]
        (folder / "gpu.json").write_text(json.dumps(facts | {"steps": steps}, indent=1) + "\n")
        path = folder / "gpu.md"
        path.write_text(self.page())
        return path


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
