"""Where numbers go: metrics.jsonl and TensorBoard in the run directory, the line or the bar on the terminal."""

import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from trainapp.console import Progress, bytes_text

METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
RESULT = "result.json"
log = logging.getLogger(__name__)


class Tracker:
    """Writes the run's numbers. A run that continues in its directory goes on after `step`.

    total: the run's steps for the progress bar, or None. continues: False only adds to what is there, for a run that
    looks at a checkpoint and trains nothing.
    """

    def __init__(self, run_dir: Path, step: int, total: int | None, config: Mapping[str, Any], continues: bool = True):
        # Late: TensorBoard costs 0.15 s, and only runs that train need it.
        from torch.utils.tensorboard import SummaryWriter

        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        if continues:
            for name in (METRICS, EVALUATIONS):
                _forget_after(run_dir / name, step)
        self._metrics = (run_dir / METRICS).open("a")
        self._evaluations = (run_dir / EVALUATIONS).open("a")
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1 if continues else None)
        self._writer.add_text("config", _as_code(config), step)
        self._drawing = ThreadPoolExecutor(1)  # a picture takes 0.1 s, the first 0.3 s: training need not wait
        self.progress = Progress(total, step)

    def log(self, step: int, samples: int, scalars: Mapping[str, float], metric: str | None) -> None:
        """One log step: every scalar to TensorBoard and the file, the few that a person watches to the terminal."""
        self._metrics.write(json.dumps({"step": step, "samples": samples, **scalars}) + "\n")
        self._metrics.flush()
        self._add_scalars("train", scalars, step)
        shown = {"loss": f"{scalars['loss']:.4f}"}
        if metric in scalars:
            shown[metric] = f"{scalars[metric]:.3f}"
        shown["samples/s"] = f"{scalars['samples_per_second']:.0f}"
        peak, limit = scalars["memory/peak"], scalars["memory/limit"]
        shown["memory"] = f"{bytes_text(peak)} / {bytes_text(limit)}"
        self.progress.show(step, shown)

    def evaluated(self, step: int, samples: int, scalars: Mapping[str, float]) -> None:
        """One evaluation."""
        self._evaluations.write(json.dumps({"step": step, "samples": samples, **scalars}) + "\n")
        self._evaluations.flush()
        self._add_scalars("eval", scalars, step)
        log.info("step %d evaluated | %s", step, " | ".join(f"{name} {value:.4f}" for name, value in scalars.items()))

    def _add_scalars(self, group: str, scalars: Mapping[str, float], step: int) -> None:
        """One event for all: one each fills the writer's queue of ten, and then the loop waits for the disk."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        named = {name if "/" in name else f"{group}/{name}": value for name, value in scalars.items()}
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in named.items()]
        self._writer._get_file_writer().add_summary(Summary(value=values), step)

    def note(self, text: str, tag: str = "notes") -> None:
        """Something that happened: on the terminal, and as text in TensorBoard."""
        log.info("%s", text)
        self._writer.add_text(tag, text, self.progress.step)

    def incident(self, text: str, draw: Callable[[], np.ndarray] | None, step: int) -> None:
        """The record of an out-of-memory error, flushed at once; `draw` returns uint8 [height, width, 3], later."""
        self._writer.add_text("out_of_memory", text, step)
        self._writer.flush()
        if draw is not None:
            self._drawing.submit(self._draw, draw, step)

    def _draw(self, draw: Callable[[], np.ndarray], step: int) -> None:
        try:
            self.picture("out_of_memory", draw(), step)
        except (OSError, MemoryError) as error:  # the run matters more than its record
            log.warning("the picture of the incident at step %d could not be drawn: %s", step, error)

    def picture(self, tag: str, picture: np.ndarray | None, step: int) -> None:
        """An image, uint8 [height, width, 3]; None for none."""
        if picture is not None:
            self._writer.add_image(tag, picture, step, dataformats="HWC")

    def close(self) -> None:
        """Flush everything to disk."""
        self._drawing.shutdown()
        self.progress.close()
        self._writer.close()
        self._metrics.close()
        self._evaluations.close()


class SilentTracker:
    """On ranks that do not lead: takes everything and writes nothing."""

    def __init__(self, run_dir: Path, *_: Any):
        self.run_dir = run_dir
        self.progress = SilentProgress()

    def incident(self, text: str, draw: Callable[[], np.ndarray] | None, step: int) -> None:
        """The picture lies beside the incident's report."""
        if draw is not None:
            draw()

    def _nothing(self, *_: Any) -> None:
        pass

    log = evaluated = note = picture = close = _nothing


class SilentProgress:
    """A progress bar that nobody sees."""

    def advance(self, step: int) -> None:
        """Nothing."""


def _forget_after(path: Path, step: int) -> None:
    """Drop the lines of steps that will be done again: those between the checkpoint and the end of the old process."""
    if not path.exists():
        return
    kept = [line for line in path.read_text().splitlines(keepends=True) if _step_of(line) <= step]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept))
    os.replace(temporary, path)


def _step_of(line: str) -> float:
    """Of a line of the file; one that a killed process left half written, or that is no JSON, is of no step."""
    try:
        return json.loads(line)["step"] if line.endswith("\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def _as_code(config: Mapping[str, Any]) -> str:
    """Markdown shows indented text as it is."""
    return "\n".join("    " + line for line in json.dumps(config, indent=2).splitlines())
