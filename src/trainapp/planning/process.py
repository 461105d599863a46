"""The planner in a process of its own: some paths of torch abort there, its global switches are not the caller's, and a
task may keep what it makes in a traced step.

`python -m trainapp.planning.process FOLDER` is the process that `answer_of` starts. Imports no torch in the caller.
"""

import dataclasses
import gc
import importlib
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from trainapp.config.schema import Config
from trainapp.errors import UserError

_REQUEST, _ANSWER, _ERRORS = "request.pickle", "answer.pickle", "stderr.txt"
# What tells a process its rank: the planner's would wait for the others.
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOOK_EVERY = 0.1  # seconds: how soon a stop request ends the planner's process


# In an answer: with what to ask again in another process. The settings, where it is to see no GPU; why not to trace.
UNSEEN, UNTRACEABLE = "unseen", "untraceable"


class NoAnswer(Exception):
    """The planner's process died, took too long, or was stopped. The message says which."""


class Died(NoAnswer):
    """The planner's process died."""


def _never() -> bool:
    return False


def ask(
    config: Config,
    only: Collection[str] = (),
    picture: Path | None = None,
    patience: float | None = None,
    stops: Callable[[], bool] = _never,
) -> dict[str, Any]:
    """The plan of a configuration, as plain values: see `planner.plan`. Takes some seconds.

    only: see `planner.plan`. picture: also draw the step or evaluation that holds the peak to this PNG. patience,
    stops: see `answer_of`. Raises UserError for mistakes in the configuration. Where the planner's process dies while
    it traces, another one runs small steps for real. Where it is late or is stopped, `certainty` is "not traceable".
    """
    return _asked(config, only, picture, None, patience, stops)


def ask_in_parts(config: Config, picture: Path, early: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """As `ask`. early: called with the plan without its levers, as soon as it is known."""
    with tempfile.TemporaryDirectory(prefix="trainapp-plan-") as folder:
        place = Path(folder, _ANSWER)

        def look() -> bool:
            if place.exists():
                early(pickle.loads(place.read_bytes()))
                place.unlink()
            return False

        return _asked(config, (), picture, place, None, look)


def _asked(
    config: Config,
    only: Collection[str],
    picture: Path | None,
    early: Path | None,
    patience: float | None,
    stops: Callable[[], bool],
) -> dict[str, Any]:
    started, untraceable = time.monotonic(), None
    sees_devices = None in (config.plan.device, config.plan.world)  # which are to be found out
    for _ in range(3):  # again where no GPU is seen, and where the process dies
        left = None if patience is None else max(0.0, patience - (time.monotonic() - started))
        try:
            facts: dict[str, Any] = answer_of(
                "trainapp.planning.planner.facts_of",
                *(config, only, picture, untraceable, early),
                patience=left,
                stops=stops,
                sees_devices=sees_devices,
            )
            if UNSEEN in facts:
                config, sees_devices = dataclasses.replace(config, plan=facts[UNSEEN]), False
            elif UNTRACEABLE in facts:
                untraceable = facts[UNTRACEABLE]
            else:
                return facts
        except Died as error:
            if untraceable is not None:
                break
            untraceable = str(error)
        except NoAnswer as error:
            untraceable = untraceable or str(error)
            break
    return {"certainty": "not traceable", "reason": untraceable}


def answer_of(
    function: str,
    *arguments: Any,
    patience: float | None = None,
    stops: Callable[[], bool] = _never,
    sees_devices: bool = True,
) -> Any:
    """What the function of this dotted name returns in a process of its own. Importing torch there takes seconds.

    arguments: pickled, as is the answer. patience: seconds; None waits. stops: polled while waiting; True aborts.
    sees_devices: False hides CUDA from it, whose context would take some hundred MiB of a device that may be full.
    Raises NoAnswer, and UserError as the function does.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # users' modules, too
    if not sees_devices:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory(prefix="trainapp-plan-") as folder:
        Path(folder, _REQUEST).write_bytes(pickle.dumps((function, arguments)))
        _run([sys.executable, "-m", __name__, folder], environment, Path(folder), patience, stops)
        answer, error, exit_code = pickle.loads(Path(folder, _ANSWER).read_bytes())
    if error is not None:
        raised = UserError(error)
        raised.exit_code = exit_code
        raise raised
    return answer


def _run(
    command: list[str], environment: dict[str, str], folder: Path, patience: float | None, stops: Callable[[], bool]
) -> None:
    """Until there is an answer. Raises NoAnswer where none comes; the process has ended either way."""
    end = None if patience is None else time.monotonic() + patience
    nowhere = subprocess.DEVNULL  # what a data set prints
    try:
        with open(folder / _ERRORS, "wb") as errors:
            planner = subprocess.Popen(command, env=environment, stdin=nowhere, stdout=nowhere, stderr=errors)
    except OSError as problem:  # out of memory, or of processes
        raise NoAnswer(f"the planner's process cannot start: {problem}") from None
    try:
        while planner.poll() is None:
            if stops():
                raise NoAnswer("the run is to stop")
            if end is not None and time.monotonic() > end:
                raise NoAnswer(f"the planner's process took longer than {patience:.0f} s")
            try:
                planner.wait(_LOOK_EVERY)
            except subprocess.TimeoutExpired:
                continue
    finally:
        planner.kill()  # no effect once it has ended
        planner.wait()
    if not (folder / _ANSWER).exists():
        raise Died(_death(planner.returncode, (folder / _ERRORS).read_text(errors="replace")))


def _death(exit_code: int, errors: str) -> str:
    ending = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    lines = errors.strip().splitlines()
    return f"the planner's process ended with {ending}" + (f": {lines[-1]}" if lines else "")


def main(folder: Path) -> None:
    """Answer the request in `folder`."""
    name, arguments = pickle.loads((folder / _REQUEST).read_bytes())
    logging.basicConfig(level=logging.ERROR)  # the run itself will warn
    module, _, function = name.rpartition(".")
    imported = importlib.import_module(module)
    gc.freeze()  # walking all of torch in every collection took a tenth of a large plan's time
    answer, error, exit_code = None, None, 0
    try:
        answer = getattr(imported, function)(*arguments)
    except UserError as caught:
        error, exit_code = str(caught), caught.exit_code
    written = folder / f"{_ANSWER}.part"
    written.write_bytes(pickle.dumps((answer, error, exit_code)))
    written.rename(folder / _ANSWER)
    sys.stderr.flush()
    os._exit(0)  # torch's own end may abort after a trace


if __name__ == "__main__":
    main(Path(sys.argv[1]))
