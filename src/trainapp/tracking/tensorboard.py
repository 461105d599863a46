"""`tracker=tensorboard`: an event file in the run directory."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainapp.tracking.outlet import Outlet, Start, tagged
from trainapp.tracking.records import Events


class TensorBoard(Outlet):
    """`tensorboard --logdir RUN` shows it."""

    def start(self, start: Start) -> None:
        """Steps that come again replace what was recorded of them."""
        self._complain = start.complain
        purge_step = start.step + 1 if start.continues else None
        self._events = Events(start.run_dir / "tensorboard", purge_step, start.complain)
        self._events.text("config", _as_code(start.config), start.step)

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        summaries = [Summary.Value(tag=tag, simple_value=value) for tag, value in tagged(group, values).items()]
        self._events.summary(summaries, step)

    def text(self, tag: str, text: str, step: int) -> None:
        self._events.text(tag, text, step)

    def image(self, tag: str, path: Path, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        try:
            png = path.read_bytes()
        except OSError as error:
            self._complain(path, error)
            return
        width, height = struct.unpack(">II", png[16:24])  # from the PNG header
        image = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=png)
        self._events.summary([Summary.Value(tag=tag, image=image)], step)

    def flush(self) -> None:
        self._events.flush()

    def close(self) -> None:
        self._events.close()


def _as_code(config: Mapping[str, Any]) -> str:
    """As indented text, which Markdown shows verbatim."""
    return "\n".join("    " + line for line in json.dumps(config, indent=2).splitlines())
