"""One process per run directory: who holds its lock, and when. Imports no torch.

Rank 0 of those that torchrun or a scheduler started; otherwise the process of the command line, workers or not.
"""

import contextlib
import copy
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict

from trainapp.config import compose
from trainapp.config.schema import Config
from trainapp.errors import Reported, UserError
from trainapp.launch import environment
from trainapp.run import experiment, lock, restarts

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
    """Hold the run directory's lock inside the block. Raises UserError when another run uses the directory.

    composed: by Hydra, and not checked yet.
    """
    try:
        _claim(Path(run_dir), composed)
        yield
    finally:
        lock.release(Path(run_dir))


def for_worker(config: Config) -> contextlib.AbstractContextManager[None]:
    """Hold rank 0's lock in a worker that this program's launcher started. Does nothing in other processes."""
    run_dir = Path(config.run_dir)
    if environment.is_rank_zero() and not lock.is_held(run_dir):
        return lock.held_by_worker(run_dir)
    return contextlib.nullcontext()


def _require_same_experiment(run_dir: Path, composed: DictConfig) -> None:
    """Raises UserError, and gives the lock back, if the directory holds a run of another experiment. `launch` asks
    again, with what needs imports; of several ranks only that, which all of them take part in.
    """
    if environment.is_one_of_many_ranks():
        return
    own = copy.deepcopy(composed)
    with open_dict(own):
        own.pop("hydra", None)
    try:
        config = compose.from_hydra(own, str(run_dir.resolve()), "")
    except UserError:  # reported by the job
        return
    try:
        experiment.require_same(config, looks_up_defaults=False)
    except UserError:
        lock.release(run_dir)
        raise


def _claim(run_dir: Path, composed: DictConfig) -> None:
    if environment.is_rank_zero():
        nodes, run_id = (_unchecked(composed, f"parallel.{name}") for name in ("nodes", "run_id"))
        shared_as = str(run_id) if run_id is not None and nodes not in (None, 1) else None
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            if not os.access(run_dir, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(run_dir))
        except OSError as error:
            place = f"{error.filename}: {error.strerror}"
            raise UserError(f"{place}; hydra.run.dir or hydra.sweep.dir must name a folder of yours") from None
        lock.acquire(run_dir, shared_as, _RESTART_PATIENCE if restarts.has_restarted() else 0.0)


def _unchecked(composed: DictConfig, name: str) -> Any:
    """The setting, None where it cannot be resolved: that is reported later, with all other mistakes."""
    return OmegaConf.select(composed, name, throw_on_resolution_failure=False)
