"""Directories of this user."""

import os
from pathlib import Path


def user_cache_dir() -> Path:
    """$TRAINAPP_CACHE, or $XDG_CACHE_HOME/trainapp, or ~/.cache/trainapp. It need not exist yet."""
    if chosen := os.environ.get("TRAINAPP_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "trainapp"
