"""`tracker=mlflow`: a run of MLflow. The run directory keeps its id for a resume."""

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainapp.config.validation import Str
from trainapp.tracking.outlet import Outlet, ServiceRecord, Start, flattened, tagged

LONGEST = 500  # characters of a parameter; older servers take no more
MOST_PARAMETERS, MOST_METRICS = 100, 1000  # of one request


class Mlflow(Outlet):
    """uri: of a server or a database, such as sqlite:///runs.db; None: MLFLOW_TRACKING_URI, else files in the run
    directory, mlruns/. name: None for that of the run directory.
    """

    package = "mlflow"

    def __init__(self, uri: Str | None = None, experiment: Str = "trainapp", name: Str | None = None):
        self.uri, self.experiment, self.name = uri, experiment, name

    def start(self, start: Start) -> None:
        from mlflow.tracking import MlflowClient  # late: an extra, and a second; no global state of its fluent API

        uri = self.uri or os.environ.get("MLFLOW_TRACKING_URI") or (start.run_dir / "mlruns").resolve().as_uri()
        if uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 asks for it
        self._client = MlflowClient(tracking_uri=uri)
        kept = ServiceRecord(start.run_dir, "mlflow")
        known = kept.read()
        if known.get("uri") == uri:
            self._id = str(known["id"])
            self._client.update_run(self._id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(self.experiment)
        self._id = self._client.create_run(experiment, run_name=self.name or start.run_dir.name).info.run_id
        kept.write({"uri": uri, "id": self._id})
        self._log_parameters(start.config)

    def _log_parameters(self, config: Mapping[str, Any]) -> None:
        """Once: MLflow refuses another value of a parameter, such as the number of workers after a resume."""
        from mlflow.entities import Param

        parameters = [Param(name, str(value)[:LONGEST]) for name, value in flattened(config).items()]
        for first in range(0, len(parameters), MOST_PARAMETERS):
            self._client.log_batch(self._id, params=parameters[first : first + MOST_PARAMETERS])

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        finite = {name: float(value) for name, value in tagged(group, values).items() if math.isfinite(value)}
        metrics = [Metric(name, value, now, step) for name, value in finite.items()]
        for first in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + MOST_METRICS])

    def text(self, tag: str, text: str, step: int) -> None:
        self._client.log_text(self._id, text, f"{tag}/step_{step:08d}_{time.time_ns()}.md")

    def image(self, tag: str, path: Path, step: int) -> None:
        self._client.log_artifact(self._id, str(path), f"{tag}/step_{step:08d}")

    def close(self) -> None:
        self._client.set_terminated(self._id)
