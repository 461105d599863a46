"""The manifest of a checkpoint: its format, step, configuration and versions, the size and digest of each of its files,
and a digest of all this. Imports no torch: a run directory is compared before torch is imported.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from trainapp.errors import UserError
from trainapp.files import atomic_write, strict_json

FORMAT = 3
MANIFEST = "manifest.json"
_DIGEST = "sha256"  # the key of the manifest's own digest, of all other keys


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the verified manifest of the checkpoint.

    Raises UserError for another format, OSError if it cannot be read, ValueError if it is damaged.
    """
    manifest = read_any_manifest(checkpoint)
    if manifest.get("format") != FORMAT:
        raise UserError(
            f"checkpoint {checkpoint} has format {manifest.get('format')}, but this version reads format {FORMAT}: "
            "continue its run with the version of trainapp that wrote it, or export its weights there (mode=export) "
            "and start a new run from them in another directory (model.init_from)"
        )
    return manifest


def read_any_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the verified manifest, of any format. A manifest without a digest was written by an earlier version and is
    accepted.

    Raises OSError if it cannot be read, ValueError if it is damaged.
    """
    manifest = json.loads((checkpoint / MANIFEST).read_bytes())
    if not isinstance(manifest, dict):
        raise ValueError("it is not an object")
    digest = manifest.pop(_DIGEST, None)
    if digest is not None and digest != _digest_of(manifest):
        raise ValueError("it does not match its own digest")
    return manifest


def write_manifest(checkpoint: Path, content: dict[str, Any]) -> None:
    """Write the content and its digest, and wait until they are on the disk. Raises OSError."""
    manifest = json.loads(strict_json(content))  # as it will be read: keys are strings, tuples are lists
    manifest[_DIGEST] = _digest_of(manifest)
    with atomic_write(checkpoint / MANIFEST, sync=True) as file:
        file.write(json.dumps(manifest, indent=1) + "\n")


def _digest_of(manifest: dict[str, Any]) -> str:
    """Return the digest of the values, whatever the order of keys and the blanks between them."""
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
