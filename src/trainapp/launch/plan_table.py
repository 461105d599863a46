"""After a multirun with `mode=plan`: one table over its configurations. Imports no torch."""

import json
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from trainapp.units import bytes_text

_HEADER = ["job", "peak", "certainty", "largest micro-batch", "in evaluation", "overrides", "best plan"]


class PlanTable(Callback):
    """Prints the plans that the jobs of a sweep have left in their directories."""

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra."""
        if OmegaConf.select(config, "mode", throw_on_resolution_failure=False) != "plan":
            return
        folder = OmegaConf.select(config, "hydra.sweep.dir", throw_on_resolution_failure=False)
        plans = sorted(Path(str(folder)).glob("**/plan.json"), key=lambda path: (len(path.parent.name), path))
        if plans:
            print(table([_row(path) for path in plans]), flush=True)


def _row(path: Path) -> list[str]:
    facts = json.loads(path.read_text())
    overrides = path.parent / ".hydra" / "overrides.yaml"
    given = [line.removeprefix("- ") for line in overrides.read_text().splitlines()] if overrides.exists() else []
    peak = bytes_text(facts["peak_bytes"]) if "peak_bytes" in facts else "-"
    found = [facts.get(name) for name in ("largest_micro_size", "largest_eval_micro_size")]
    sizes = ["-" if size is None else str(size) for size in found]
    shown = " ".join(text for text in given if text != "mode=plan")
    best = facts.get("best")
    pasted = "" if best is None else "nothing fits" if best["missing_bytes"] else best["overrides"]
    return [path.parent.name, peak, facts["certainty"], *sizes, shown, pasted]


def table(rows: list[list[str]]) -> str:
    """Columns of equal width, the last one as it is."""
    widths = [max(len(row[i]) for row in [_HEADER, *rows]) for i in range(len(_HEADER) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in [_HEADER, *rows]
    )
