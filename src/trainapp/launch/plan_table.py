"""After a multirun with `mode=plan`: one table over its configurations. Imports no torch."""

import atexit
import json
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from hydra.conf import HydraConf
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from trainapp import strict_json
from trainapp.errors import Reported, UserError
from trainapp.files import atomic_write
from trainapp.launch.one_run import Occupied, is_plan
from trainapp.plan.answer import complete
from trainapp.units import bytes_text

PLAN, REFUSED = "plan.json", "refused"
_HEADER = ["job", "peak", "certainty", "largest micro-batch", "in evaluation", "overrides", "best plan, or reason"]


class PlanTable(Callback):
    """Prints the plans that the jobs of a sweep have left in their directories.

    Each job that is a plan notes its file in a folder of this sweep's own: a launcher may run it in another process, to
    which it sends this object, and the sweep's directory may be a large tree that holds other plans.
    """

    def __init__(self) -> None:
        self._notes: Path | None = None  # None outside a multirun
        self._before: dict[Path, int | None] = {}

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra. The folder is made by the first job that has something to note."""
        folder = OmegaConf.select(config, "hydra.sweep.dir", throw_on_resolution_failure=False)
        if folder is not None:
            self._notes = Path(str(folder)).resolve() / f".plans-{secrets.token_hex(4)}"
            atexit.register(shutil.rmtree, self._notes, ignore_errors=True)  # Hydra skips the end after a failed job

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra, in the job's process. A file that is there already is an earlier sweep's."""
        if self._notes is not None and is_plan(config):
            self._before |= {path: _changed(path) for path in _files(config)}

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        """Called by Hydra, in the job's process."""
        if self._notes is None or not is_plan(config):
            return
        written = [path for path in _files(config) if _changed(path) not in (None, self._before.get(path))]
        if written:
            self._notes.mkdir(parents=True, exist_ok=True)
            with atomic_write(self._notes / str(config.hydra.job.num)) as file:
                file.write(json.dumps(str(written[0])))

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra. Raises Reported, which Hydra passes on, if a configuration was refused."""
        if self._notes is None or not self._notes.exists():
            return
        notes = sorted(self._notes.glob("[0-9]*"), key=lambda note: int(note.name))
        paths = dict.fromkeys(Path(json.loads(note.read_text())) for note in notes)  # jobs may share a directory
        plans = {path: facts for path in paths if (facts := _plan(path)) is not None}
        if plans:
            print(table(_rows(list(plans), list(plans.values()))), flush=True)
        if refused := sum(of["certainty"] == REFUSED for of in plans.values()):
            raise Reported(UserError(f"mode=plan: {refused} of {len(plans)} configurations refused, see the table"))


def leave_refusal(run_dir: str, error: UserError, hydra: HydraConf) -> None:
    """Write why a configuration was refused in place of its plan, for the table. Where the job's directory is another
    run's, into that of the sweep, as `refused_N.json` with the number of the job.
    """
    facts, path = complete({"certainty": REFUSED, "reason": str(error)}), Path(run_dir) / PLAN
    if isinstance(error, Occupied):
        path = _elsewhere(hydra)
        facts |= {"job": str(hydra.job.num), "overrides": list(hydra.overrides.task)}
    with atomic_write(path) as file:
        file.write(strict_json.dumps(facts, indent=1) + "\n")


def _elsewhere(hydra: Any) -> Path:
    """Where the refusal of a job goes whose directory is another run's."""
    return Path(str(hydra.sweep.dir)).resolve() / f"refused_{hydra.job.num}.json"


def _files(config: DictConfig) -> tuple[Path, Path]:
    """What a job may leave. Its refusal comes first: the plan in its directory is then another run's."""
    return _elsewhere(config.hydra), Path(str(config.hydra.runtime.output_dir)) / PLAN


def _changed(path: Path) -> int | None:
    """When, in nanoseconds; None where there is no such file."""
    return path.stat().st_mtime_ns if path.exists() else None


def _plan(path: Path) -> dict[str, Any] | None:
    """The plan, or None where another program has written, or removed, the file."""
    try:
        facts = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) and facts.keys() >= complete({}).keys() else None


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
