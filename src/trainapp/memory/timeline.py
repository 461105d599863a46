"""Memory over one step, stacked by kind: the picture of a failing step, or of a healthy one.

`python -m trainapp.memory.timeline` draws what `Drawing` hands it.
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
from trainapp.units import bytes_text

KINDS = ("parameters", "optimizer state", "buffers", "weight average", "batch", "gradients", "activations")


def stacked(events: Sequence[tuple[int, int]], kinds: Mapping[int, str]) -> dict[str, np.ndarray]:
    """Bytes by kind after each event; all arrays are as long as `events`.

    events: `(storage number, bytes)`, negative when freed; kinds: of the numbers that are known, the others being
    activations.
    """
    changes = {kind: np.zeros(len(events), dtype=np.int64) for kind in KINDS}
    for position, (number, size) in enumerate(events):
        changes[kinds.get(number, "activations")][position] = size
    return {kind: values.cumsum() for kind, values in changes.items()}


@dataclass(frozen=True)
class Picture:
    """What is to be drawn. events, kinds: as in `stacked`; limit: bytes, a line where it is not far above the rest."""

    events: Sequence[tuple[int, int]]
    kinds: Mapping[int, str]
    limit: int
    title: str
    path: Path  # of the PNG file


class Drawing:
    """Pictures that a process of its own draws: here matplotlib would take the interpreter from training, for 0.5 s.

    Raises OSError when the process cannot be started.
    """

    def __init__(self, pictures: Sequence[Picture]):
        own_path = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        with tempfile.TemporaryFile() as facts:
            pickle.dump([(list(p.events), dict(p.kinds), p.limit, p.title, str(p.path)) for p in pictures], facts)
            facts.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=facts,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(own_path)},
                start_new_session=True,  # Ctrl-C is not meant for it
            )
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, 19)  # behind training

    @property
    def ended(self) -> bool:
        """Whether there is nothing to wait for."""
        return self._process.poll() is not None

    def wait(self, seconds: float = 60.0) -> None:
        """Until it ends; it is ended after `seconds`."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def draw(events: Sequence[tuple[int, int]], kinds: Mapping[int, str], limit: int, title: str, path: str) -> None:
    """Draw a `Picture` to its file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    series = stacked(events, kinds)
    total = sum(series.values())
    scale = 2**20
    figure = Figure(figsize=(10, 4.5), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    shown = [kind for kind in KINDS if series[kind].max(initial=0) > 0]
    axes.stackplot(
        np.arange(len(events)),
        [series[kind] / scale for kind in shown],
        labels=[f"{kind} ({bytes_text(int(series[kind].max()))})" for kind in shown],
        colors=[f"C{KINDS.index(kind)}" for kind in shown],  # the same in every picture
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
