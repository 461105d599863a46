"""Pictures of memory by category, over the allocations and frees of a piece of work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainapp.files import atomic_write
from trainapp.memory.live_tensors import Category
from trainapp.units import bytes_text

PLOTTED: tuple[Category, ...] = tuple(category for category in Category if category is not Category.OUTSIDE_ALLOCATOR)
MIB = 2**20


@dataclass(frozen=True)
class Picture:
    """What to draw: events and the categories of their storages, as in `stacked`."""

    events: Sequence[tuple[int, int]]
    categories: Mapping[int, Category]
    limit: int  # bytes; drawn as a line unless far above the peak
    title: str
    path: Path  # of the PNG file


def stacked(events: Sequence[tuple[int, int]], categories: Mapping[int, Category]) -> dict[Category, np.ndarray]:
    """Return the bytes of each category after each event; all arrays have the length of `events`.

    Args:
        events: `(storage number, bytes)`, negative when freed.
        categories: by storage number; storages without one are activations.
    """
    # Each event changes one category.
    changes: dict[Category, np.ndarray] = {}
    for category in PLOTTED:
        changes[category] = np.zeros(len(events), dtype=np.int64)
    for position, (number, size) in enumerate(events):
        category = categories.get(number, Category.ACTIVATIONS)
        changes[category][position] = size

    return {category: sizes.cumsum() for category, sizes in changes.items()}


def draw(picture: Picture) -> None:
    """Draw a picture to its file, as a PNG: half a second. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # late: half a second more
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()

    # Memory by category, stacked.
    series = stacked(picture.events, picture.categories)
    heights = []
    labels = []
    colors = []
    for number, category in enumerate(PLOTTED):
        peak = int(series[category].max(initial=0))
        if peak > 0:
            heights.append(series[category] / MIB)
            labels.append(f"{category.label} ({bytes_text(peak)})")
            colors.append(f"C{number}")  # the same for a category in every picture
    axes.stackplot(np.arange(len(picture.events)), heights, labels=labels, colors=colors, step="post")

    # The limit.
    total = np.sum(list(series.values()), axis=0)
    highest = int(total.max(initial=0))
    if picture.limit < 3 * highest:
        label = f"limit ({bytes_text(picture.limit)})"
        axes.axhline(picture.limit / MIB, color="black", linestyle="--", label=label)

    # The axes and the legend, beside them.
    last = max(1, len(picture.events) - 1)
    axes.set(title=picture.title, xlabel="allocations and frees, in order", ylabel="MiB", xlim=(0, last))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    with atomic_write(picture.path, "wb") as file:
        canvas.print_png(file)
