"""Whether a directory holds a run, which a plan must not write over. Imports no torch."""

import itertools
import os
from pathlib import Path

import yaml

_FILES = (
    "checkpoints", "metrics.jsonl", "evaluations.jsonl", "result.json", "oom", "tensorboard", "ranks", "trainapp.log"
)  # fmt: skip
_CONFIGURATION = ".hydra/config.yaml"
_LEVELS, _ENTRIES = 3, 1000  # of the search for runs


def trace_of_run(folder: Path) -> str | None:
    """What shows that this directory is that of a run, None if it is not: the name of a file that runs write, or of the
    configuration that Hydra has written there.

    A directory that only plans have used holds none: their files have names of their own.
    """
    left = next((name for name in _FILES if os.path.exists(folder / name)), None)
    return left or (_CONFIGURATION if _was_run(folder / _CONFIGURATION) else None)


def runs_below(folder: Path) -> dict[Path, str]:
    """The directories of runs in `folder`, such as the jobs of a sweep, with what shows it of each.

    What lies below a run is not looked at. Nor is all of a large tree, such as a home directory: the search ends three
    levels down, and after a thousand entries.
    """
    found, level, remaining = {}, [folder], _ENTRIES
    for depth in range(_LEVELS + 1):
        below: list[Path] = []
        for path in level:
            if trace := trace_of_run(path):
                found[path] = trace
            elif depth < _LEVELS and remaining > 0:
                entries = _entries(path, remaining)
                remaining -= len(entries)
                below += [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
        level = below
    return dict(sorted(found.items()))


def _entries(folder: Path, most: int) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(itertools.islice(entries, most))
    except OSError:  # not there yet, or not readable
        return []


def _was_run(configuration: Path) -> bool:
    """Whether Hydra has written this file for anything but a plan. It is there before a run's own files are."""
    if not os.path.exists(configuration):
        return False
    try:
        settings = yaml.safe_load(configuration.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return True  # a plan's is readable
    return not isinstance(settings, dict) or settings.get("mode") != "plan"
