"""What the person at the terminal sees: log lines, the live progress bar, errors. Imports no torch."""

import logging
import re
import sys
import time
from collections.abc import Iterable, Mapping

from tqdm import tqdm

from trainapp.validation import suggest


class Handler(logging.StreamHandler):
    """Log records on a stream, written above the progress bar where there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        try:
            tqdm.write(self.format(record), file=self.stream)
        except Exception:
            self.handleError(record)


class Progress:
    """A live bar on a terminal, plain lines elsewhere.

    total: steps of the whole run, or None where the end is not known in steps; step: where the run starts.
    """

    def __init__(self, total: int | None, step: int):
        self.total = total
        self.live = sys.stderr.isatty()
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
        """Called after every step: cheap."""
        self.step = step
        if self.live:
            self.bar.update(step - self.bar.n)

    def show(self, step: int, values: Mapping[str, str]) -> None:
        """Called at a log step with the values to show."""
        text = " | ".join(f"{name} {value}" for name, value in values.items())
        if self.live:
            self.bar.set_description_str(text, refresh=False)
        else:
            logging.getLogger(__name__).info(
                "step %d/%s | %s | %s left", step, self.total or "?", text, self._left(step)
            )

    def _left(self, step: int) -> str:
        done = step - self._first
        if not self.total or done <= 0:
            return "?"
        return tqdm.format_interval((time.monotonic() - self._started) / done * (self.total - step))

    def close(self) -> None:
        """Leave the bar as it stands."""
        self.bar.close()


def fail(text: str) -> None:
    """A message about something that the user can put right, without a trace."""
    first, *rest = text.splitlines() or [""]
    print("\n".join([f"trainapp: {first}", *(f"          {line}" for line in rest)]), file=sys.stderr)


def explain_hydra(error: Exception, groups: Iterable[str] = ()) -> str:
    """Hydra's own words for a mistake on the command line, without its advice to force the unknown key in.

    groups: the config groups that exist, which may be what a misspelt first word was meant to be.
    """
    text = str(error).strip().partition("\nConfig search path:")[0].strip()
    option = re.search(r"Could not find '([^']+)/([^'/]+)'", text)
    if option:
        group, name = option.groups()
        choices = re.findall(r"^\s+(\S+)$", text.partition("Available options")[2], re.MULTILINE)
        return f"{group}={name}: no such option{suggest(name, choices)}; available: {', '.join(choices) or 'none'}"
    override = re.search(r"Could not override '([^']+)'", text)
    if override:
        path = override[1]
        parent, _, key = path.rpartition(".")
        known = [*_keys_beside(error, key), *(() if parent else groups)]
        hint = suggest(key, known) or (f"; known in {parent}: {', '.join(known)}" if parent and known else "")
        return f"{path}: no such setting{hint} (`trainapp --cfg job` shows all of them)"
    cause = str(error.__cause__).strip() if error.__cause__ else ""
    return text if not cause or cause in text else f"{text}\n{cause}"


def _keys_beside(error: BaseException, key: str) -> list[str]:
    """The keys that exist where the unknown one was meant to be: OmegaConf's error carries the node."""
    cause = error.__cause__ or error
    node = getattr(cause, "parent_node", None)
    try:
        return [str(name) for name in node] if node is not None else []
    except TypeError:
        return []
