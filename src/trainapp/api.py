"""What `import trainapp` offers a Python program: `train`, `load`, `predict`, `plan`. Torch is imported late.

A run takes place in this process or, with several ranks, as a process of the command line, whose messages appear here.
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
from trainapp.launch import environment, launch
from trainapp.run import run_dir as directory
from trainapp.signals import StopRequest
from trainapp.tracking import terminal

if TYPE_CHECKING:
    from torch import nn

    from trainapp.run.result import Result

_running = threading.Lock()  # held by the one run in this process


def train(overrides: Iterable[str], run_dir: str | Path, config_dir: str | Path | None = None) -> "Result":
    """The run of `python -m trainapp OVERRIDES hydra.run.dir=RUN_DIR`, from start to end. Returns how it ended.

    overrides: such as `["model=mlp", "train.max_steps=20"]`. run_dir: where the run writes all its files; calling
    again with the same directory continues the run there, or returns its result if it has finished. config_dir: as
    `--config-dir`, a folder with options of your own; modules are found there and in the working directory.

    Trains in this process, with several ranks (`parallel=ddp`) as a process of the command line, and leaves the
    working directory, environment, signal handlers, log handlers and the random generators of this process as they
    were. It expects torch as a fresh process has it: no autocast or default type around the call, no switches of its
    own. One run at a time; while it trains, the global generators are the run's.

    Raises UserError for mistakes, with the message of the command line; TrainingStopped, a UserError, where training
    cannot continue; KeyboardInterrupt after Ctrl-C, once the step is finished and saved (in the main thread, where
    Python receives signals); SystemExit after SIGTERM, likewise.
    """
    with _one_run("trainapp.train"), _imports(config_dir):
        config = compose.from_command_line(_settings("train", overrides), _absolute(run_dir), config_dir)
        if config.mode != "train":
            other = "use trainapp.plan" if config.mode == "plan" else f"use `python -m trainapp mode={config.mode}`"
            raise UserError(f"trainapp.train: mode={config.mode} does not train; {other}")
        _run(config)
    from trainapp.run import result

    own = result.read(Path(config.run_dir))
    assert own is not None  # a training that ends writes one
    return result.Result(**vars(own), run_dir=Path(config.run_dir))


def plan(overrides: Iterable[str] = (), config_dir: str | Path | None = None) -> dict[str, Any]:
    """The plan of `python -m trainapp OVERRIDES mode=plan`: the content of plan.json. Writes nothing.

    config_dir: as `--config-dir`, a folder with options of your own; modules are found there, too. Raises UserError for
    mistakes in the configuration, with the message of the command line.
    """
    from trainapp.planning.process import ask

    with _imports(config_dir):
        return ask(compose.from_command_line(_settings("plan", overrides), config_dir=config_dir))


def load(
    run_dir: str | Path,
    which: str | Path = "best",
    user_packages: Iterable[str] = (),
    config_dir: str | Path | None = None,
) -> "nn.Module":
    """The model of a run, on the CPU and in evaluation mode, with the weights of one of its checkpoints.

    which: "best", by the objective; "last"; or the path of a checkpoint. A run that evaluates with an average of its
    weights (`train.ema`) gives that. The model is built from the settings in the checkpoint, and the run's data set is
    opened for the sizes that the model takes from it.

    user_packages: your packages that the model, the data and the loss may come from, and config_dir: where they are
    found beside the working directory, both as for `train`. They are not taken from the checkpoint: it may be another
    person's, and would name the code that runs here. Raises UserError where there is no such checkpoint, and for one
    that is damaged, names other packages, or does not fit.
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
    `["user_packages=[my_parts]"]`; model, data and task are the run's own where they choose no others. run_dir: for
    the log and, unless `predict.output` names another file, for predictions.jsonl. config_dir, what is left as it was
    and what is raised: as for `train`. After Ctrl-C the same call continues the file.
    """
    given = [*_settings("predict", overrides), "mode=predict"]
    given.append(command_line.override("checkpointing.resume", _absolute(run)))
    with _one_run("trainapp.predict"), _imports(config_dir):
        config = compose.from_command_line(given, _absolute(run_dir), config_dir)
        _run(config)
    output = config.predict.output
    return Path(config.run_dir) / "predictions.jsonl" if output is None else Path(output).expanduser().resolve()


# What a call checks


@contextmanager
def _one_run(function: str) -> Iterator[None]:
    if environment.is_one_of_many_ranks():
        raise UserError(
            f"{function}: torchrun, srun or submitit started this process as one of several, which would each "
            "run it; start `python -m trainapp` with it, or set parallel.devices=N in a program that is started once"
        )
    if not _running.acquire(blocking=False):
        raise UserError(f"{function}: another run is in progress in this process; one at a time")
    try:
        yield
    finally:
        _running.release()


@contextmanager
def _imports(config_dir: str | Path | None) -> Iterator[None]:
    """Users' modules are found as on the command line."""
    before = list(sys.path)
    command_line.add_import_paths([] if config_dir is None else ["--config-dir", str(config_dir)])
    try:
        yield
    finally:
        sys.path[:] = before


def _absolute(path: str | Path) -> str:
    return str(Path(path).expanduser().resolve())


def _settings(function: str, overrides: Iterable[str]) -> list[str]:
    """The overrides. Raises UserError for what only the command line takes."""
    given = compose.as_overrides(overrides)
    for text in given:
        name = text.lstrip("+~").partition("=")[0]
        if text.startswith("-") or (name.partition(".")[0] == "hydra" and name != "hydra.searchpath"):
            raise UserError(
                f"trainapp.{function}: {text} is for the command line; give overrides such as 'model=gpt', a folder "
                "with options of your own as config_dir=FOLDER, and the run's directory as run_dir=DIR"
            )
    return given


# The run


def _run(config: Config) -> None:
    """Train or predict as `config` says, which has an absolute `run_dir`. Raises KeyboardInterrupt after Ctrl-C."""
    try:
        if config.parallel.strategy == "single":
            _run_here(config)
        else:
            _run_as_command(config)
    except SystemExit as stopped:
        if stopped.code == 128 + signal.SIGINT:
            raise KeyboardInterrupt from None
        raise


def _run_here(config: Config) -> None:
    run_dir = Path(config.run_dir)
    directory.acquire(run_dir)
    try:
        with _as_before(config.memory.expandable_segments), _logged(run_dir):
            launch.run(config)
    finally:
        directory.release(run_dir)


@contextmanager
def _as_before(expandable_segments: bool = False) -> Iterator[None]:
    """Restores the environment and the random generators of the caller's process; what else a run sets in torch is the
    next run's to set.
    """
    variables = dict(os.environ)
    # before torch is imported; other runs may follow in this process
    launch.prepare_process(expandable_segments, deterministic=True)
    import torch

    from trainapp.rng import preserved_rng

    device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    try:
        with torch.inference_mode(False), torch.enable_grad(), preserved_rng(device):
            yield
    finally:
        os.environ.clear()
        os.environ.update(variables)
        gc.unfreeze()  # else the caller's objects would never be collected
        if torch.cuda.is_initialized():
            gc.collect()  # the run's model, which may be in a cycle
            torch.cuda.empty_cache()


@contextmanager
def _logged(run_dir: Path) -> Iterator[None]:
    """The run's log in its directory, and on the terminal unless the program has handlers of its own."""
    logger = logging.getLogger("trainapp")
    file = logging.FileHandler(run_dir / "trainapp.log")
    file.setFormatter(logging.Formatter("[%(asctime)s] %(levelname)s %(message)s"))
    handlers: list[logging.Handler] = [file, *([] if logger.hasHandlers() else [terminal.Handler(sys.stderr)])]
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
        file.close()


def _run_as_command(config: Config) -> None:
    """The run as a process of its own. Signals are passed on to it; its error is raised here."""
    message: list[str] = []  # the last that it prints for the user
    with subprocess.Popen(
        [sys.executable, *shlex.split(config.command)[1:]],
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # users' modules, too
        start_new_session=True,  # a terminal's Ctrl-C would reach it twice
    ) as process:
        is_main = threading.current_thread() is threading.main_thread()  # the only one that may set handlers
        signals = StopRequest.SIGNALS if is_main else ()
        before = {own: signal.signal(own, lambda number, _: process.send_signal(number)) for own in signals}
        try:
            assert process.stderr is not None
            for line in process.stderr:
                sys.stderr.write(line)
                if line.startswith("trainapp: "):
                    message = [line.removeprefix("trainapp: ").strip()]
                elif message and line.startswith(" " * 10):
                    message.append(line.strip())
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    exit_code = process.returncode
    if exit_code > 128:
        raise SystemExit(exit_code)
    if exit_code:
        message = message or [f"its process ended (exit code {exit_code}); see its output"]
        raise (UserError if exit_code == UserError.exit_code else TrainingStopped)("\n".join(message))
