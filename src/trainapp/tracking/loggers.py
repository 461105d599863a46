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
import textwrap
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from trainapp.files import OVERRIDES, atomic_write, json_lines, json_object
from trainapp.units import flat
from trainapp.validation import Str

FLUSH_INTERVAL = 5  # seconds between writes of TensorBoard's events
# Limits of MLflow's servers.
MLFLOW_PARAM_LENGTH = 500  # characters per parameter
MLFLOW_BATCH_SIZE = 100  # parameters or metrics per request


@dataclass(frozen=True)
class Start:
    """Information for a logger when the run starts or resumes.

    Attributes:
        run_dir: the run's directory.
        step: finished steps; later ones may have been logged before and are repeated.
        config: every setting, as plain containers.
        continues: False if the run only reads a checkpoint.
    """

    run_dir: Path
    step: int
    config: Mapping[str, Any]
    continues: bool


class Logger:
    """The base class, whose methods do nothing."""

    package: str | None = None  # package that must be installed

    def start(self, start: Start) -> None:
        """Open the logger. Continue the same run if `run_dir` has been used before."""

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        """Log scalars.

        Args:
            group: "train", "eval", or a callback's own, by default "callbacks".
            values: by name. Names with a `/` are not prefixed by the group, except those of "eval", where a validation
                set or a metric with several values has them.
            step: finished steps.
        """

    def text(self, tag: str, text: str, step: int) -> None:
        """Log a note, or a table, in Markdown."""

    def image(self, tag: str, path: Path, step: int) -> None:
        """Log a PNG file."""

    def close(self) -> None:
        """End this process's part of the run."""


def by_full_name(group: str, values: Mapping[str, float]) -> dict[str, float]:
    """Return the values of `Logger.scalars` by their full names."""
    by_name = {}
    for name, value in values.items():
        is_full_name = "/" in name and group != "eval"
        full_name = name if is_full_name else f"{group}/{name}"
        by_name[full_name] = value
    return by_name


class TensorBoard(Logger):
    """`tracker=tensorboard`: an event file in the run directory, which `tensorboard --logdir RUN` shows."""

    def start(self, start: Start) -> None:
        """Open an event file, in which repeated steps replace their earlier records. Raises OSError."""
        from torch.utils.tensorboard import SummaryWriter  # late: importing TensorBoard takes 0.15 s

        purge_step = start.step + 1 if start.continues else None
        folder = start.run_dir / "tensorboard"
        self._writer: Any = SummaryWriter(folder, purge_step=purge_step, flush_secs=FLUSH_INTERVAL)
        # Events are written together: the writer's thread competes with the training for Python's lock, which delays
        # the next step by half a millisecond.
        self._pending_events: list[tuple[Any, int, float]] = []  # summary, step, time
        self._written_at = 0.0  # in `time.monotonic`

        # The run's settings: all of them as text, those of the command line also as hyperparameters.
        config = json.dumps(start.config, indent=2)
        self.text("config", textwrap.indent(config, "    "), start.step)  # Markdown shows indented text verbatim
        settings = _overrides(start.run_dir)
        if settings:
            from tensorboard.plugins.hparams.summary_v2 import hparams_pb  # its table of hyperparameters

            file_writer: Any = self._writer.file_writer
            file_writer.add_summary(hparams_pb(settings, trial_id=start.run_dir.name))

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One event for all: `add_scalar` writes one per tag.
        summaries = []
        for tag, value in by_full_name(group, values).items():
            summaries.append(Summary.Value(tag=tag, simple_value=value))
        event = (Summary(value=summaries), step, time.time())
        self._pending_events.append(event)
        if time.monotonic() > self._written_at + FLUSH_INTERVAL:
            self._write()

    def _write(self) -> None:
        for event in self._pending_events:
            self._writer.file_writer.add_summary(*event)
        self._writer.flush()
        self._pending_events = []
        self._written_at = time.monotonic()

    def text(self, tag: str, text: str, step: int) -> None:
        self._writer.add_text(tag, text, step)
        self._write()

    def image(self, tag: str, path: Path, step: int) -> None:
        from PIL import Image

        pixels = np.asarray(Image.open(path).convert("RGB"))
        self._writer.add_image(tag, pixels, step, dataformats="HWC")

    def close(self) -> None:
        self._write()
        self._writer.close()


def _overrides(run_dir: Path) -> dict[str, float | str]:
    """Return the settings of the command line: numbers as such, others as text."""
    path = run_dir / OVERRIDES
    if not path.exists():
        return {}
    settings: dict[str, float | str] = {}
    for override in yaml.safe_load(path.read_text()) or []:
        name, _, value = override.lstrip("+~").partition("=")
        settings[name] = value
        with contextlib.suppress(ValueError):
            settings[name] = float(value)
    return settings


class Csv(Logger):
    """`tracker=csv`: the lines of metrics.jsonl, evaluations.jsonl and callbacks.jsonl as tables, written when the run
    ends.
    """

    def start(self, start: Start) -> None:
        self._run_dir = start.run_dir

    def close(self) -> None:
        for name in ("metrics", "evaluations", "callbacks"):
            rows = json_lines(self._run_dir / f"{name}.jsonl")
            if rows:
                _write_table(self._run_dir / f"{name}.csv", rows)


def _write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    columns: dict[str, None] = {}  # of all rows, in the order in which they first occur
    for row in rows:
        columns |= dict.fromkeys(row)
    with atomic_write(path) as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def save_for_resume(path: Path, **values: str) -> None:
    """Write what a logger needs to continue its run, such as a service's run id. Raises OSError."""
    path.parent.mkdir(exist_ok=True)
    with atomic_write(path) as file:
        json.dump(values, file)


@dataclass
class Wandb(Logger):
    """`tracker=wandb`: a run of Weights & Biases. The run directory keeps its id for a resume.

    Args:
        project: of the service.
        entity: a user or team; None: the account's own.
        name: of the run; None: the run directory's name.
        tags: of the run.
        mode: None: WANDB_MODE, otherwise online. With offline all data stays in the run directory until `wandb sync`.
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
        path = start.run_dir / "trackers/wandb.json"
        run_id = json_object(path).get("id") or uuid.uuid4().hex[:12]
        save_for_resume(path, id=run_id)
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
        self._run.log({**by_full_name(group, values), "step": step})

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

    Args:
        project: of the run.
        space_id: a Hugging Face Space, created as a private one if it does not exist; None: TRACKIO_SPACE_ID, otherwise
            the folder TRACKIO_DIR of this machine.
        name: of the run; None: the run directory's name. A random part is appended: Trackio continues the run of an
            equal name.
    """

    package = "trackio"

    project: Str = "trainapp"
    space_id: Str | None = None
    name: Str | None = None

    def start(self, start: Start) -> None:
        import trackio  # late: an extra, and a second

        self._trackio: Any = trackio
        path = start.run_dir / "trackers/trackio.json"
        name = json_object(path).get("run")
        if not name:
            name = f"{self.name or start.run_dir.name}-{uuid.uuid4().hex[:6]}"
        save_for_resume(path, run=name)
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
        self._run.log(by_full_name(group, values), step=step)

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

    Args:
        uri: a server or a database, such as sqlite:///runs.db; None: MLFLOW_TRACKING_URI, otherwise files in the run
            directory, mlruns/.
        experiment: created if it does not exist.
        name: of the run; None: the run directory's name.
    """

    package = "mlflow"

    uri: Str | None = None
    experiment: Str = "trainapp"
    name: Str | None = None

    def start(self, start: Start) -> None:
        from mlflow.entities import Param  # late: an extra, and a second
        from mlflow.tracking import MlflowClient  # avoids the global state of the fluent API

        uri = self.uri or os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            uri = (start.run_dir / "mlruns").resolve().as_uri()
        if uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # required by MLflow 3
        self._client = MlflowClient(tracking_uri=uri)

        # Continue the run that an earlier process has begun there.
        path = start.run_dir / "trackers/mlflow.json"
        saved = json_object(path)
        if saved.get("uri") == uri:
            self._run_id = str(saved["id"])
            self._client.update_run(self._run_id, status="RUNNING")
            return

        # Begin a new one.
        run_name = self.name or start.run_dir.name
        created = self._client.create_run(self._experiment_id(), run_name=run_name)
        self._run_id = created.info.run_id
        save_for_resume(path, uri=uri, id=self._run_id)
        # Only once: MLflow rejects a changed parameter, such as the number of workers after a resume.
        params = [Param(name, str(value)[:MLFLOW_PARAM_LENGTH]) for name, value in flat(start.config)]
        self._send("params", params)

    def _experiment_id(self) -> str:
        """Return the id of the experiment, which is created if it does not exist."""
        experiment = self._client.get_experiment_by_name(self.experiment)
        if experiment is None:
            return self._client.create_experiment(self.experiment)
        return experiment.experiment_id

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = []
        for name, value in by_full_name(group, values).items():
            if math.isfinite(value):
                metrics.append(Metric(name, float(value), now, step))
        self._send("metrics", metrics)

    def _send(self, kind: str, entities: Sequence[Any]) -> None:
        """Send parameters or metrics, several per request.

        Args:
            kind: a parameter of `MlflowClient.log_batch`.
            entities: of this kind.
        """
        for first in range(0, len(entities), MLFLOW_BATCH_SIZE):
            batch = entities[first : first + MLFLOW_BATCH_SIZE]
            self._client.log_batch(self._run_id, **{kind: batch})

    def text(self, tag: str, text: str, step: int) -> None:
        self._client.log_text(self._run_id, text, f"{tag}/step_{step:08d}_{time.time_ns()}.md")

    def image(self, tag: str, path: Path, step: int) -> None:
        self._client.log_artifact(self._run_id, str(path), f"{tag}/step_{step:08d}")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)
