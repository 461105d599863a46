"""Whether the data of an interrupted prediction is still the same: from the sizes and times of its files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any


def data_facts(settings: Any) -> dict[str, Any]:
    """Plain values: size and time of the files that `settings` names."""
    return {"files": {str(path): _stamp(path) for path in _files(settings)}}


def _files(settings: Any) -> Iterator[Path]:
    if isinstance(settings, dict):
        for value in settings.values():
            yield from _files(value)
    elif isinstance(settings, (list, tuple)):
        for value in settings:
            yield from _files(value)
    elif isinstance(settings, str) and 0 < len(settings) < 4096 and "\0" not in settings:
        try:
            path = Path(settings).expanduser()
            if path.is_file():
                yield path.resolve()
        except (OSError, RuntimeError):  # no path: a name too long for a file, or `~NAME` without such a user
            pass


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]
