"""Where Hydra finds `trainapp.sweep`: it builds plugins only from this namespace, which it imports at every start."""

from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class Settings:
    """The settings `hydra.sweeper`.

    params: a search space in a configuration file, such as `{optimizer.lr: "interval(1e-4,1e-1)"}`.
    """

    _target_: str = "hydra_plugins.trainapp_sweeper.TrainappSweeper"
    params: Any = None


ConfigStore.instance().store(group="hydra/sweeper", name="trainapp", node=Settings, provider="trainapp")


class TrainappSweeper(Sweeper):
    """Hydra's way into `trainapp.sweep`."""

    def __init__(self, params: Any = None) -> None:
        self.params = dict(params or {})

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store what `sweep` needs. Called by Hydra."""
        self.setup_arguments = (hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> None:
        """Run the sweep of these overrides of the command line. Called by Hydra.

        Raises SystemExit with the sweep's status, unless that is 0.
        """
        from trainapp.sweep import sweeper

        overrides = [f"{name}={text}" for name, text in self.params.items()]
        overrides += arguments  # later ones count
        sweeper.run(*self.setup_arguments, overrides)
