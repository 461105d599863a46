"""Where metrics go: metrics.jsonl in the run directory, the outlets of `tracker`, a line or progress bar on the
terminal.
"""

import contextlib
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainapp.files import atomic_write
from trainapp.memory.timeline import Drawing, Picture
from trainapp.tracking.console import Progress
from trainapp.tracking.outlet import Guarded, Start
from trainapp.tracking.records import Complaints, JsonLines
from trainapp.tracking.tensorboard import TensorBoard
from trainapp.units import bytes_text

METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
RESULT = "result.json"
MOST_SHOWN = 12  # numbers of an evaluation on the terminal; a metric may have one for each of 100 classes
log = logging.getLogger(__name__)


class Tracker:
    """Writes the run's numbers. A resumed run continues after `step`.

    total: the run's steps for the progress bar, or None. continues: False only adds to what is there, for a run that
    looks at a checkpoint and trains nothing. outlets: by name; None: TensorBoard. has_numbers: whether there are
    numbers to be written to files.
    """

    def __init__(
        self,
        run_dir: Path,
        step: int,
        total: int | None,
        config: Mapping[str, Any],
        continues: bool = True,
        outlets: Mapping[str, Any] | None = None,
        has_numbers: bool = True,
    ):
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir, self.complain = run_dir, Complaints()
        if continues:
            for name in (METRICS, EVALUATIONS):
                try:
                    _forget_after(run_dir / name, step)
                except OSError as error:
                    self.complain(run_dir / name, error)
        self._metrics, self._evaluations = (
            JsonLines(run_dir / name if has_numbers else None, self.complain) for name in (METRICS, EVALUATIONS)
        )
        chosen = {"tensorboard": TensorBoard()} if outlets is None else outlets
        self._outlets = [Guarded(name, outlet) for name, outlet in chosen.items()]
        self._tell("start", Start(run_dir, step, config, continues, self.complain))
        self._noted: set[str] = set()
        self._pictures: list[tuple[str, int, Picture]] = []
        self._drawing: Drawing | None = None  # of the first `_drawn` pictures
        self._drawn = 0
        self.progress = Progress(total, step)

    def log(self, step: int, samples: int, scalars: Mapping[str, float], metric: str) -> None:
        """One log step: every scalar to the outlets and the file, the main ones to the terminal."""
        self._metrics.append({"step": step, "samples": samples, **scalars})
        self.scalars(scalars, step, "train")
        self._draw()
        shown = {"loss": f"{scalars['loss']:.4f}"}
        if metric in scalars:
            shown[metric] = f"{scalars[metric]:.3f}"
        shown["samples/s"] = f"{scalars['samples_per_second']:.0f}"
        peak, limit = scalars["memory/peak"], scalars["memory/limit"]
        shown["memory"] = f"{bytes_text(peak)} / {bytes_text(limit)}"
        self.progress.show(step, shown)

    def evaluated(self, step: int, samples: int, scalars: Mapping[str, float]) -> None:
        """Record one evaluation."""
        self._evaluations.append({"step": step, "samples": samples, **scalars})
        self.scalars(scalars, step, "eval")
        shown = [f"{name} {value:.4f}" for name, value in scalars.items()]
        more = [f"and {len(shown) - MOST_SHOWN} more"] if len(shown) > MOST_SHOWN else []
        log.info("step %d evaluated | %s", step, " | ".join(shown[:MOST_SHOWN] + more))

    def scalars(self, values: Mapping[str, float], step: int, group: str = "callbacks") -> None:
        """Numbers to the outlets alone; those of log steps and evaluations have their files, too."""
        self._tell("scalars", group, values, step)

    def text(self, tag: str, text: str, step: int) -> None:
        """A text in Markdown, to the outlets."""
        self._tell("text", tag, text, step)

    def image(self, tag: str, path: Path, step: int) -> None:
        """A PNG file that exists, to the outlets."""
        self._tell("image", tag, path, step)

    def _tell(self, method: str, *arguments: Any) -> None:
        for outlet in self._outlets:
            outlet.call(method, *arguments)

    def note(self, text: str, tag: str = "notes") -> None:
        """Something that happened: on the terminal, and as text to the outlets."""
        log.info("%s", text)
        self.text(tag, text, self.progress.step)

    def note_once(self, text: str, topic: str) -> None:
        """A note that is written at most once per run and topic."""
        if topic not in self._noted:
            self._noted.add(topic)
            self.note(text)

    def incident(self, text: str, step: int) -> None:
        """The record of an out-of-memory error, flushed at once."""
        self.text("out_of_memory", text, step)
        self._tell("flush")

    def picture(self, tag: str, picture: Picture, step: int) -> None:
        """Queue a picture: drawn in the background after the next log step, together with all others queued."""
        self._pictures.append((tag, step, picture))

    def _draw(self) -> None:
        """Pass finished pictures to the outlets and start drawing queued ones."""
        if self._drawing is not None and self._drawing.ended:
            for tag, step, picture in self._pictures[: self._drawn]:
                self.image(tag, picture.path, step)
            self._pictures, self._drawing = self._pictures[self._drawn :], None
        if self._pictures and self._drawing is None:
            try:
                self._drawing = Drawing([picture for _, _, picture in self._pictures])
                self._drawn = len(self._pictures)
            except OSError as error:  # the run matters more than its record
                self.complain(self._pictures[0][2].path, error)
                self._pictures.clear()

    def close(self) -> None:
        """Flush everything to disk."""
        while self._pictures:
            if self._drawing is not None:
                self._drawing.wait()
            self._draw()
        self.progress.close()
        self._tell("close")
        self._metrics.close()
        self._evaluations.close()


class SilentTracker:
    """For ranks other than 0: writes nothing but pictures, which go next to the incident reports."""

    def __init__(self, run_dir: Path, *_: Any):
        self.run_dir, self.complain = run_dir, Complaints()
        self.progress = SilentProgress()
        self._pictures: list[Picture] = []

    def picture(self, tag: str, picture: Picture, step: int) -> None:
        """Queue a picture: drawn when the run closes."""
        self._pictures.append(picture)

    def close(self) -> None:
        """Draw the pictures."""
        with contextlib.suppress(OSError):
            if self._pictures:
                Drawing(self._pictures).wait()

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    log = evaluated = scalars = text = image = note = note_once = incident = _nothing


class SilentProgress:
    """A progress bar that shows nothing."""

    def advance(self, step: int) -> None:
        """Does nothing."""

    def pause(self, seconds: float) -> None:
        """Does nothing."""

    def set_total(self, total: int | None) -> None:
        """Does nothing."""


def _forget_after(path: Path, step: int) -> None:
    """Drop the lines of steps that will be repeated: those after the checkpoint."""
    if not path.exists():
        return
    kept = [line for line in path.read_text().splitlines(keepends=True) if _step_of(line) <= step]
    with atomic_write(path) as file:
        file.writelines(kept)


def _step_of(line: str) -> float:
    """The step of a line; infinity for a half-written line or one that is not JSON."""
    try:
        return json.loads(line)["step"] if line.endswith("\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf
