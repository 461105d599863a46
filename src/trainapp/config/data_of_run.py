"""`mode=predict checkpointing.resume=RUN data.path=new.csv`: a change of the run's data, not of the default option.

Imports no torch.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainapp.config.command_line import quoted
from trainapp.config.schema import Loader

_OVERRIDE = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[\w.@/:]+)(?P<rest>=.*)?", re.DOTALL)
_CHECKPOINT = re.compile(r"step_(\d{8,})")
_MODES = ("eval", "predict", "generate", "export")
_LOADING = tuple(f"data.{field.name}" for field in dataclasses.fields(Loader))  # how data is loaded is no choice of it


def expanded(overrides: Sequence[str]) -> list[str]:
    """Hydra's overrides, with the data of the checkpoint that they name before those that change single settings of it.

    Unchanged where they choose data, as in `data=...`, and where no checkpoint can be read: the run will say why. Other
    arguments of the command line may be among the overrides.
    """
    texts, values = list(overrides), {}
    for text in texts:
        sign, key, rest = _parts(text)
        if not sign:
            values[key] = rest[1:].strip("'\"")
    changes = [number for number, text in enumerate(texts) if _changes_data(_parts(text)[1])]
    is_chosen = values.keys() & {"data", "data._target_", "experiment"}
    if values.get("mode") not in _MODES or "checkpointing.resume" not in values or not changes or is_chosen:
        return texts
    data = _saved_data(Path(values["checkpointing.resume"]).expanduser())
    if data is None:
        return texts
    own = [f"data.{name}={_written(value)}" for name, value in data["arguments"].items()]
    return [*texts[: changes[0]], f"data._target_={data['target']}", *own, *texts[changes[0] :]]


def _parts(text: str) -> tuple[str, str, str]:
    """The sign, name and rest, with its `=`, of an override; empty for other arguments."""
    match = None if text.startswith("-") else _OVERRIDE.fullmatch(text)
    return ("", "", "") if match is None else (match["sign"] or "", match["key"], match["rest"] or "")


def _changes_data(key: str) -> bool:
    return key.startswith("data.") and not any(key == name or key.startswith(f"{name}.") for name in _LOADING)


def _saved_data(path: Path) -> dict[str, Any] | None:
    """The section `data` of the checkpoint that `checkpoint.directory.resolve` takes. (That module imports torch.)"""
    if path.is_file():
        path = path.parent / path.read_text().strip() if path.name == "best" else path.parent
    folder = path if path.name == "checkpoints" else path / "checkpoints"
    steps = {int(named[1]): one for one in folder.glob("step_*") if (named := _CHECKPOINT.fullmatch(one.name))}
    for checkpoint in (path, *(steps[step] for step in sorted(steps, reverse=True))):
        try:
            data = json.loads((checkpoint / "manifest.json").read_text())["config"]["data"]
            return data if isinstance(data["arguments"], dict) and isinstance(data["target"], str) else None
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def _written(value: Any) -> str:
    """The value in Hydra's grammar."""
    if isinstance(value, dict):
        items = ((re.sub(r"([^\w.-])", r"\\\1", str(key)), _written(own)) for key, own in value.items())
        return f"{{{','.join(f'{key}:{own}' for key, own in items)}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    return quoted(value) if isinstance(value, str) else json.dumps(value)
