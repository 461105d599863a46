"""The planner in a process of its own: some paths of torch abort there, and its global switches are not the caller's.

`python -m trainapp.plan.process FOLDER` is the process that `ask` starts. Imports no torch in the caller.
"""

import logging
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from trainapp.config.schema import Config
from trainapp.errors import UserError

_REQUEST, _ANSWER = "request.pickle", "answer.pickle"


def ask(config: Config, search_only: bool = False, picture: Path | None = None) -> dict[str, Any]:
    """The plan of a configuration, as plain values: see `planner.plan`. Takes some seconds.

    picture: also draw the step or evaluation that holds the peak to this PNG. Raises UserError for mistakes in the
    configuration. Where the planner's process dies while it traces, another one runs small steps for real.
    """
    facts = _asked(config, search_only, picture)
    if isinstance(facts, str):
        reason = facts
        facts = _asked(config, search_only, picture, reason)
        if isinstance(facts, str):
            return {"certainty": "not traceable", "reason": reason}
    return facts


def _asked(
    config: Config, search_only: bool, picture: Path | None, untraceable: str | None = None
) -> dict[str, Any] | str:
    """What a process of its own answers, or how it has died. untraceable: see `planner.plan`."""
    with tempfile.TemporaryDirectory(prefix="trainapp-plan-") as folder:
        Path(folder, _REQUEST).write_bytes(pickle.dumps((config, search_only, picture, untraceable)))
        done = subprocess.run(
            [sys.executable, "-m", __name__, folder],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # users' modules, too
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # what a data set prints
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        try:
            facts, error, exit_code = pickle.loads(Path(folder, _ANSWER).read_bytes())
        except FileNotFoundError:
            return _death(done)
    if error is not None:
        raised = UserError(error)
        raised.exit_code = exit_code
        raise raised
    answer: dict[str, Any] = facts
    return answer


def _death(done: "subprocess.CompletedProcess[str]") -> str:
    ending = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    lines = done.stderr.strip().splitlines()
    return f"the planner's process ended with {ending}" + (f": {lines[-1]}" if lines else "")


def main(folder: Path) -> None:
    """Answer the request in `folder`."""
    config, search_only, picture, untraceable = pickle.loads((folder / _REQUEST).read_bytes())
    from trainapp.memory.timeline import Drawing
    from trainapp.plan import planner

    logging.basicConfig(level=logging.ERROR)  # the run itself will warn
    facts, error, exit_code = None, None, 0
    try:
        facts, peak = planner.plan(config, search_only, untraceable)
        if picture is not None and peak is not None:
            Drawing([planner.picture_of(peak, facts, picture)]).wait()
    except UserError as caught:
        error, exit_code = str(caught), caught.exit_code
    (folder / _ANSWER).write_bytes(pickle.dumps((facts, error, exit_code)))
    sys.stderr.flush()
    os._exit(0)  # torch's own end may abort after a trace


if __name__ == "__main__":
    main(Path(sys.argv[1]))
