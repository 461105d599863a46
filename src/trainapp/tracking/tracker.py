"""The record of a run's metrics: files in the run directory, the loggers of `tracker`, and the terminal.

A full disk loses lines of the record, but does not end the run.
"""

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainapp.files import CALLBACKS, EVALUATIONS, METRICS, atomic_write, json_lines, strict_json
from trainapp.memory.picture import Picture, draw
from trainapp.tracking.loggers import Logger, Start
from trainapp.tracking.terminal import Progress, bar_text
from trainapp.units import bytes_text

MOST_SHOWN = 12  # values of an evaluation on the terminal; a metric may have one per class
log = logging.getLogger(__name__)


class Tracker:
    """The record of a run's metrics.

    Args:
        start: what loggers are told. A resumed run continues after `start.step`; without `continues`, later lines of
            the record are left in place, too.
        total: the run's steps for the progress bar, or None.
        loggers: by name.
    """

    def __init__(self, start: Start, total: int | None = None, loggers: Mapping[str, Any] | None = None):
        start.run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir = start.run_dir
        self.progress = Progress(total, start.step)
        self._warned: set[str] = set()  # topics of `warn_once`
        self._pictures: list[tuple[str, int, Picture]] = []  # tag, step, plot: to be drawn at the end
        self.loggers: Mapping[str, Logger] = loggers or {}
        self._working_loggers = dict(self.loggers)
        self._call_loggers("start", start)
        if start.continues:
            self._drop_repeated_lines(start.step)

    def _drop_repeated_lines(self, step: int) -> None:
        """Drop the record's lines after the checkpoint, whose steps will be repeated."""
        for name in (METRICS, EVALUATIONS, CALLBACKS):
            path = self.run_dir / name
            try:
                _drop_lines_after(path, step)
            except OSError as error:
                self.warn_unwritable(path, error)

    def log_step(self, step: int, samples: int, scalars: Mapping[str, float], metric: str) -> None:
        """Record a log step: every scalar in the file and the loggers, the main ones on the terminal.

        Args:
            step: finished steps.
            samples: trained samples.
            scalars: by name.
            metric: one that is also shown on the terminal, if the step has it: the objective.
        """
        self._append(METRICS, {"step": step, "samples": samples, **scalars})
        self.scalars(scalars, step, "train")

        shown = {"loss": f"{scalars['loss']:.4f}"}
        if metric in scalars:
            shown[metric] = f"{scalars[metric]:.3f}"
        shown["samples/s"] = f"{scalars['samples_per_second']:.0f}"
        shown["memory"] = self._memory_text(scalars["memory/peak"], scalars["memory/limit"])
        self.progress.show(step, shown)

    def _memory_text(self, peak: float, limit: float) -> str:
        text = f"{bytes_text(peak)} / {bytes_text(limit)}"
        if self.progress.live:
            text = f"{bar_text(peak / limit)} {text}"
        return text

    def log_evaluation(self, step: int, samples: int, scalars: Mapping[str, float]) -> None:
        """Record one evaluation."""
        self._append(EVALUATIONS, {"step": step, "samples": samples, **scalars})
        self.scalars(scalars, step, "eval")

        texts = [f"{name} {value:.4f}" for name, value in scalars.items()]
        shown = texts[:MOST_SHOWN]
        if len(texts) > MOST_SHOWN:
            shown.append(f"and {len(texts) - MOST_SHOWN} more")
        shown_text = " | ".join(shown)
        log.info("step %d evaluated | %s", step, shown_text)

    def scalars(self, values: Mapping[str, float], step: int, group: str = "callbacks") -> None:
        """Send scalars to the loggers; those of callbacks are also lines of callbacks.jsonl."""
        if group == "callbacks":
            numbers = {name: float(value) for name, value in values.items()}
            self._append(CALLBACKS, {"step": step, **numbers})
        self._call_loggers("scalars", group, values, step)

    def _append(self, name: str, facts: Mapping[str, Any]) -> None:
        """Append a line to a file of the record. Later lines are tried after an error: the disk may have room again."""
        path = self.run_dir / name
        try:
            with path.open("a") as file:
                file.write(strict_json(facts) + "\n")
        except OSError as error:
            self.warn_unwritable(path, error)

    def text(self, tag: str, text: str, step: int) -> None:
        """Send a Markdown text to the loggers."""
        self._call_loggers("text", tag, text, step)

    def image(self, tag: str, path: Path, step: int) -> None:
        """Send a PNG file to the loggers, unless it could not be drawn."""
        if path.is_file():
            self._call_loggers("image", tag, path, step)

    def _call_loggers(self, method: str, *arguments: Any) -> None:
        """Call a method of the loggers that have it. After an error a logger is not called again."""
        for name, logger in list(self._working_loggers.items()):
            try:
                bound_method = getattr(logger, method, None)
                if bound_method:
                    bound_method(*arguments)
            except Exception as error:
                del self._working_loggers[name]
                first_line = str(error).strip().partition("\n")[0]
                reason = first_line or "no message"
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

    def warn_unwritable(self, path: Path, error: Exception) -> None:
        """Warn once that a file, or a folder of similar files, cannot be written."""
        self.warn_once(f"{path} cannot be written ({error}); the run continues without what belongs there", str(path))

    def queue_picture(self, tag: str, picture: Picture, step: int) -> None:
        """Queue a plot, to be drawn when the run closes."""
        self._pictures.append((tag, step, picture))

    def close(self) -> None:
        """Draw the plots, and flush everything to disk."""
        for tag, step, picture in self._pictures:
            try:
                draw(picture)
            except (OSError, MemoryError) as error:  # the run is more important than its record
                self.warn_unwritable(picture.path, error)
            self.image(tag, picture.path, step)
        self.progress.close()
        self._call_loggers("close")


class SilentTracker(Tracker):
    """The tracker of ranks other than 0, which writes only plots, next to the reports of errors."""

    def __init__(self, run_dir: Path, loggers: Mapping[str, Logger] | None = None):
        self.run_dir = run_dir
        self.loggers = loggers or {}
        self.progress = Progress(None, 0, is_silent=True)
        self._working_loggers = {}
        self._pictures = []

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    log_step = log_evaluation = scalars = text = image = note = warn_once = warn_unwritable = _nothing


def _drop_lines_after(path: Path, step: int) -> None:
    """Drop a file's lines of later steps, if it exists: a new run has none yet."""
    if not path.exists():
        return
    with atomic_write(path) as file:
        for facts in json_lines(path):
            if facts.get("step", math.inf) <= step:
                file.write(json.dumps(facts) + "\n")
