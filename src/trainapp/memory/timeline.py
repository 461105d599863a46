"""A plot of memory over one step, stacked by category, for a failed step or a healthy one."""

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


def draw(picture: Picture) -> None:
    """Draw it to its file, as a PNG: half a second. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # late: half a second more
    from matplotlib.figure import Figure

    series = stacked(picture.events, picture.kinds)
    total = np.sum(list(series.values()), axis=0)
    scale = 2**20
    figure = Figure(figsize=(10, 4.5), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    shown = [kind for kind in KINDS if series[kind].max(initial=0) > 0]
    axes.stackplot(
        np.arange(len(picture.events)),
        [series[kind] / scale for kind in shown],
        labels=[f"{kind.label} ({bytes_text(int(series[kind].max()))})" for kind in shown],
        colors=[f"C{KINDS.index(kind)}" for kind in shown],  # one color per kind in every picture
        step="post",
    )
    highest = int(total.max(initial=0))
    if picture.limit < 3 * highest:
        label = f"limit ({bytes_text(picture.limit)})"
        axes.axhline(picture.limit / scale, color="black", linestyle="--", label=label)
    last = max(1, len(picture.events) - 1)
    axes.set(title=picture.title, xlabel="allocations and frees, in order", ylabel="MiB", xlim=(0, last))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    with atomic_write(picture.path, "wb") as file:
        canvas.print_png(file)
