"""Loggers receive a run's metrics, texts and images, in addition to its own files. `tracker=[...]` chooses them.

Your own logger is a class with any of `Logger`'s methods. It is built on every rank and used only on rank 0. Its first
error is logged; then the run continues without it.
"""

import contextlib
import csv
import json
import math
import os
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from trainapp.files import atomic_write, json_lines, json_object
from trainapp.units import flat
from trainapp.validation import Str

FLUSHED = 5  # seconds between writes of TensorBoard's events
LONGEST, MOST = 500, 100  # characters per MLflow parameter, parameters per request: limits of servers


@dataclass(frozen=True)
class Start:
    """Information for a logger when the run starts or resumes.

    step: finished steps; later ones may have been logged before and are repeated. continues: False if the run only
    reads a checkpoint. config: every setting, as plain containers.
    """

    run_dir: Path
    step: int
    config: Mapping[str, Any]
    continues: bool


class Logger:
    """The base class, whose methods do nothing."""

    package: str | None = None  # package that must be installed

    def start(self, start: Start) -> None:
        """Open the logger. Continues the same run if `run_dir` has been used before."""

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        """group: "train", "eval", or a callback's name for its metrics. Names with a `/` are not prefixed by the group,
        except those of "eval", where a validation set or a metric with several values has them.
        """

    def text(self, tag: str, text: str, step: int) -> None:
        """Log a note, or a table, in Markdown."""

    def image(self, tag: str, path: Path, step: int) -> None:
        """Log a PNG file."""

    def close(self) -> None:
        """End this process's part of the run."""


def tagged(group: str, values: Mapping[str, float]) -> dict[str, float]:
    """The values by their full names."""
    return {name if "/" in name and group != "eval" else f"{group}/{name}": value for name, value in values.items()}


class TensorBoard(Logger):
    """`tracker=tensorboard`: an event file in the run directory, which `tensorboard --logdir RUN` shows."""

    def start(self, start: Start) -> None:
        """Repeated steps replace their earlier records. Raises OSError."""
        from torch.utils.tensorboard import SummaryWriter  # late: importing TensorBoard takes 0.15 s

        purged = start.step + 1 if start.continues else None
        self._writer: Any = SummaryWriter(start.run_dir / "tensorboard", purge_step=purged, flush_secs=FLUSHED)
        # Its thread competes with the training for Python's lock, which delays the step after by half a millisecond.
        self._kept, self._written = list[tuple[Any, int, float]](), 0.0
        indented = "\n".join("    " + line for line in json.dumps(start.config, indent=2).splitlines())
        self.text("config", indented, start.step)  # Markdown shows indented text verbatim
        if settings := _overrides(start.run_dir):
            from tensorboard.plugins.hparams.summary_v2 import hparams_pb  # its table of hyperparameters

            writer: Any = self._writer.file_writer
            writer.add_summary(hparams_pb(settings, trial_id=start.run_dir.name))

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        found = [Summary.Value(tag=tag, simple_value=value) for tag, value in tagged(group, values).items()]
        self._kept.append((Summary(value=found), step, time.time()))  # one event: `add_scalar` writes one per tag
        if time.monotonic() > self._written + FLUSHED:
            self._write()

    def _write(self) -> None:
        for event in self._kept:
            self._writer.file_writer.add_summary(*event)
        self._writer.flush()
        self._kept, self._written = [], time.monotonic()

    def text(self, tag: str, text: str, step: int) -> None:
        self._writer.add_text(tag, text, step)
        self._write()

    def image(self, tag: str, path: Path, step: int) -> None:
        from PIL import Image

        self._writer.add_image(tag, np.asarray(Image.open(path).convert("RGB")), step, dataformats="HWC")

    def close(self) -> None:
        self._write()
        self._writer.close()


def _overrides(run_dir: Path) -> dict[str, float | str]:
    """What the command line has set."""
    path, found = run_dir / ".hydra/overrides.yaml", dict[str, float | str]()
    for text in yaml.safe_load(path.read_text()) or [] if path.exists() else []:
        name, _, value = text.lstrip("+~").partition("=")
        found[name] = value
        with contextlib.suppress(ValueError):
            found[name] = float(value)
    return found


class Csv(Logger):
    """`tracker=csv`: the lines of metrics.jsonl, evaluations.jsonl and callbacks.jsonl as tables, written when the run
    ends.
    """

    def start(self, start: Start) -> None:
        self._run_dir = start.run_dir

    def close(self) -> None:
        for name in ("metrics", "evaluations", "callbacks"):
            rows = json_lines(self._run_dir / f"{name}.jsonl")
            columns = dict.fromkeys(column for row in rows for column in row)
            if rows:
                with atomic_write(self._run_dir / f"{name}.csv") as file:
                    writer = csv.DictWriter(file, columns, lineterminator="\n")
                    writer.writeheader()
                    writer.writerows(rows)


def remember(path: Path, **values: str) -> None:
    """Write a logger's values for a resume, such as a service's run id. Raises OSError."""
    path.parent.mkdir(exist_ok=True)
    with atomic_write(path) as file:
        json.dump(values, file)


@dataclass
class Wandb(Logger):
    """`tracker=wandb`: a run of Weights & Biases. The run directory keeps its id for a resume.

    mode: None uses WANDB_MODE, otherwise online. With offline all data stays in the run directory until `wandb sync`.
    name: None uses the run directory's name.
    """

    package = "wandb"

    project: Str = "trainapp"
    entity: Str | None = None
    name: Str | None = None
    tags: list[Str] | None = None
    mode: Literal["online", "offline", "disabled"] | None = None

    def start(self, start: Start) -> None:
        import wandb  # late: an extra, and a second

        self._wandb: Any = wandb
        memory = start.run_dir / "trackers/wandb.json"
        run_id = json_object(memory).get("id") or uuid.uuid4().hex[:12]
        remember(memory, id=run_id)
        self._run = wandb.init(
            id=run_id,
            resume="allow",
            project=self.project,
            entity=self.entity,
            name=self.name or start.run_dir.name,
            tags=self.tags,
            mode=self.mode,
            dir=str(start.run_dir),
            config=dict(start.config),
            reinit="create_new",  # a sweep has several runs in the same process
            settings=wandb.Settings(console="off"),  # the terminal belongs to the progress bar
        )
        # wandb's own step must not decrease, which it would after a resume from a checkpoint.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        self._run.log({**tagged(group, values), "step": step})

    def text(self, tag: str, text: str, step: int) -> None:
        table = self._wandb.Table(columns=["step", "text"], data=[[step, text]])
        self._run.log({tag: table, "step": step})

    def image(self, tag: str, path: Path, step: int) -> None:
        self._run.log({tag: self._wandb.Image(str(path)), "step": step})

    def close(self) -> None:
        self._run.finish()


@dataclass
class Trackio(Logger):
    """`tracker=trackio`: a run of Trackio. The run directory keeps its name for a resume.

    space_id: a Hugging Face Space, created as a private one if there is none; None: TRACKIO_SPACE_ID, otherwise the
    folder TRACKIO_DIR of this machine. name: None uses the run directory's name. A random part is appended: Trackio
    continues the run of an equal name.
    """

    package = "trackio"

    project: Str = "trainapp"
    space_id: Str | None = None
    name: Str | None = None

    def start(self, start: Start) -> None:
        import trackio  # late: an extra, and a second

        self._trackio: Any = trackio
        memory = start.run_dir / "trackers/trackio.json"
        name = json_object(memory).get("run") or f"{self.name or start.run_dir.name}-{uuid.uuid4().hex[:6]}"
        remember(memory, run=name)
        with contextlib.redirect_stdout(sys.stderr):  # it prints how to see the run
            self._run = trackio.init(
                self.project,
                name,
                space_id=self.space_id,
                private=True,
                config=dict(start.config),
                resume="allow",
                embed=False,
                auto_log_gpu=False,  # trainapp logs memory and utilisation itself
                auto_log_cpu=False,
            )

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        self._run.log(tagged(group, values), step=step)

    def text(self, tag: str, text: str, step: int) -> None:
        self._run.log({tag: self._trackio.Markdown(text)}, step=step)

    def image(self, tag: str, path: Path, step: int) -> None:
        self._run.log({tag: self._trackio.Image(str(path))}, step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._trackio.finish()  # the run's own `finish` would be called once more at exit


@dataclass
class Mlflow(Logger):
    """`tracker=mlflow`: a run of MLflow. The run directory keeps its id for a resume.

    uri: a server or a database, such as sqlite:///runs.db; None: MLFLOW_TRACKING_URI, otherwise files in the run
    directory, mlruns/. name: None uses the run directory's name.
    """

    package = "mlflow"

    uri: Str | None = None
    experiment: Str = "trainapp"
    name: Str | None = None

    def start(self, start: Start) -> None:
        from mlflow.entities import Param  # late: an extra, and a second
        from mlflow.tracking import MlflowClient  # avoids the global state of the fluent API

        uri = self.uri or os.environ.get("MLFLOW_TRACKING_URI") or (start.run_dir / "mlruns").resolve().as_uri()
        if uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # required by MLflow 3
        self._client = MlflowClient(tracking_uri=uri)
        memory = start.run_dir / "trackers/mlflow.json"
        known = json_object(memory)
        if known.get("uri") == uri:
            self._id = str(known["id"])
            self._client.update_run(self._id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(self.experiment)
        self._id = self._client.create_run(experiment, run_name=self.name or start.run_dir.name).info.run_id
        remember(memory, uri=uri, id=self._id)
        # Only once: MLflow rejects a changed parameter, such as the number of workers after a resume.
        self._send("params", [Param(name, str(value)[:LONGEST]) for name, value in flat(start.config)])

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        finite = {name: float(value) for name, value in tagged(group, values).items() if math.isfinite(value)}
        self._send("metrics", [Metric(name, value, now, step) for name, value in finite.items()])

    def _send(self, kind: str, entities: Sequence[Any]) -> None:
        for first in range(0, len(entities), MOST):
            self._client.log_batch(self._id, **{kind: entities[first : first + MOST]})

    def text(self, tag: str, text: str, step: int) -> None:
        self._client.log_text(self._id, text, f"{tag}/step_{step:08d}_{time.time_ns()}.md")

    def image(self, tag: str, path: Path, step: int) -> None:
        self._client.log_artifact(self._id, str(path), f"{tag}/step_{step:08d}")

    def close(self) -> None:
        self._client.set_terminated(self._id)
