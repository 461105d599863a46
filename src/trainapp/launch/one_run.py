"""One process per run directory: who holds its lock, and when. Imports no torch.

Rank 0 of those that torchrun or a scheduler started; otherwise the process of the command line, workers or not.
"""

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict

from trainapp.config import compose
from trainapp.errors import Reported, UserError
from trainapp.launch import environment
from trainapp.run import run_dir as directory

_RESTART_PATIENCE = 30.0  # seconds that a launcher may take to end the workers before these
environment.register()  # here, since the jobs of a launcher such as submitit import the callbacks and not __main__


class RefuseSecondRun(Callback):
    """Takes the lock before Hydra writes the directory's .hydra and log, which may be those of a run in progress or of
    another experiment. Hydra swallows exceptions that its callbacks raise, hence `Reported`.
    """

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra. In a sweep each job takes the lock of its own."""
        run_dir = _unchecked(config, "hydra.run.dir")
        try:
            if run_dir is not None:
                _claim(Path(str(run_dir)), config)
                _require_same_experiment(Path(str(run_dir)), config)
        except UserError as error:
            raise Reported(error) from None


@contextlib.contextmanager
def per_directory(run_dir: str, composed: DictConfig) -> Iterator[None]:
    """Hold the run directory's lock inside the bdirectory. Raises UserError when another run uses the directory.

    composed: by Hydra, and not checked yet.
    """
    try:
        _claim(Path(run_dir), composed)
        yield
    finally:
        directory.release(Path(run_dir))


def _require_same_experiment(run_dir: Path, composed: DictConfig) -> None:
    """Raises UserError, and gives the lock back, if the directory holds a run of another experiment. Several ranks ask
    in `launch`, together.
    """
    if environment.is_one_of_many_ranks() or not (run_dir / "checkpoints").exists():
        return
    own = copy.deepcopy(composed)
    with open_dict(own):
        own.pop("hydra", None)
    try:
        config = compose.from_hydra(own, str(run_dir.resolve()), "")
    except UserError:  # reported by the job
        return
    try:
        directory.require_same_experiment(config)
    except UserError:
        directory.release(run_dir)
        raise


def _claim(run_dir: Path, composed: DictConfig) -> None:
    if environment.is_rank_zero():
        nodes, run_id = (_unchecked(composed, f"parallel.{name}") for name in ("nodes", "run_id"))
        shared_as = str(run_id) if run_id is not None and nodes not in (None, 1) else None
        directory.acquire(run_dir, shared_as, _RESTART_PATIENCE if directory.has_restarted() else 0.0)


def _unchecked(composed: DictConfig, name: str) -> Any:
    """The setting, None where it cannot be resolved: that is reported later, with all other mistakes."""
    return OmegaConf.select(composed, name, throw_on_resolution_failure=False)
