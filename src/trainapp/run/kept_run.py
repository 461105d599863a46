"""Whether a directory holds a run, which a plan must not write over. Imports no torch."""

import os
from pathlib import Path

import yaml

_FILES = (
    "checkpoints", "metrics.jsonl", "evaluations.jsonl", "result.json", "oom", "tensorboard", "ranks", "trainapp.log"
)  # fmt: skip


def holds_run(folder: Path) -> bool:
    """Whether this directory is that of a run: by its files, or by the configuration that Hydra has written there.

    A directory that only plans have used holds none: their files have names of their own.
    """
    return any((folder / name).exists() for name in _FILES) or _was_run(folder / ".hydra" / "config.yaml")


def runs_below(folder: Path) -> list[Path]:
    """The directories of runs in `folder`, such as the jobs of a sweep. What lies below a run is not looked at."""
    found = []
    for path, folders, _ in os.walk(folder):
        if holds_run(Path(path)):
            found.append(Path(path))
            folders.clear()
    return sorted(found)


def _was_run(configuration: Path) -> bool:
    """Whether Hydra has written this file for anything but a plan. It is there before a run's own files are."""
    if not configuration.exists():
        return False
    try:
        settings = yaml.safe_load(configuration.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return True  # a plan's is readable
    return not isinstance(settings, dict) or settings.get("mode") != "plan"
