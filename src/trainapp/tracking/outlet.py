"""Where numbers, texts and pictures of a run go besides its own files: what `tracker=[...]` chooses.

Another one of your own is a class with these methods, those that it needs. It is built on every rank and used on rank 0
alone. Whatever it raises is logged once; then the run continues without it.
"""

import contextlib
import copy
import dataclasses
import inspect
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainapp.errors import UserError
from trainapp.files import atomic_write

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """What an outlet is told when the run begins or resumes.

    step: finished steps; later ones may have been recorded before and come again. continues: False where the run only
    looks at a checkpoint. config: every setting, as plain containers. complain: takes a path and the error with which
    it cannot be written, and says so once.
    """

    run_dir: Path
    step: int
    config: Mapping[str, Any]
    continues: bool
    complain: Callable[[Path, Exception], None]


class Outlet:
    """Does nothing with what it gets."""

    package: str | None = None  # that must be installed

    def start(self, start: Start) -> None:
        """Open. The same run continues where `run_dir` has been used before."""

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        """group: "train", "eval", or what a callback says. Names with a `/` are complete without it."""

    def text(self, tag: str, text: str, step: int) -> None:
        """A note, or a table, in Markdown."""

    def image(self, tag: str, path: Path, step: int) -> None:
        """A PNG file."""

    def flush(self) -> None:
        """Write what is queued."""

    def close(self) -> None:
        """The end of this process's part of the run."""


def require_methods(outlet: Any, setting: str) -> None:
    """Raises UserError for a method that cannot be called as `Outlet`'s are."""
    for name, of_base in inspect.getmembers(Outlet, inspect.isfunction):
        own = getattr(outlet, name, None)
        with contextlib.suppress(TypeError, ValueError):  # neither its signature nor a misfit can be known
            wanted = list(inspect.signature(of_base).parameters)[1:]
            taken = inspect.signature(own)  # type: ignore[arg-type]
            try:
                taken.bind(*wanted)
            except TypeError:
                raise UserError(
                    f"{setting}: {type(outlet).__name__}.{name}{taken} is called as {name}({', '.join(wanted)}); give "
                    "it these parameters"
                ) from None


class Guarded:
    """An outlet that cannot stop a run: after an error it is not called again, and a warning says so."""

    def __init__(self, name: str, outlet: Any):
        self.name, self._outlet = name, outlet

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method that the outlet may have. It gets copies of numbers and settings."""
        function = getattr(self._outlet, method, None)
        if function is None:
            return
        try:
            function(*map(_own_copy, arguments))
        except Exception as error:
            self._outlet = None
            reason = str(error).strip().partition("\n")[0] or "no message"
            log.warning(
                "tracker.%s failed in %s (%s: %s); the run continues without it",
                self.name,
                method,
                type(error).__name__,
                reason,
            )


def _own_copy(argument: Any) -> Any:
    if isinstance(argument, Start):
        return dataclasses.replace(argument, config=copy.deepcopy(dict(argument.config)))
    return dict(argument) if isinstance(argument, Mapping) else argument


def tagged(group: str, values: Mapping[str, float]) -> dict[str, float]:
    """The values by their full names."""
    return {name if "/" in name else f"{group}/{name}": value for name, value in values.items()}


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by their dotted names."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        found |= flattened(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return found


class ServiceRecord:
    """What an outlet must know again when the run is resumed, such as a service's id: a file in the run directory."""

    def __init__(self, run_dir: Path, name: str):
        self._path = run_dir / "trackers" / f"{name}.json"

    def read(self) -> dict[str, Any]:
        """Empty where nothing was written, or cannot be read any more."""
        try:
            kept = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return kept if isinstance(kept, dict) else {}

    def write(self, values: Mapping[str, Any]) -> None:
        """Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self._path) as file:
            json.dump(dict(values), file)
