"""Runs the real command line in a subprocess, and reads what a run leaves behind."""

import copy
import json
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forked_cli import PROGRAM, Forked, can_fork, environment

ROOT = Path(__file__).resolve().parents[2]
# What Hydra and the log write before a run does anything.
OWN_FILES = {".hydra/command.json", ".hydra/config.yaml", ".hydra/overrides.yaml", "trainapp.log"}


def changed(settings: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested settings with `{"section.key": value}`."""
    copied = copy.deepcopy(dict(settings))
    for path, value in values.items():
        *parents, key = path.split(".")
        node = copied
        for name in parents:
            node = node[name]
        node[key] = value
    return copied


def run_cli(
    *overrides: str,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
    command: Sequence[str] = PROGRAM,
) -> subprocess.CompletedProcess:
    """Run `python -m trainapp OVERRIDES` in `cwd` to the end, in a fork where that makes no difference. A nonzero exit
    code does not raise.
    """
    whole = environment(env)
    if not can_fork(command, whole):
        return subprocess.run(
            [*command, *overrides], cwd=cwd, env=whole, capture_output=True, text=True, timeout=timeout
        )
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        process = Forked(overrides, cwd, whole, (out.name, err.name), own_session=False)
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return subprocess.CompletedProcess(process.args, status, out.read(), err.read())


def wait_until(ready: Callable[[], bool], process: Any, limit: float = 90) -> None:
    """Wait for something that a running process does."""
    until = time.monotonic() + limit
    while not ready():
        assert process.poll() is None, "it has ended"
        assert time.monotonic() < until
        time.sleep(0.01)


def lines_in(path: Path) -> int:
    """How many lines a file has; 0 where there is none."""
    return path.read_text().count("\n") if path.exists() else 0


def train(run_dir: Path, *overrides: str, **options: Any) -> subprocess.CompletedProcess:
    """A run in `run_dir` that must succeed."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    options.setdefault("cwd", run_dir.parent)
    done = run_cli(*overrides, f"hydra.run.dir={run_dir}", **options)
    assert done.returncode == 0, f"{shlex.join(overrides)}\n{done.stdout}{done.stderr}"
    return done


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The log steps, one dict each."""
    return lines(run_dir / "metrics.jsonl")


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """The evaluations, one dict each."""
    return lines(run_dir / "evaluations.jsonl")


def result(run_dir: Path) -> dict[str, Any]:
    """The contents of result.json."""
    return json.loads((run_dir / "result.json").read_text())


def incidents(run_dir: Path) -> list[dict[str, Any]]:
    """The out-of-memory errors of a run, in order."""
    return [json.loads(path.read_text()) for path in sorted((run_dir / "oom").glob("*.json"))]


def scalars(run_dir: Path) -> dict[str, dict[int, float]]:
    """`{tag: {step: value}}` from TensorBoard's event files, where values are 32-bit floats."""
    accumulator = _events(run_dir)
    return {
        tag: {event.step: event.value for event in accumulator.Scalars(tag)} for tag in accumulator.Tags()["scalars"]
    }


def texts(run_dir: Path) -> dict[str, list[tuple[int, str]]]:
    """`{tag: [(step, text), ...]}` from TensorBoard's event files; a step may have several."""
    accumulator = _events(run_dir)
    return {
        tag.removesuffix("/text_summary"): [
            (event.step, event.tensor_proto.string_val[0].decode()) for event in accumulator.Tensors(tag)
        ]
        for tag in accumulator.Tags()["tensors"]
    }


def files(folder: Path) -> set[str]:
    """Every file under a folder, as relative paths with forward slashes."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def _events(run_dir: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # slow: a second

    accumulator = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator
