"""Which process of a run holds the lock of its directory, and when; no plan in a run's directory. Imports no torch.

Rank 0 of those that torchrun or a scheduler started; otherwise the process of the command line, workers or not.
"""

import contextlib
import copy
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict

from trainapp.config import compose
from trainapp.config.schema import Config
from trainapp.errors import Reported, UserError
from trainapp.launch import environment, run_name
from trainapp.run import experiment, kept_run, lock, restarts
from trainapp.units import listed

_RESTART_PATIENCE = 30.0  # seconds that a launcher may take to end the workers before these
run_name.register()  # here, since the jobs of a launcher such as submitit import the callbacks and not __main__


class Occupied(UserError):
    """The directory of a job is another run's, or holds a run that a plan must not join: nothing is written there."""


class RefuseSecondRun(Callback):
    """Takes the lock before Hydra writes the directory's .hydra and log, which may be those of a run in progress, and
    refuses a plan where they are those of any run, and a run where they are those of another experiment.

    Hydra swallows exceptions that its callbacks raise, hence `Reported`.
    """

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra. In a sweep each job takes the lock of its own."""
        run_dir = _unchecked(config, "hydra.run.dir")
        try:
            if run_dir is not None:
                _require_no_run(Path(str(run_dir)), config)
                _claim(Path(str(run_dir)), config)
                _require_same_experiment(Path(str(run_dir)), config)
        except UserError as error:
            raise Reported(error) from None

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra. The jobs' directories are not known yet: that of the sweep must be free of runs. Where only
        a job's own settings make it a plan, and for a run that lies too deep to be found, `per_directory` tells.
        """
        folder = _unchecked(config, "hydra.sweep.dir")
        if folder is not None and _has_plans(config) and (found := kept_run.runs_below(Path(str(folder)))):
            runs = listed(f"{path} has {trace}" for path, trace in found.items())
            raise Reported(_not_over("hydra.sweep.dir", folder, f"runs ({runs})"))


@contextlib.contextmanager
def per_directory(run_dir: str, composed: DictConfig) -> Iterator[None]:
    """Hold the run directory's lock inside the block. Raises Occupied when another run uses the directory, and for a
    plan where it holds a run.

    composed: by Hydra, and not checked yet.
    """
    folder = Path(run_dir)
    try:
        try:
            _claim(folder, composed)
            _require_no_run(folder, composed)
        except UserError as error:
            raise Occupied(str(error)) from None
        yield
    finally:
        lock.release(folder)


def for_worker(config: Config) -> contextlib.AbstractContextManager[None]:
    """Hold rank 0's lock in a worker that this program's launcher started. Does nothing in other processes."""
    run_dir = Path(config.run_dir)
    if environment.is_rank_zero() and not lock.is_held(run_dir):
        return lock.held_by_worker(run_dir)
    return contextlib.nullcontext()


def is_plan(composed: DictConfig) -> bool:
    """Whether the configuration, not checked yet, is for `mode=plan`."""
    return is_for_mode(composed, "plan")


def is_for_mode(composed: DictConfig, mode: str) -> bool:
    """Whether the configuration, not checked yet, is for this mode."""
    return bool(_unchecked(composed, "mode") == mode)


def _has_plans(composed: DictConfig) -> bool:
    """Whether jobs of this sweep are plans: the mode may itself be swept."""
    given = _unchecked(composed, "hydra.overrides.task") or []
    swept = [str(text).partition("=")[2] for text in given if str(text).lstrip("+").startswith("mode=")]
    return is_plan(composed) or any("plan" in re.split(r"\W+", modes) for modes in swept)


def _require_no_run(run_dir: Path, composed: DictConfig) -> None:
    if is_plan(composed) and (trace := kept_run.trace_of_run(run_dir)):
        raise _not_over("hydra.run.dir", run_dir, f"a run (it has {trace})")


def _require_same_experiment(run_dir: Path, composed: DictConfig) -> None:
    """Raises UserError, and gives the lock back, if the directory holds a run of another experiment. `launch` asks
    again, with what needs imports; of several ranks only that, which all of them take part in.
    """
    if environment.is_one_of_many_ranks() or not kept_run.trace_of_run(run_dir):
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


def _not_over(setting: str, folder: Any, content: str) -> UserError:
    return UserError(
        f"mode=plan with {setting}={folder}: this directory holds {content}, which a plan would be taken for a part "
        f"of; leave {setting} out, or choose another directory"
    )


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
