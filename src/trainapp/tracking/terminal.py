"""The terminal: log lines and the live progress bar. Imports no torch."""

import logging
import os
import sys
import time
from collections.abc import Mapping

from tqdm import tqdm


class Handler(logging.StreamHandler):
    """A handler that writes log records to a stream, above the progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=self.stream)
        except Exception:
            self.handleError(record)


def is_live() -> bool:
    """Return whether to draw bars: on a terminal, unless NO_COLOR or CI is set."""
    return sys.stderr.isatty() and not (os.environ.get("NO_COLOR") or os.environ.get("CI"))


def bar_text(share: float, width: int = 8) -> str:
    """Return a bar for a share of 1: `[######--]`. Larger shares fill it."""
    filled = round(min(share, 1.0) * width)
    return f"[{'#' * filled}{'-' * (width - filled)}]"


class Progress:
    """A live bar on a terminal, plain lines elsewhere.

    Args:
        total: steps of the whole run, or None if its end is unknown.
        step: finished optimizer steps.
        is_silent: show no bar, for ranks other than 0.
        unit: what is counted.

    Attributes:
        live: whether there is a live bar.
        step: finished optimizer steps.
    """

    def __init__(self, total: int | None, step: int, is_silent: bool = False, unit: str = "step"):
        self.live = is_live() and not is_silent
        self.bar = tqdm(
            total=total,
            initial=step,
            unit=unit,
            disable=not self.live,
            dynamic_ncols=True,
            mininterval=0.2,
            bar_format="{percentage:3.0f}%|{bar:20}| {n}/{total} | {desc} | {remaining} left",
        )
        self._started_at = time.monotonic()
        self._first_step = step
        self.step = step

    def advance(self, step: int) -> None:
        """Set the number of finished steps. Call after every optimizer step: it is cheap."""
        self.step = step
        if self.live:
            self.bar.update(step - self.bar.n)

    def show(self, step: int, values: Mapping[str, str]) -> None:
        """Show these values beside the bar, or as a line. Call in a log step."""
        text = " | ".join(f"{name} {value}" for name, value in values.items())
        if self.live:
            self.bar.set_description_str(text, refresh=False)
            return
        total = self.bar.total or "?"
        log = logging.getLogger(__name__)
        log.info("step %d/%s | %s | %s left", step, total, text, self._remaining_time(step))

    def _remaining_time(self, step: int) -> str:
        """Return the time until the run's end, at the pace of this process; "?" if unknown."""
        steps_made = step - self._first_step
        if not self.bar.total or steps_made <= 0:
            return "?"
        seconds_per_step = (time.monotonic() - self._started_at) / steps_made
        steps_left = self.bar.total - step
        return tqdm.format_interval(seconds_per_step * steps_left)

    def close(self) -> None:
        """Close the bar, leaving it on the terminal."""
        self.bar.close()
