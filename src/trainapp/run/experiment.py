"""A run directory belongs to one experiment: that of the settings that its run began with. Imports no torch.

`experiment.json` records them at the start. It counts as long as there is a checkpoint or a result: until then a new
run replaces it.
"""

import inspect
import json
import logging
import os
from pathlib import Path
from typing import Any

from trainapp import strict_json
from trainapp.config import identity, targets
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.files import atomic_write

RECORD = "experiment.json"
RESULT = "result.json"
log = logging.getLogger(__name__)


def require_same(config: Config, looks_up_defaults: bool = True) -> None:
    """Raises UserError, with all differences, if the run directory holds a run of another experiment.

    Training only: evaluation and export write nothing of a run. looks_up_defaults: also compares an argument that
    only one of the two names with its constructor's default, for which the constructor's module is imported.
    """
    run_dir = Path(config.run_dir)
    if config.mode != "train" or not _holds_run(run_dir):
        return
    before = _record(run_dir) or _of_newest_checkpoint(run_dir)
    if before is None:
        if looks_up_defaults:  # the early call without it stays silent: warn once
            log.warning("%s has no record of its run's settings: an older version wrote it", run_dir)
        return

    def default(section: str, target: str, argument: str) -> Any:
        return _default(config, section, target, argument)

    changed = identity.differences(before, config.to_dict(), default if looks_up_defaults else None)
    if changed:
        listed = "\n".join(
            f"  {name}: {identity.text_of(old)} before, {identity.text_of(new)} now" for name, old, new in changed
        )
        raise UserError(
            f"hydra.run.dir={run_dir}: this directory belongs to a run of other settings, which change the result:\n"
            f"{listed}\n"
            "choose another directory (of a sweep, hydra.sweep.dir); to continue that run there with the new settings, "
            f"also set checkpointing.resume={run_dir}, and checkpointing.load=weights to take its weights alone"
        )


def remember(config: Config) -> None:
    """Record the settings of a run that begins in its directory. No effect on one that continues there.

    config: as the user gave it. Warns if the directory cannot be written to.
    """
    run_dir = Path(config.run_dir)
    if _holds_run(run_dir) and _record(run_dir) is not None:
        return
    settings = {name: value for name, value in config.to_dict().items() if name not in identity.NOT_SETTINGS}
    try:
        with atomic_write(run_dir / RECORD) as file:
            file.write(strict_json.dumps({"settings": settings}, indent=1, default=str) + "\n")
    except OSError as error:
        log.warning("%s cannot be written: %s; later runs here are not compared with this one", RECORD, error)


def _holds_run(run_dir: Path) -> bool:
    return os.path.exists(run_dir / RESULT) or bool(_manifests(run_dir))


def _manifests(run_dir: Path) -> list[Path]:
    """Those of the checkpoints, newest first."""
    found = (run_dir / "checkpoints").glob("step_*/manifest.json")
    return sorted((path for path in found if path.parent.name[5:].isdecimal()), key=_step, reverse=True)


def _step(manifest: Path) -> int:
    return int(manifest.parent.name[5:])


def _record(run_dir: Path) -> dict[str, Any] | None:
    return _read(run_dir / RECORD, "settings")


def _of_newest_checkpoint(run_dir: Path) -> dict[str, Any] | None:
    """Of a run without a record, by an older version. Not verified: a damaged checkpoint is reported elsewhere."""
    return next((found for path in _manifests(run_dir) if (found := _read(path, "config")) is not None), None)


def _read(path: Path, part: str) -> dict[str, Any] | None:
    """A part of a JSON file that has the settings of a run, None where it has none."""
    try:
        content = json.loads(path.read_bytes())
        settings = content[part]
        return settings if isinstance(settings, dict) and identity.settings(settings) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _default(config: Config, section: str, target: str, argument: str) -> Any:
    """The default of a constructor's parameter; ABSENT where it has none that can be read."""
    try:
        located = targets.locate(target, f"{section}._target_", config.user_packages)
        default = inspect.signature(located).parameters[argument].default
    except (UserError, KeyError, TypeError, ValueError):
        return identity.ABSENT
    if default is inspect.Parameter.empty:
        return identity.ABSENT
    return json.loads(strict_json.dumps(default, default=str))  # as settings are: no tuples
