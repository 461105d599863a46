"""`tracker=wandb`: a run of Weights & Biases. The run directory keeps its id for a resume."""

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from trainapp.config.validation import Str
from trainapp.tracking.outlet import Outlet, ServiceRecord, Start, tagged


class Wandb(Outlet):
    """mode: None as WANDB_MODE says, else online. With offline everything stays in the run directory until
    `wandb sync`. name: None for that of the run directory.
    """

    package = "wandb"

    def __init__(
        self,
        project: Str = "trainapp",
        entity: Str | None = None,
        name: Str | None = None,
        tags: list[Str] | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
    ):
        self.project, self.entity, self.name, self.tags, self.mode = project, entity, name, tags, mode

    def start(self, start: Start) -> None:
        import wandb  # late: an extra, and a second

        self._wandb: Any = wandb
        kept = ServiceRecord(start.run_dir, "wandb")
        run_id = kept.read().get("id") or uuid.uuid4().hex[:12]
        kept.write({"id": run_id, "project": self.project})
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
            reinit="create_new",  # a sweep has one run after the other in the same process
            settings=wandb.Settings(console="off"),  # the terminal belongs to the progress bar
        )
        # wandb's own step never goes back, as a run does that continues from its checkpoint.
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
