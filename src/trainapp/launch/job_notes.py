"""What the jobs of a multirun note for the table at its end, and the parts that such tables share. Imports no torch."""

import atexit
import json
import secrets
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainapp import strict_json
from trainapp.files import atomic_write


class JobNotes:
    """A file per job in a folder of this multirun's own, which is made by the first note and removed when this process
    ends. A launcher may run the jobs in other processes, and the sweep's directory may hold earlier sweeps.
    """

    def __init__(self, sweep_dir: Path, kind: str):
        self.sweep_dir = sweep_dir.resolve()
        self._folder = self.sweep_dir / f".{kind}-{secrets.token_hex(4)}"
        atexit.register(shutil.rmtree, self._folder, ignore_errors=True)  # Hydra skips the end after a failed job

    def write(self, config: DictConfig, facts: dict[str, Any]) -> None:
        """Replace the note of a job. config: the job's, from Hydra. Its overrides are noted with the facts."""
        given = OmegaConf.select(config, "hydra.overrides.task", throw_on_resolution_failure=False) or []
        self._folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(self._folder / str(config.hydra.job.num)) as file:
            file.write(strict_json.dumps({"job": str(config.hydra.job.num), "overrides": list(given)} | facts))

    def read(self) -> list[dict[str, Any]]:
        """In the order of the jobs; empty where they had no notes, or have left them on another machine."""
        paths = sorted(self._folder.glob("[0-9]*"), key=lambda path: int(path.name)) if self._folder.exists() else []
        return [json.loads(path.read_text()) for path in paths]


def of_sweep(config: DictConfig, kind: str) -> JobNotes | None:
    """For `on_multirun_start`. None where the sweep's directory cannot be resolved, which is reported later."""
    folder = OmegaConf.select(config, "hydra.sweep.dir", throw_on_resolution_failure=False)
    return None if folder is None else JobNotes(Path(str(folder)), kind)


def modified_ns(path: Path) -> int | None:
    """The modification time in nanoseconds; None where there is no such file."""
    return path.stat().st_mtime_ns if path.exists() else None


def differing(given: Sequence[Sequence[str]], mode: str) -> list[str]:
    """Of each job's overrides those that not all jobs have, as one text; of a single job all. mode: that of the table,
    which goes without saying.
    """
    common = {f"mode={mode}"} | (set.intersection(*map(set, given)) if len(given) > 1 else set())
    return [" ".join(text for text in own if text not in common) for own in given]


def one_line(message: str) -> str:
    """For a cell."""
    return "; ".join(line.strip() for line in message.splitlines())


def table(header: list[str], rows: Iterable[list[str]]) -> str:
    """Columns of equal width, the last one as it is."""
    cells = [header, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in cells
    )
