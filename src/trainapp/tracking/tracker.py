"""Records metrics: in metrics.jsonl in the run directory, with the loggers of `tracker`, and on the terminal as a line
or progress bar. A full disk loses lines of the record, but does not end the run.
"""

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainapp.files import atomic_write, json_lines, strict_json
from trainapp.memory.picture import Picture, draw
from trainapp.tracking.loggers import Logger, Start
from trainapp.tracking.terminal import Progress, bar_of
from trainapp.units import bytes_text

METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
CALLBACKS = "callbacks.jsonl"
RESULT = "result.json"
MOST_SHOWN = 12  # values of an evaluation on the terminal; a metric may have one per class
log = logging.getLogger(__name__)


class Tracker:
    """Records the run's metrics. A resumed run continues after `start.step`; without `continues` all lines are kept.

    total: the run's steps for the progress bar, or None. loggers: by name.
    """

    def __init__(self, start: Start, total: int | None = None, loggers: Mapping[str, Any] | None = None):
        start.run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir, self.progress = start.run_dir, Progress(total, start.step)
        self._warned: set[str] = set()
        self._pictures: list[tuple[str, int, Picture]] = []
        self.loggers: Mapping[str, Logger] = loggers or {}
        self._working = dict(self.loggers)
        self._tell("start", start)
        for path in [self.run_dir / name for name in (METRICS, EVALUATIONS, CALLBACKS)] if start.continues else ():
            try:
                _forget_after(path, start.step)
            except OSError as error:
                self.unwritable(path, error)

    def log(self, step: int, samples: int, scalars: Mapping[str, float], metric: str) -> None:
        """Record a log step: every scalar in the file and the loggers, the main ones on the terminal."""
        self._record(METRICS, {"step": step, "samples": samples, **scalars})
        self.scalars(scalars, step, "train")
        shown = {"loss": f"{scalars['loss']:.4f}"}
        if metric in scalars:
            shown[metric] = f"{scalars[metric]:.3f}"
        shown["samples/s"] = f"{scalars['samples_per_second']:.0f}"
        peak, limit = scalars["memory/peak"], scalars["memory/limit"]
        shown["memory"] = f"{bytes_text(peak)} / {bytes_text(limit)}"
        if self.progress.live:
            shown["memory"] = f"{bar_of(peak / limit)} {shown['memory']}"
        self.progress.show(step, shown)

    def evaluated(self, step: int, samples: int, scalars: Mapping[str, float]) -> None:
        """Record one evaluation."""
        self._record(EVALUATIONS, {"step": step, "samples": samples, **scalars})
        self.scalars(scalars, step, "eval")
        shown = [f"{name} {value:.4f}" for name, value in scalars.items()]
        more = [f"and {len(shown) - MOST_SHOWN} more"] if len(shown) > MOST_SHOWN else []
        log.info("step %d evaluated | %s", step, " | ".join(shown[:MOST_SHOWN] + more))

    def _record(self, name: str, facts: Mapping[str, Any]) -> None:
        """Append a line. Tried again after an error: the disk may have room again."""
        try:
            with (self.run_dir / name).open("a") as file:
                file.write(strict_json(facts) + "\n")
        except OSError as error:
            self.unwritable(self.run_dir / name, error)

    def scalars(self, values: Mapping[str, float], step: int, group: str = "callbacks") -> None:
        """Send scalars to the loggers; those of callbacks are also lines of callbacks.jsonl."""
        if group == "callbacks":
            self._record(CALLBACKS, {"step": step} | {name: float(value) for name, value in values.items()})
        self._tell("scalars", group, values, step)

    def text(self, tag: str, text: str, step: int) -> None:
        """Send a Markdown text to the loggers."""
        self._tell("text", tag, text, step)

    def image(self, tag: str, path: Path, step: int) -> None:
        """Send a PNG file to the loggers, unless it could not be drawn."""
        if path.is_file():
            self._tell("image", tag, path, step)

    def _tell(self, method: str, *arguments: Any) -> None:
        """Call a method of the loggers that have it. After an error a logger is not called again."""
        for name, logger in list(self._working.items()):
            try:
                if function := getattr(logger, method, None):
                    function(*arguments)
            except Exception as error:
                del self._working[name]
                reason = str(error).strip().partition("\n")[0] or "no message"
                text = "tracker.%s failed in %s (%s: %s); the run continues without it"
                log.warning(text, name, method, type(error).__name__, reason)

    def note(self, text: str) -> None:
        """Report an event, on the terminal and as text to the loggers."""
        log.info("%s", text)
        self.text("notes", text, self.progress.step)

    def warn_once(self, text: str, topic: str) -> None:
        """Log a warning, also as a note to the loggers, at most once per run and topic."""
        if topic not in self._warned:
            self._warned.add(topic)
            log.warning("%s", text)
            self.text("notes", text, self.progress.step)

    def unwritable(self, path: Path, error: Exception) -> None:
        """Warn once that a file, or a folder of similar files, cannot be written."""
        self.warn_once(f"{path} cannot be written ({error}); the run continues without what belongs there", str(path))

    def picture(self, tag: str, picture: Picture, step: int) -> None:
        """Queue a plot, to be drawn when the run closes."""
        self._pictures.append((tag, step, picture))

    def close(self) -> None:
        """Draw the plots, and flush everything to disk."""
        for tag, step, picture in self._pictures:
            try:
                draw(picture)
            except (OSError, MemoryError) as error:  # the run is more important than its record
                self.unwritable(picture.path, error)
            self.image(tag, picture.path, step)
        self.progress.close()
        self._tell("close")


class SilentTracker(Tracker):
    """For ranks other than 0: writes only plots, next to the reports of errors."""

    def __init__(self, run_dir: Path, loggers: Mapping[str, Logger] | None = None):
        self.run_dir, self.loggers, self.progress = run_dir, loggers or {}, Progress(None, 0, is_silent=True)
        self._working, self._pictures = {}, []

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    log = evaluated = scalars = text = image = note = warn_once = unwritable = _nothing


def _forget_after(path: Path, step: int) -> None:
    """Drop the lines after the checkpoint, whose steps will be repeated. A new run has no file yet."""
    if not path.exists():
        return
    kept = [facts for facts in json_lines(path) if facts.get("step", math.inf) <= step]
    with atomic_write(path) as file:
        file.writelines(json.dumps(facts) + "\n" for facts in kept)
