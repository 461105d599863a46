"""One step in a process of its own: python -m gpu_check.step FUNCTION --device DEVICE --folder FOLDER --rows FILE"""

import argparse
import contextlib
import ctypes
import importlib
import logging
import signal
from pathlib import Path

from .table import Table


def main() -> None:
    """Import the step and let it fill its table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("function")
    parser.add_argument("--device", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    options = parser.parse_args()
    end_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # what the runs say goes to the step's log
    module, _, name = options.function.partition(":")
    check = getattr(importlib.import_module(module), name)
    check(Table(options.rows), options.device, options.folder)


def end_with_parent() -> None:
    """Without its parent, nothing limits the step's time on the device. Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    main()
