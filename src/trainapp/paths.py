"""Directories of this program and of its user."""

import os
from pathlib import Path

PACKAGE = Path(__file__).parent
# An installed wheel carries conf/ inside the package; a checkout has it at its root.
CONF = next(folder for folder in (PACKAGE / "conf", PACKAGE.parents[1] / "conf") if folder.is_dir())


def user_cache_dir() -> Path:
    """$TRAINAPP_CACHE, or $XDG_CACHE_HOME/trainapp, or ~/.cache/trainapp. It need not exist yet."""
    if chosen := os.environ.get("TRAINAPP_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "trainapp"
