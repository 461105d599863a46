"""Files: directories of the program and its user, names of a run's files, atomic writes, and standard JSON."""

import contextlib
import json
import math
import os
import shlex
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

PACKAGE = Path(__file__).parent
# An installed wheel carries conf/ inside the package; a checkout has it at its root.
CONF = next(folder for folder in (PACKAGE / "conf", PACKAGE.parents[1] / "conf") if folder.is_dir())

CALLER = "TRAINAPP_CALLER"  # the variable with the directory in which a command was given, if the run has another

# The files of a run that several rooms read, by their place in its directory. The names are a format: runs of earlier
# versions have them.
HYDRA = ".hydra"
CONFIG = f"{HYDRA}/config.yaml"  # as composed
OVERRIDES = f"{HYDRA}/overrides.yaml"
COMMAND = f"{HYDRA}/command.json"  # for `trainapp continue`
LOG = "trainapp.log"
RECIPE = "recipe.json"  # how the run trains, as it was built
METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
CALLBACKS = "callbacks.jsonl"
RESULT = "result.json"
PLAN = "plan.json"  # of mode=plan
OOM_REPORTS = "oom"
CHECKPOINTS = "checkpoints"
BEST = "best"  # in CHECKPOINTS: a file with the name of the best one
VALUES = "values.pt"  # of a checkpoint: everything except the tensors of model, optimizer and average


def checkpoint_name(step: int) -> str:
    """Return the name of a step's checkpoint in CHECKPOINTS."""
    return f"step_{step:08d}"


def cache_directory(setting: str | None = None) -> Path:
    """Return `setting`, or $TRAINAPP_CACHE, or $XDG_CACHE_HOME/trainapp, or ~/.cache/trainapp. May not exist yet."""
    folder = setting or os.environ.get("TRAINAPP_CACHE")
    if folder:
        return Path(folder).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "trainapp"


def shown(path: Path) -> str:
    """Return the path as a user would type it, quoted."""
    start = Path(os.environ.get(CALLER) or Path.cwd())
    text = str(path)
    if path.is_relative_to(start):
        text = os.path.relpath(path, start)
    return shlex.quote(text)


@contextlib.contextmanager
def atomic_write(path: Path, mode: str = "w", sync: bool = False) -> Iterator[IO[Any]]:
    """Yield a new file that replaces `path` when the block ends; after an error in the block, `path` is unchanged.

    Several processes may write the same path at once: each has its own temporary file, and the last rename wins.
    A process that is killed inside the block leaves a file named `.tmp-*` next to `path`.

    Raises OSError if the file cannot be written.

    Args:
        path: the file to replace.
        mode: "w" or "wb".
        sync: survive a power failure; waits for the disk, typically a few milliseconds.
    """
    temporary = path.parent / f".tmp-{uuid.uuid4().hex}"
    new_file_mode = mode.replace("w", "x")
    try:
        with open(temporary, new_file_mode) as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, path)  # after closing: a network file system may report a full disk only then
        if sync:
            fsync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def fsync(path: Path) -> None:
    """Wait until a file's content, or a directory's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file with one per line, without incomplete lines left by an error or a kill."""
    return list(each_json_line(path))


def each_json_line(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the same, one at a time, for files that may be long."""
    if not path.exists():
        return
    with path.open() as file:
        for line in file:
            try:
                facts = json.loads(line)
            except ValueError:
                continue
            if isinstance(facts, dict):
                yield facts


def json_object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file; empty if the file is missing or half written."""
    try:
        facts = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def strict_json(value: Any, **options: Any) -> str:
    """Do `json.dumps`, with null for each non-finite number.

    An object gets a note next to it: `{"loss": nan}` becomes `{"loss": null, "loss_note": "nan"}`, unless it already
    has one. options: options of `json.dumps`.
    """
    with contextlib.suppress(ValueError):  # most are finite
        return json.dumps(value, allow_nan=False, **options)
    return json.dumps(_finite(value), allow_nan=False, **options)


def _finite(value: Any) -> Any:
    """Return the value with None for each non-finite number, and a note next to those of an object."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        notes = {}
        for key, item in value.items():
            if isinstance(item, float) and not math.isfinite(item):
                notes[f"{key}_note"] = str(float(item))
        return notes | {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
