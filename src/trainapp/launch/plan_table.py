"""After a multirun with `mode=plan`: one table over its configurations. Imports no torch."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from hydra.conf import HydraConf
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from trainapp import strict_json
from trainapp.errors import Reported, UserError
from trainapp.files import atomic_write
from trainapp.launch.one_run import Occupied
from trainapp.plan.answer import complete
from trainapp.units import bytes_text

PLAN, REFUSED = "plan.json", "refused"
_HEADER = ["job", "peak", "certainty", "largest micro-batch", "in evaluation", "overrides", "best plan, or reason"]


class PlanTable(Callback):
    """Prints the plans that the jobs of a sweep have left in their directories."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra. Plans of an earlier sweep in the same directory are not of this one."""
        self._earlier = {path: path.stat().st_mtime_ns for path in _plans(config)}

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra. Raises Reported, which Hydra passes on, if a configuration was refused."""
        plans = [path for path in _plans(config) if path.stat().st_mtime_ns != self._earlier.get(path)]
        facts = [json.loads(path.read_text()) for path in plans]
        if plans:
            print(table(_rows(plans, facts)), flush=True)
        if refused := sum(of["certainty"] == REFUSED for of in facts):
            raise Reported(UserError(f"mode=plan: {refused} of {len(plans)} configurations refused, see the table"))


def leave_refusal(run_dir: str, error: UserError, hydra: HydraConf) -> None:
    """Write why a configuration was refused in place of its plan, for the table. Where the job's directory is another
    run's, into that of the sweep, as `refused_N.json` with the number of the job.
    """
    facts, path = complete({"certainty": REFUSED, "reason": str(error)}), Path(run_dir) / PLAN
    if isinstance(error, Occupied):
        path = Path(str(hydra.sweep.dir)) / f"refused_{hydra.job.num}.json"
        facts |= {"job": str(hydra.job.num), "overrides": list(hydra.overrides.task)}
    with atomic_write(path) as file:
        file.write(strict_json.dumps(facts, indent=1) + "\n")


def _plans(config: DictConfig) -> list[Path]:
    """The plans and refusals in the sweep's directory, in the order of the jobs. Any job may be a plan."""
    folder = OmegaConf.select(config, "hydra.sweep.dir", throw_on_resolution_failure=False)
    if folder is None:
        return []
    found = {path: path.parent.name for path in Path(str(folder)).glob(f"**/{PLAN}")}
    found |= {path: path.stem.partition("_")[2] for path in Path(str(folder)).glob("refused_*.json")}
    return sorted(found, key=lambda path: (len(found[path]), found[path], path))


def _rows(plans: list[Path], facts: list[dict[str, Any]]) -> Iterator[list[str]]:
    """One per plan. Of its overrides those in which the plans differ."""
    given = [_overrides(path.parent, of) for path, of in zip(plans, facts, strict=True)]
    common = set[str]() if len(plans) == 1 else set.intersection(*map(set, given))
    for path, of, overrides in zip(plans, facts, given, strict=True):
        peak = "-" if of["peak_bytes"] is None else bytes_text(of["peak_bytes"])
        found = [of[name] for name in ("largest_micro_size", "largest_eval_micro_size")]
        sizes = ["-" if size is None else str(size) for size in found]
        shown = " ".join(text for text in overrides if text not in common)
        yield [of.get("job", path.parent.name), peak, of["certainty"], *sizes, shown, _outcome(of)]


def _overrides(folder: Path, facts: dict[str, Any]) -> list[str]:
    """Those of the job, as Hydra has written them; none with `hydra.output_subdir=null`."""
    path = folder / ".plan" / "overrides.yaml"
    written = yaml.safe_load(path.read_text()) if path.exists() else facts.get("overrides", [])
    return [text for text in written if text != "mode=plan"]


def _outcome(facts: dict[str, Any]) -> str:
    """The overrides of the best plan; why there is none."""
    best = facts["best"]
    if best is not None:
        return "nothing fits" if best["missing_bytes"] else str(best["overrides"])
    return "" if facts["peak_bytes"] is not None else "; ".join(facts["reason"].splitlines())


def table(rows: Iterable[list[str]]) -> str:
    """Columns of equal width, the last one as it is."""
    cells = [_HEADER, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(_HEADER) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in cells
    )
