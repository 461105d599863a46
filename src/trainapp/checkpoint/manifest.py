"""The manifest of a checkpoint: what it holds, and the size and digest of each file, which reveal damage."""

import hashlib
import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from trainapp import __version__
from trainapp.files import atomic_write

FORMAT = 2
MANIFEST = "manifest.json"


def write_manifest(folder: Path, step: int, config: dict[str, Any], files: dict[str, Any], world: int) -> None:
    """Write the manifest of the checkpoint in `folder`. files: from `describe`, of all ranks."""
    manifest = {
        "format": FORMAT,
        "step": step,
        "ranks": world,
        "versions": {"trainapp": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "files": files,
        "config": config,
    }
    with atomic_write(folder / MANIFEST, sync=True) as file:
        json.dump(manifest, file, indent=1)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint that `resolve` or `newest` returned."""
    return json.loads((path / MANIFEST).read_text())


def describe(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Size in bytes and SHA-256 of each file, by name."""
    return {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in paths}


def damage(path: Path) -> str | None:
    """Why the checkpoint at `path` cannot be used, as a predicate ("is damaged ..."); None if it can.

    Every file must be present with the size and digest in the manifest. Reads all of it: about 3 s per GB.
    """
    try:
        manifest = read_manifest(path)
        if manifest["format"] != FORMAT:
            return f"has format {manifest['format']}, this version reads format {FORMAT}"
        for name, expected in manifest["files"].items():
            size = (path / name).stat().st_size
            if size != expected["bytes"]:
                return f"is damaged ({name} has {size} bytes, not {expected['bytes']})"
            if _sha256(path / name) != expected["sha256"]:
                return f"is damaged ({name} does not match its digest)"
    except FileNotFoundError as error:
        return f"is damaged ({Path(error.filename).name} is missing)"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"is damaged (unreadable manifest: {error})"
    return None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
