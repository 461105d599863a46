"""A plot of memory over one step, stacked by category, for a failed step or a healthy one.

`python -m trainapp.memory.timeline` is the process that `Drawing` starts.
"""

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainapp.files import atomic_write
from trainapp.memory.live_tensors import Category
from trainapp.units import bytes_text

KINDS: tuple[Category, ...] = tuple(kind for kind in Category if kind is not Category.OUTSIDE_ALLOCATOR)


def stacked(events: Sequence[tuple[int, int]], kinds: Mapping[int, Category]) -> dict[Category, np.ndarray]:
    """Bytes by category after each event; all arrays have the length of `events`.

    events: `(storage number, bytes)`, negative when freed. kinds: by storage number; storages without a kind are
    activations.
    """
    changes: dict[Category, np.ndarray] = {kind: np.zeros(len(events), dtype=np.int64) for kind in KINDS}
    for position, (number, size) in enumerate(events):
        changes[kinds.get(number, Category.ACTIVATIONS)][position] = size
    return {kind: values.cumsum() for kind, values in changes.items()}


@dataclass(frozen=True)
class Picture:
    """What to draw. events, kinds: as in `stacked`. limit: bytes, drawn as a line unless far above the peak."""

    events: Sequence[tuple[int, int]]
    kinds: Mapping[int, Category]
    limit: int
    title: str
    path: Path  # of the PNG file


class Drawing:
    """Draws pictures in the background, in a separate process: in a thread matplotlib would hold the GIL for 0.5 s.

    Raises OSError when the process cannot be started.
    """

    def __init__(self, pictures: Sequence[Picture]):
        own_path = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        with tempfile.TemporaryFile() as handed_over:
            pickle.dump([(list(p.events), dict(p.kinds), p.limit, p.title, str(p.path)) for p in pictures], handed_over)
            handed_over.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=handed_over,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(own_path)},
                start_new_session=True,  # shields it from Ctrl-C
            )
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, 19)  # training comes first

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def wait(self, seconds: float = 60.0) -> None:
        """Wait for the process, and kill it after `seconds`."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def draw(events: Sequence[tuple[int, int]], kinds: Mapping[int, Category], limit: int, title: str, path: str) -> None:
    """Draw a `Picture` to its file, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    series = stacked(events, kinds)
    total = np.sum(list(series.values()), axis=0)
    scale = 2**20
    figure = Figure(figsize=(10, 4.5), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    shown = [kind for kind in KINDS if series[kind].max(initial=0) > 0]
    axes.stackplot(
        np.arange(len(events)),
        [series[kind] / scale for kind in shown],
        labels=[f"{kind.label} ({bytes_text(int(series[kind].max()))})" for kind in shown],
        colors=[f"C{KINDS.index(kind)}" for kind in shown],  # one color per kind in every picture
        step="post",
    )
    highest = int(total.max(initial=0))
    if limit < 3 * highest:
        axes.axhline(limit / scale, color="black", linestyle="--", label=f"limit ({bytes_text(limit)})")
    axes.set(title=title, xlabel="allocations and frees, in order", ylabel="MiB", xlim=(0, max(1, len(events) - 1)))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    with atomic_write(Path(path), "wb") as file:
        canvas.print_png(file)


if __name__ == "__main__":
    for picture in pickle.load(sys.stdin.buffer):
        draw(*picture)
