"""The Python API, `import trainapp`: `train`, `load`, `predict`, `plan`. Torch is imported late.

A run takes place in this process or, with several ranks, in a command-line process, whose messages appear here.
"""

import gc
import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainapp.config import command_line, compose
from trainapp.config.schema import Config
from trainapp.errors import TrainingStopped, UserError
from trainapp.files import LOG
from trainapp.launch import environment
from trainapp.launch.lock import locked
from trainapp.launch.process import prepare_process, uses_expandable_segments
from trainapp.run import directory
from trainapp.signals import TIME_IS_UP, TO_BE_CONTINUED, Interrupted, handled_by
from trainapp.tracking import terminal

if TYPE_CHECKING:
    from torch import nn

    from trainapp.run.result import Result

_running = threading.Lock()  # held by the one run in this process


def train(overrides: Iterable[str], run_dir: str | Path, config_dir: str | Path | None = None) -> "Result":
    """Do the run of `python -m trainapp OVERRIDES hydra.run.dir=RUN_DIR`, from start to end. Returns its result.

    overrides: such as `["model=mlp", "train.max_steps=20"]`. run_dir: the directory for all files of the run; calling
    again with the same directory continues the run, or returns its result if it has finished. config_dir: as
    `--config-dir`, a folder with your own options; modules are found there and in the working directory.

    Trains in this process, or with several ranks (`parallel=ddp`) in a command-line process, and restores the working
    directory, environment, signal handlers, log handlers and random generators of this process. Expects torch's
    defaults of a fresh process: no autocast or default dtype around the call, no changed switches. One run at a time;
    while it trains, it uses the global generators.

    Raises UserError for mistakes, with the message of the command line; TrainingStopped, a UserError, if training
    cannot continue; KeyboardInterrupt after Ctrl-C, once the step is finished and saved (in the main thread, where
    Python receives signals); likewise SystemExit after SIGTERM, with the exit status of the command line.
    """
    with _one_run("trainapp.train"), _imports(config_dir):
        settings = _settings("train", overrides)
        config = compose.from_command_line(settings, _absolute(run_dir), config_dir)
        if not config.activity.trains:
            other = "use trainapp.plan" if config.mode == "plan" else f"use `python -m trainapp mode={config.mode}`"
            raise UserError(f"trainapp.train: mode={config.mode} does not train; {other}")
        _run(config)

    from trainapp.run import result

    ended = result.read(Path(config.run_dir))
    assert ended is not None  # a training that ends writes one
    return ended


def plan(overrides: Iterable[str] = (), config_dir: str | Path | None = None) -> dict[str, Any]:
    """The plan of `python -m trainapp OVERRIDES mode=plan`: the content of plan.json. Writes nothing.

    config_dir: as `--config-dir`, a folder with your own options and modules. Raises UserError for mistakes in the
    configuration, with the message of the command line.
    """
    from trainapp.planning.process import plan_in_subprocess

    with _imports(config_dir):
        settings = _settings("plan", overrides)
        config = compose.from_command_line(settings, config_dir=config_dir)
        return plan_in_subprocess(config)


def load(
    run_dir: str | Path,
    which: str | Path = "best",
    user_packages: Iterable[str] = (),
    config_dir: str | Path | None = None,
) -> "nn.Module":
    """The model of a run, on the CPU and in evaluation mode, with the weights of one of its checkpoints.

    which: "best", by the objective; "last"; or the path of a checkpoint. With several updates and `objective=auto`
    there is no best: it is the last, too. A run with a weight average (`train.ema`)
    gives the averaged weights. The model is built from the settings in the checkpoint, and the run's data set is opened
    for the sizes that the model takes from it.

    user_packages: your packages that define the model, data and loss. They are not read from the checkpoint, which may
    come from someone else and must not choose the code that runs here. config_dir: a folder to import from, besides
    the working directory. Raises UserError if there is no such checkpoint, or if it is damaged, names other
    packages, or does not fit.
    """
    packages = [user_packages] if isinstance(user_packages, str) else list(user_packages)
    with _imports(config_dir), _as_before():
        from trainapp.run import trained

        return trained.model(Path(_absolute(run_dir)), which, packages)


def predict(
    run: str | Path, overrides: Iterable[str] = (), *, run_dir: str | Path, config_dir: str | Path | None = None
) -> Path:
    """`python -m trainapp mode=predict checkpointing.resume=RUN OVERRIDES`. Returns the file: a JSON line per sample.

    run: the directory of a run, or one of its checkpoints. overrides: such as `["predict.split=train"]` or
    `["user_packages=[my_parts]"]`; model, data and task are the run's own unless overridden. run_dir: for the log and,
    unless `predict.output` names another file, predictions.jsonl. config_dir, restored state and errors: as for
    `train`. After Ctrl-C the same call continues the file.
    """
    settings = [*_settings("predict", overrides), "mode=predict"]
    settings.append(command_line.override("checkpointing.resume", _absolute(run)))
    with _one_run("trainapp.predict"), _imports(config_dir):
        config = compose.from_command_line(settings, _absolute(run_dir), config_dir)
        _run(config)
    output = config.predict.output
    if output is None:
        return Path(config.run_dir) / "predictions.jsonl"
    return Path(output).expanduser().resolve()


# Checks of a call


@contextmanager
def _one_run(function: str) -> Iterator[None]:
    advice = "start `python -m trainapp` in its place, or set parallel.devices=N in a program that is started once"
    environment.require_one_process(function, advice)
    if not _running.acquire(blocking=False):
        raise UserError(f"{function}: another run is in progress in this process; one at a time")
    try:
        yield
    finally:
        _running.release()


@contextmanager
def _imports(config_dir: str | Path | None) -> Iterator[None]:
    """Make users' modules importable, as on the command line."""
    callers_path = list(sys.path)
    flags = []
    if config_dir is not None:
        flags = ["--config-dir", str(config_dir)]
    command_line.add_import_paths(flags)
    try:
        yield
    finally:
        sys.path[:] = callers_path


def _absolute(path: str | Path) -> str:
    return str(Path(path).expanduser().resolve())


def _settings(function: str, overrides: Iterable[str]) -> list[str]:
    """The overrides. Raises UserError for options that only the command line accepts."""
    texts = compose.as_overrides(overrides)
    for text in texts:
        name = text.lstrip("+~").partition("=")[0]
        is_of_hydra = name.partition(".")[0] == "hydra" and name != "hydra.searchpath"
        if text.startswith("-") or is_of_hydra:
            raise UserError(
                f"trainapp.{function}: {text} is for the command line; give overrides such as 'model=gpt', a folder "
                "with your own options as config_dir=FOLDER, and the run's directory as run_dir=DIR"
            )
    return texts


# The run


def _run(config: Config) -> None:
    """Train or predict by `config`, whose `run_dir` is absolute. Raises KeyboardInterrupt after Ctrl-C."""
    try:
        if config.parallel.strategy != "single":
            return _run_as_command(config)

        # In this process. Torch is imported below, once the process is prepared.
        with locked(config.run_dir), _as_before(uses_expandable_segments(config)):
            from trainapp.run import runner

            directory.require_same_experiment(config)
            with _logged(Path(config.run_dir)):
                runner.run(config)
    except Interrupted as stopped:
        # A run that its time limit has ended returns as one that has finished.
        if stopped.signal == signal.SIGINT:
            raise KeyboardInterrupt from None
        if stopped.signal != TIME_IS_UP:
            raise


@contextmanager
def _as_before(expandable_segments: bool = False) -> Iterator[None]:
    """Restore the environment and random generators of the caller's process; other torch settings of a run are reset by
    the next run.
    """
    variables = dict(os.environ)

    # Before torch is imported, and as for a deterministic run: one may follow in this process.
    prepare_process(expandable_segments, deterministic=True)
    import torch

    from trainapp.rng import preserved_rng

    device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    try:
        with torch.inference_mode(False), torch.enable_grad(), preserved_rng(device):
            yield
    finally:
        os.environ.clear()
        os.environ.update(variables)
        gc.unfreeze()  # otherwise the caller's objects would never be collected
        if torch.cuda.is_initialized():
            gc.collect()  # the run's model may be in a cycle
            torch.cuda.empty_cache()


@contextmanager
def _logged(run_dir: Path) -> Iterator[None]:
    """Log to the run's directory, and to the terminal unless the program has its own handlers."""
    logger = logging.getLogger("trainapp")
    file_handler = logging.FileHandler(run_dir / LOG)
    file_handler.setFormatter(logging.Formatter("[%(asctime)s] %(levelname)s %(message)s"))
    handlers: list[logging.Handler] = [file_handler]
    if not logger.hasHandlers():
        handlers.append(terminal.Handler(sys.stderr))

    level = logger.level
    logger.setLevel(level or logging.INFO)
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.setLevel(level)
        for handler in handlers:
            logger.removeHandler(handler)
        file_handler.close()


def _echoed(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        sys.stderr.write(line)
        yield line


def _run_as_command(config: Config) -> None:
    """Run in a command-line process. Signals are passed on to it; its error is raised here."""
    sent: list[int] = []

    def send(number: int, frame: object) -> None:
        sent.append(number)
        process.send_signal(number)

    # The same interpreter, which finds the same modules.
    arguments = shlex.split(config.command)[1:]
    import_path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        [sys.executable, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=os.environ | {"PYTHONPATH": import_path},
        start_new_session=True,  # a terminal's Ctrl-C would reach it twice
    ) as process:
        assert process.stderr is not None
        with handled_by(send):
            message_lines = command_line.message_in(_echoed(process.stderr))

    # Ended by a signal: passed on by us, or sent to the process alone.
    exit_code = process.returncode
    if exit_code < 0:  # killed by a signal, which a shell reports so
        exit_code = 128 - exit_code
    if exit_code > 128 or (exit_code == TO_BE_CONTINUED and sent):
        signal_number = sent[0] if sent else exit_code - 128
        raise Interrupted(exit_code, signal_number)

    # Ended by an error.
    if exit_code in (0, TO_BE_CONTINUED):
        return
    if not message_lines:
        message_lines = [f"its process ended (exit code {exit_code}); see its output"]
    message = "\n".join(message_lines)
    if exit_code == UserError.exit_code:
        raise UserError(message)
    raise TrainingStopped(message)
