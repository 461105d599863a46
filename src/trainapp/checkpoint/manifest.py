"""The manifest of a checkpoint: what it holds, and the size and digest of each file, which reveal damage.

It ends with a digest of itself: a flipped bit in the configuration, say in the seed, would otherwise be believed.
"""

import hashlib
import json
import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from trainapp import __version__, strict_json
from trainapp.files import atomic_write

FORMAT = 2
MANIFEST = "manifest.json"
_PARTS = {"format": int, "step": int, "ranks": int, "versions": dict, "files": dict, "config": dict}
_NO_DIGEST = "0" * 64
_ENDING = re.compile(rb'"sha256": "([0-9a-f]{64})"\n}\n\Z')


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
    with atomic_write(folder / MANIFEST, "wb", sync=True) as file:
        file.write(with_digest(manifest))


def with_digest(manifest: dict[str, Any]) -> bytes:
    """The manifest as JSON whose last entry is the SHA-256 of the same bytes with zeros in place of the digest."""
    parts = {name: value for name, value in manifest.items() if name != "sha256"}
    content = strict_json.dumps(parts | {"sha256": _NO_DIGEST}, indent=1).encode() + b"\n"
    digest = hashlib.sha256(content).hexdigest()
    return content[: -len(_ending(_NO_DIGEST))] + _ending(digest)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint at `path`.

    Raises ValueError when it does not match its own digest or lacks a part, OSError when it cannot be read.
    """
    content = (path / MANIFEST).read_bytes()
    found = _ENDING.search(content)
    if found is None:
        raise ValueError("it does not end with its digest")
    digest = found[1].decode()
    if hashlib.sha256(content[: -len(found[0])] + _ending(_NO_DIGEST)).hexdigest() != digest:
        raise ValueError("it does not match its digest")
    manifest = json.loads(content)
    for name, kind in _PARTS.items():
        if type(manifest.get(name)) is not kind:
            raise ValueError(f"{name!r} is missing or not of type {kind.__name__}")
    return manifest


def _ending(digest: str) -> bytes:
    return f'"sha256": "{digest}"\n}}\n'.encode()


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
        older = _format_without_digest(path)
        if older not in (None, FORMAT):
            return f"has format {older}, this version reads format {FORMAT}"
        return f"is damaged (its manifest cannot be used: {error})"
    return None


def _format_without_digest(path: Path) -> int | None:
    """The format of a manifest written before manifests had a digest, for the message alone."""
    try:
        content = (path / MANIFEST).read_bytes()
        return None if b'"sha256": "' in content[-80:] else int(json.loads(content)["format"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
