"""Facts that outlive a run: one small JSON file per description of a configuration, in the user's cache directory."""

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from trainapp import strict_json
from trainapp.config.schema import Config, Optimizer
from trainapp.files import atomic_write
from trainapp.paths import user_cache_dir


def optimizer_of(config: Config) -> list[Any]:
    """The settings that decide what the optimizer holds, and where."""
    return settings_of(config.optimizer)


def settings_of(optimizer: Optimizer) -> list[Any]:
    """The same of one of several."""
    return [optimizer.target, optimizer.arguments, optimizer.fused, optimizer.in_backward, optimizer.offload]


def read(folder: str, description: dict[str, Any]) -> dict[str, Any] | None:
    """What was written for this description; None where there is no readable file."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        known = json.loads(path_of(folder, description).read_text())
        return known if isinstance(known, dict) else None
    return None


def write(folder: str, description: dict[str, Any], facts: dict[str, Any]) -> None:
    """Replace what is known. A cache directory that cannot be written is ignored."""
    path = path_of(folder, description)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(strict_json.dumps(facts, indent=1, default=str))


def path_of(folder: str, description: dict[str, Any]) -> Path:
    """The file in this folder of the cache directory."""
    text = json.dumps(description, sort_keys=True, default=str)
    return user_cache_dir() / folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
