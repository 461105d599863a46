"""Memory over one step, stacked by kind: the picture of a failing step, or of a healthy one."""

import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from trainapp.console import bytes_text

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


def draw(events: Sequence[tuple[int, int]], kinds: Mapping[int, str], limit: int, title: str, path: Path) -> np.ndarray:
    """Draw to a PNG file, and return the picture: uint8 [height, width, 3].

    limit: bytes, drawn as a line where it is not far above the rest.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # late: it costs 0.3 s and few runs need it
    from matplotlib.figure import Figure

    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it announces that it looks for fonts
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
        step="post",
    )
    highest = int(total.max(initial=0))
    if limit < 3 * highest:
        axes.axhline(limit / scale, color="black", linestyle="--", label=f"limit ({bytes_text(limit)})")
    axes.set(title=title, xlabel="allocations and frees, in order", ylabel="MiB", xlim=(0, max(1, len(events) - 1)))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(buffer.getvalue())
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
