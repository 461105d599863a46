"""Where a rank logs."""

import logging
import sys
from pathlib import Path

from trainapp.files import LOG
from trainapp.tracking import terminal


def log_to_run_dir(run_dir: Path, rank: int) -> None:
    """Send the log of rank 0 to the run's log and to the terminal, that of any other rank to a file in ranks/."""
    path = run_dir / LOG
    if rank > 0:
        path = run_dir / "ranks" / f"rank_{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)

    file = logging.FileHandler(path)
    file.setFormatter(logging.Formatter("[%(asctime)s] %(levelname)s %(message)s"))
    handlers: list[logging.Handler] = [file]
    if rank == 0:
        screen = terminal.Handler(sys.stderr)
        screen.addFilter(lambda record: record.exc_info is None)  # the launcher shows the traceback
        handlers.append(screen)

    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=handlers, force=True)
