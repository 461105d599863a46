"""Runs the real command line in a subprocess, and reads what a run leaves behind."""

import copy
import functools
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import forked_cli

PROGRAM = (sys.executable, "-m", "trainapp")
ROOT = Path(__file__).resolve().parents[2]
# What Hydra and the log write before a run does anything.
OWN_FILES = {".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml", "trainapp.log"}
LR_FIND_FILES = {".lr_find/config.yaml", ".lr_find/hydra.yaml", ".lr_find/overrides.yaml", "lr_find.log"}


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


def environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment with one thread per run, updated with `env`."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **(env or {})}


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
    changed_environment = environment(env)
    if forks := forks_for(command, changed_environment):
        return forks.run(overrides, cwd, changed_environment, timeout)
    return subprocess.run(
        [*command, *overrides], cwd=cwd, env=changed_environment, capture_output=True, text=True, timeout=timeout
    )


def forks_for(command: Sequence[str], env: Mapping[str, str]) -> forked_cli.Forks | None:
    """What starts this command with this environment as it would by itself, if there is such a process. Not where torch
    can use CUDA, which no fork can once its parent has looked for a device.
    """
    import torch

    if tuple(command) != PROGRAM or torch.version.cuda is not None:
        return None
    lasting = frozenset(forked_cli.lasting(env).items())
    if lasting not in _seen[-2:]:  # a server takes longer than one run, so it waits for the second
        _seen.append(lasting)
        return None
    return _forks(lasting)


_seen: list[frozenset] = []


@functools.lru_cache(maxsize=2)
def _forks(env: frozenset) -> forked_cli.Forks:
    return forked_cli.Forks(dict(env))


def train(run_dir: Path, *overrides: str, **options: Any) -> subprocess.CompletedProcess:
    """A run in `run_dir` that must succeed."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    options.setdefault("cwd", run_dir.parent)
    done = run_cli(*overrides, f"hydra.run.dir={run_dir}", **options)
    assert done.returncode == 0, f"{shlex.join(overrides)}\n{done.stdout}{done.stderr}"
    return done


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The log steps, one dict each."""
    return _lines(run_dir / "metrics.jsonl")


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """The evaluations, one dict each."""
    return _lines(run_dir / "evaluations.jsonl")


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


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _events(run_dir: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # slow: a second

    accumulator = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator
