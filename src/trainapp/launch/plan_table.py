"""After a multirun with `mode=plan`: one table over its configurations. Imports no torch."""

import json
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from trainapp import strict_json
from trainapp.errors import Reported, UserError
from trainapp.files import atomic_write
from trainapp.launch import job_notes
from trainapp.launch.job_notes import modified_ns
from trainapp.launch.one_run import Occupied, is_plan
from trainapp.planning.answer import complete
from trainapp.units import bytes_text

PLAN, REFUSED = "plan.json", "refused"
_HEADER = ["job", "peak", "certainty", "largest micro-batch", "in evaluation", "overrides", "best plan, or reason"]


class PlanTable(Callback):
    """Prints the plans that the jobs of a sweep have left in their directories.

    Each job that is a plan notes its file: a launcher may run it in another process, to which it sends this object.
    """

    def __init__(self) -> None:
        self._notes: job_notes.JobNotes | None = None  # None outside a multirun
        self._before: dict[Path, int | None] = {}

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra."""
        self._notes = job_notes.of_sweep(config, "plans")

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra, in the job's process. A file that is there already is an earlier sweep's."""
        if self._notes is not None and is_plan(config):
            self._before |= {path: modified_ns(path) for path in _files(config)}

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        """Called by Hydra, in the job's process."""
        if self._notes is None or not is_plan(config):
            return
        written = [path for path in _files(config) if modified_ns(path) not in (None, self._before.get(path))]
        if written:
            self._notes.write(config, {"plan": str(written[0])})

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra. Raises Reported, which Hydra passes on, if a configuration was refused."""
        notes = self._notes.read() if self._notes is not None else []
        given = {Path(note["plan"]): note["overrides"] for note in notes}  # jobs may share a directory
        plans = {path: facts for path in given if (facts := _plan(path)) is not None}
        if plans:
            shown = job_notes.differing([given[path] for path in plans], "plan")
            rows = [_row(path, of, text) for (path, of), text in zip(plans.items(), shown, strict=True)]
            print(job_notes.table(_HEADER, rows), flush=True)
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


def _plan(path: Path) -> dict[str, Any] | None:
    """The plan, or None where another program has written, or removed, the file."""
    try:
        facts = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) and facts.keys() >= complete({}).keys() else None


def _row(path: Path, facts: dict[str, Any], overrides: str) -> list[str]:
    peak = "-" if facts["peak_bytes"] is None else bytes_text(facts["peak_bytes"])
    found = [facts[name] for name in ("largest_micro_size", "largest_eval_micro_size")]
    sizes = ["-" if size is None else str(size) for size in found]
    return [facts.get("job", path.parent.name), peak, facts["certainty"], *sizes, overrides, _outcome(facts)]


def _outcome(facts: dict[str, Any]) -> str:
    """The overrides of the best plan; why there is none."""
    best = facts["best"]
    if best is not None:
        return "nothing fits" if best["missing_bytes"] else str(best["overrides"])
    return "" if facts["peak_bytes"] is not None else job_notes.one_line(facts["reason"])
