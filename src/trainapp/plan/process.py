"""The planner in a process of its own: some paths of torch abort there, its global switches are not the caller's, and a
task may keep what it makes in a traced step.

`python -m trainapp.plan.process FOLDER` is the process that `answer_of` starts. Imports no torch in the caller.
"""

import importlib
import logging
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from trainapp.config.schema import Config
from trainapp.errors import UserError

_REQUEST, _ANSWER = "request.pickle", "answer.pickle"
# What tells a process its rank: the planner's would wait for the others.
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


class NoAnswer(Exception):
    """The planner's process died, or took too long. The message says how it ended."""


def ask(
    config: Config, only: Collection[str] = (), picture: Path | None = None, patience: float | None = None
) -> dict[str, Any]:
    """The plan of a configuration, as plain values: see `planner.plan`. Takes some seconds.

    only: see `planner.plan`. picture: also draw the step or evaluation that holds the peak to this PNG. patience:
    seconds; None waits. Raises UserError for mistakes in the configuration. Where the planner's process dies or is
    late, `certainty` is "not traceable".
    """
    try:
        facts: dict[str, Any] = answer_of("trainapp.plan.planner.facts_of", config, only, picture, patience=patience)
    except NoAnswer as error:
        return {"certainty": "not traceable", "reason": str(error)}
    return facts


def answer_of(function: str, *arguments: Any, patience: float | None = None, sees_devices: bool = True) -> Any:
    """What the function of this dotted name returns in a process of its own. Importing torch there takes seconds.

    arguments: pickled, as is the answer. patience: seconds; None waits. sees_devices: False hides CUDA from it, whose
    context would take some hundred MiB of a device that may be full. Raises NoAnswer, and UserError as the function
    does.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # users' modules, too
    if not sees_devices:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory(prefix="trainapp-plan-") as folder:
        Path(folder, _REQUEST).write_bytes(pickle.dumps((function, arguments)))
        try:
            done = subprocess.run(
                [sys.executable, "-m", __name__, folder],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # what a data set prints
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                timeout=patience,
            )
            answer, error, exit_code = pickle.loads(Path(folder, _ANSWER).read_bytes())
        except subprocess.TimeoutExpired:
            raise NoAnswer(f"the planner's process took longer than {patience:.0f} s") from None
        except FileNotFoundError:
            raise NoAnswer(_death(done)) from None
        except OSError as problem:  # no process could be started: memory, or their number
            raise NoAnswer(f"the planner's process: {problem}") from None
    if error is not None:
        raised = UserError(error)
        raised.exit_code = exit_code
        raise raised
    return answer


def _death(done: "subprocess.CompletedProcess[str]") -> str:
    ending = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    lines = done.stderr.strip().splitlines()
    return f"the planner's process ended with {ending}" + (f": {lines[-1]}" if lines else "")


def main(folder: Path) -> None:
    """Answer the request in `folder`."""
    name, arguments = pickle.loads((folder / _REQUEST).read_bytes())
    logging.basicConfig(level=logging.ERROR)  # the run itself will warn
    module, _, function = name.rpartition(".")
    answer, error, exit_code = None, None, 0
    try:
        answer = getattr(importlib.import_module(module), function)(*arguments)
    except UserError as caught:
        error, exit_code = str(caught), caught.exit_code
    (folder / _ANSWER).write_bytes(pickle.dumps((answer, error, exit_code)))
    sys.stderr.flush()
    os._exit(0)  # torch's own end may abort after a trace


if __name__ == "__main__":
    main(Path(sys.argv[1]))
