"""What a worker that ran out of memory leaves for the restarted ones, in a file of the run directory."""

import contextlib
import json
from pathlib import Path
from typing import Any

from trainapp.files import atomic_write, strict_json
from trainapp.parallel.ranks import Ranks

RESTART = "restart.json"


def leave(run_dir: Path, restart: dict[str, Any]) -> None:
    """Leave sizes and the number of recoveries so far, `oom_restarts`. Raises OSError where they cannot be written."""
    with atomic_write(run_dir / RESTART) as file:
        file.write(strict_json(restart))


def take(run_dir: Path, has_restarted: bool, ranks: Ranks) -> dict[str, Any] | None:
    """What was left, once: the file is removed. None if there is nothing.

    Collective: rank 0 reads for all. has_restarted: False only removes what an earlier start has left.
    """
    restart = None
    if ranks.is_rank_zero:
        restart = _read(run_dir)
        with contextlib.suppress(OSError):
            (run_dir / RESTART).unlink(missing_ok=True)
    restart = ranks.all_gather_object(restart)[0]
    return restart if has_restarted else None


def recoveries(run_dir: Path) -> int:
    """The number of recoveries in what was left; 0 if there is nothing."""
    return (_read(run_dir) or {}).get("oom_restarts", 0)


def _read(run_dir: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        return json.loads((run_dir / RESTART).read_text())
    return None
