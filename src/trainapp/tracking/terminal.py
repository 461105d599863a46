"""The terminal: log lines and the live progress bar. Imports no torch."""

import logging
import os
import sys
import time
from collections.abc import Mapping

from tqdm import tqdm


class Handler(logging.StreamHandler):
    """Writes log records to a stream, above the progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=self.stream)
        except Exception:
            self.handleError(record)


def is_live() -> bool:
    """Whether to draw bars: on a terminal, unless NO_COLOR or CI is set."""
    return sys.stderr.isatty() and not (os.environ.get("NO_COLOR") or os.environ.get("CI"))


def bar_of(share: float, width: int = 8) -> str:
    """A share between 0 and 1: `[######--]`."""
    filled = round(min(share, 1.0) * width)
    return f"[{'#' * filled}{'-' * (width - filled)}]"


class Progress:
    """A live bar on a terminal, plain lines elsewhere.

    total: steps of the whole run, or None if its end is unknown; step: optimizer steps already done. is_silent: show no
    bar, for ranks other than 0.
    """

    def __init__(self, total: int | None, step: int, is_silent: bool = False):
        self.live = is_live() and not is_silent
        self.bar = tqdm(
            total=total,
            initial=step,
            unit="step",
            disable=not self.live,
            dynamic_ncols=True,
            mininterval=0.2,
            bar_format="{percentage:3.0f}%|{bar:20}| {n}/{total} | {desc} | {remaining} left",
        )
        self._started, self._first, self.step = time.monotonic(), step, step

    def advance(self, step: int) -> None:
        """Call after every optimizer step. Cheap."""
        self.step = step
        if self.live:
            self.bar.update(step - self.bar.n)

    def show(self, step: int, values: Mapping[str, str]) -> None:
        """Call in a log step, with the values to show."""
        text = " | ".join(f"{name} {value}" for name, value in values.items())
        if self.live:
            self.bar.set_description_str(text, refresh=False)
            return
        done, left = step - self._first, "?"
        if self.bar.total and done > 0:
            left = tqdm.format_interval((time.monotonic() - self._started) / done * (self.bar.total - step))
        logging.getLogger(__name__).info("step %d/%s | %s | %s left", step, self.bar.total or "?", text, left)

    def close(self) -> None:
        """Close the bar, leaving it on the terminal."""
        self.bar.close()
